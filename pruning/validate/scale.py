"""Validation across scale: coefficients from a model's smallest runs predict its larger ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from pruning.validate import metrics
from pruning.validate.fit import fit
from pruning.validate.fit import widened
from pruning.validate.rows import read_table
from pruning.validate.run import fit_family
from pruning.validate.run import Group
from pruning.validate.run import group_rows
from pruning.validate.run import RELATIVE_TIMES
from pruning.validate.run import score
from pruning.validate.translate import CannotPrice
from pruning.validate.translate import Priced
from pruning.validate.translate import translate


@dataclass
class Series:
    """Groups of one model, hardware, framework and sequence length, at several device counts."""

    key: tuple[str, ...]
    """Table, model, hardware, sequence length, framework and hardware family."""

    groups: list[Group]
    """All of them, any number of devices."""

    def at(self, devices: int) -> list[Group]:
        """The groups at one device count."""
        return [group for group in self.groups if devices_of(group) == devices]

    @property
    def scales(self) -> list[int]:
        """Device counts with measured step times, ascending."""
        return sorted({devices_of(group) for group in self.groups if timed(group).any()})


def devices_of(group: Group) -> int:
    """Devices that a group ran on."""
    return group.rows[0].setting.num_devices


def timed(group: Group) -> np.ndarray:
    """Mask of a group's rows that have a step time and are meant for comparing, shape (n,)."""
    return np.array([bool(row.row.step_time_s()) and row.row.ranks for row in group.rows])


def series_of(groups: Sequence[Group]) -> list[Series]:
    """Series with at least two device counts; tables whose times compare only with each other are left out."""
    found: dict[tuple[str, ...], list[Group]] = defaultdict(list)
    for group in groups:
        table, model, hardware, _, seq_len, _ = group.key
        if table not in RELATIVE_TIMES:
            found[(table, model, hardware, seq_len, group.family)].append(group)
    series = [Series(key, members) for key, members in found.items()]
    return [one for one in series if len(one.scales) >= 2]


def _measured(groups: Sequence[Group]) -> int:
    return int(sum(timed(group).sum() for group in groups))


def validate_across_scale(paths: Sequence[str | Path], calibrate: str = "none") -> dict[str, Any]:
    """Predict larger runs from the smallest ones of the same model.

    Args:
        paths: CSV files under the common header.
        calibrate: what the fit on the smallest scale starts from: ``none`` the shipped priors, ``loo`` coefficients
            of the same framework and hardware fitted without any row of the series.

    Returns:
        ``series`` (one entry each, with one entry a predicted scale) and ``overall``.

    Raises:
        UserError: a table cannot be read.
    """
    priced: list[Priced] = []
    for path in paths:
        for row in read_table(path):
            try:
                priced.append(translate(row))
            except CannotPrice:
                continue
    groups = group_rows(priced)
    found = series_of(groups)
    starts = _starts(groups, found, calibrate)
    entries = [_judge(series, start) for series, start in zip(found, starts)]
    return {"calibrate": calibrate, "series": entries, "overall": _overall(entries)}


def _starts(groups: Sequence[Group], found: Sequence[Series], calibrate: str) -> list[Coefficients]:
    """For every series the coefficients that its fit starts from."""
    shipped = [widened(prior(series.groups[0].blocks[0].setting), 1.5) for series in found]
    if calibrate != "loo":
        return shipped
    families: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        families[group.family].append(group)
    fits = {name: fit_family(members) for name, members in families.items()}
    starts = []
    for series, own in zip(found, shipped):
        family = series.groups[0].family
        fitted, owners = fits[family]
        mine = {id(group) for group in series.groups}
        inside = [i for i, owner in enumerate(owners) if id(families[family][owner]) in mine]
        starts.append(own if fitted is None or len(inside) == len(owners) else fitted.without(inside))
    return starts


def _judge(series: Series, start: Coefficients) -> dict[str, Any]:
    smallest = series.scales[0]
    blocks = []
    for group in series.at(smallest):
        keep = timed(group)
        for block, index in zip(group.blocks, group.order):
            mine = keep[index]
            if mine.any():
                blocks.append(block.take(mine))
    coefficients = fit(start, blocks).without([])
    table, model, hardware, seq_len, _ = series.key
    larger = [_scale(series, devices, coefficients) for devices in series.scales[1:]]
    errors = [error for scale in larger for error in scale["errors_pct"]]
    covered = [inside for scale in larger for inside in scale.pop("covered")]
    return {
        "table": table,
        "model": model,
        "hardware": hardware,
        "seq_len": int(seq_len),
        "calibrated_on_gpus": smallest,
        "calibrated_on_rows": _measured(series.at(smallest)),
        "larger": larger,
        "rows": len(errors),
        "mfu_error_pct": float(np.median(errors)),
        "interval_coverage_pct": float(100 * np.mean(covered)),
    }


def _scale(series: Series, devices: int, coefficients: Coefficients) -> dict[str, Any]:
    errors: list[float] = []
    covered: list[bool] = []
    signed: list[float] = []
    for group in series.at(devices):
        keep = timed(group)
        if not keep.any():
            continue
        scored = score(group, coefficients)
        truth = np.array([row.row.step_time_s() or np.nan for row in group.rows])[keep]
        # MFU is ideal over step time, and the ideal is the same on both sides.
        off = truth / scored.step_s[keep] - 1
        errors += [float(value) for value in 100 * np.abs(off)]
        signed += [float(value) for value in 100 * off]
        covered += [bool(v) for v in (scored.low_s[keep] <= truth) & (truth <= scored.high_s[keep])]
    return {
        "gpus": devices,
        "n": len(errors),
        "mfu_error_pct": float(np.median(errors)),
        "mfu_bias_pct": float(np.median(signed)),
        "errors_pct": errors,
        "covered": covered,
    }


def _overall(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    scales = [scale for entry in entries for scale in entry["larger"]]
    tables = {}
    for table in dict.fromkeys(entry["table"] for entry in entries):
        mine = [entry for entry in entries if entry["table"] == table]
        tables[table] = {
            "series": len(mine),
            "rows": sum(entry["rows"] for entry in mine),
            "median_mfu_error_pct": metrics.median([entry["mfu_error_pct"] for entry in mine]),
        }
    return {
        "series": len(entries),
        "predicted_scales": len(scales),
        "rows": sum(entry["rows"] for entry in entries),
        "median_mfu_error_pct": metrics.median([entry["mfu_error_pct"] for entry in entries]),
        "median_mfu_error_by_scale_pct": metrics.median([scale["mfu_error_pct"] for scale in scales]),
        "median_mfu_error_by_row_pct": metrics.median([e for scale in scales for e in scale["errors_pct"]]),
        "tables": tables,
    }
