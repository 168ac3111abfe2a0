"""The validation run: translate, fit on other groups, predict, score."""

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
from pruning.validate.fit import Block
from pruning.validate.fit import Fit
from pruning.validate.fit import fit
from pruning.validate.fit import memory_like_measured
from pruning.validate.fit import predict
from pruning.validate.fit import widened
from pruning.validate.rows import read_table
from pruning.validate.rows import Row
from pruning.validate.translate import CannotPrice
from pruning.validate.translate import Priced
from pruning.validate.translate import Refused
from pruning.validate.translate import translate
from search_space.errors import UserError
from search_space.hardware import GIB
from search_space.pool import Pool


COUNTS = 8
"""Measured rows from which a group counts in the medians."""


@dataclass(frozen=True)
class Memory:
    """How a table's peak memory may be used."""

    allocated: bool = False
    """Allocated instead of reserved."""

    rank: int | None = None
    """Pipeline rank it was read on; -1 the last."""


MEMORY = {
    "nanotron_ultrascale_bench": Memory(rank=0),
    "simumax_b200_real": Memory(allocated=True),
    "megatron_lm_ci_golden": Memory(allocated=True, rank=-1),
    "torchtitan_qwen3_14b_b200": Memory(),
    "torchtitan_docs": Memory(),
    "torchao_float8": Memory(),
}
"""Tables whose memory is usable, by what it means; nvidia-smi integers and unknown bases are left out."""

RELATIVE_TIMES = ("megatron_lm_ci_golden",)
"""Tables whose times compare only with each other (shared test machines): ranked, but not in absolute errors."""


@dataclass
class Group:
    """Rows of one model, hardware, scale and batch, in blocks of equal habits."""

    key: tuple[str, ...]
    family: str
    rows: list[Priced]
    blocks: list[Block]
    order: list[list[int]]


def group_rows(rows: Sequence[Priced]) -> list[Group]:
    """Groups in the order of their first row."""
    found: dict[tuple[str, ...], list[Priced]] = defaultdict(list)
    for row in rows:
        found[(*row.group, row.family)].append(row)
    groups = []
    for key, members in found.items():
        parts: dict[Any, list[int]] = defaultdict(list)
        for i, member in enumerate(members):
            parts[(member.account, member.setting.shape, member.setting.hardware.name)].append(i)
        blocks = [_block([members[i] for i in index]) for index in parts.values()]
        groups.append(Group(key[:-1], key[-1], members, blocks, list(parts.values())))
    return groups


def _block(rows: list[Priced]) -> Block:
    memory = MEMORY.get(rows[0].row.table)
    times = [row.row.step_time_s() for row in rows]
    peaks = [row.row.number("peak_mem_gib") if memory else None for row in rows]
    return Block(
        setting=rows[0].setting,
        account=rows[0].account,
        pool=Pool.from_candidates([row.candidate for row in rows]),
        links=(np.array([row.links[0] for row in rows]), np.array([row.links[1] for row in rows])),
        time=np.log([time if time else np.nan for time in times]),
        memory=np.log([peak * GIB if peak else np.nan for peak in peaks]),
        allocated=memory.allocated if memory else False,
        rank=memory.rank if memory else None,
    )


@dataclass(frozen=True)
class Scored:
    """Predictions of one group in the order of its rows."""

    step_s: np.ndarray
    low_s: np.ndarray
    high_s: np.ndarray
    memory_gib: np.ndarray
    surely_gib: np.ndarray


def score(group: Group, coefficients: Coefficients) -> Scored:
    """Price a group's rows."""
    n = len(group.rows)
    out = [np.zeros(n) for _ in range(5)]
    for block, index in zip(group.blocks, group.order):
        _, _, prices = predict(block, coefficients)
        memory = memory_like_measured(block, prices, coefficients)
        columns = (prices.step_time_s, prices.step_time_low_s, prices.step_time_high_s, memory / GIB)
        for array, values in zip(out, (*columns, prices.memory_surely_bytes / GIB)):
            array[index] = values
    return Scored(*out)


def validate(paths: Sequence[str | Path], calibrate: str = "none", margins: Sequence[float] = (0.0,)) -> dict[str, Any]:
    """Check the ledger against tables of measurements.

    Args:
        paths: CSV files under the common header.
        calibrate: ``none`` uses the shipped priors; ``loo`` coefficients fitted on the other groups of the same
            framework and hardware; a number K fits those plus the first K measured rows of the group itself.
        margins: shares of device memory that a verdict leaves free. The first (absent: the shipped one) decides the
            figures and the rejected best; the others only add their confusion to ``feasibility_by_margin``.

    Returns:
        The document of ``tune validate``.

    Raises:
        UserError: a table cannot be read, or ``calibrate`` is none of the three.
    """
    own = _own_rows(calibrate)
    priced: list[Priced] = []
    unpriced: list[dict[str, str]] = []
    refused: list[dict[str, str]] = []
    for path in paths:
        for row in read_table(path):
            try:
                priced.append(translate(row))
            except Refused as reason:
                refused.append({"row_id": f"{row.table}:{row.row_id}", "why": str(reason)})
            except CannotPrice as reason:
                unpriced.append({"row_id": f"{row.table}:{row.row_id}", "why": str(reason)})
    groups = group_rows(priced)
    coefficients = _coefficients(groups, calibrate, own)
    results = []
    tallies = _Tallies(tuple(margins))
    for number, group in enumerate(groups):
        results.append(_judge(group, score(group, coefficients[number]), tallies, own))
    overall = _overall(results, tallies) | {
        "priced_rows": len(priced),
        "unpriced_rows": len(unpriced),
        "refused_rows": len(refused),
    }
    document = {"calibrate": calibrate, "groups": results, "overall": overall}
    return document | {"unpriced": unpriced, "refused": refused}


def _own_rows(calibrate: str) -> int:
    if calibrate in ("none", "loo"):
        return 0
    if not calibrate.isdigit() or int(calibrate) < 1:
        raise UserError(f"--calibrate: found {calibrate!r}, needs none, loo or a number of rows")
    return int(calibrate)


def _coefficients(groups: list[Group], calibrate: str, own: int) -> list[Coefficients]:
    """For every group the coefficients that it is predicted with."""
    if calibrate == "none":
        return [prior(group.blocks[0].setting) for group in groups]
    families: dict[str, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        families[group.family].append(number)
    chosen: list[Coefficients] = [prior(group.blocks[0].setting) for group in groups]
    for numbers in families.values():
        fitted, owners = fit_family([groups[number] for number in numbers])
        if fitted is None:
            continue
        for position, number in enumerate(numbers):
            mine = [i for i, owner in enumerate(owners) if owner == position]
            others = fitted.without(mine)
            if own:
                few = [block for block in _first_rows(groups[number], own)]
                others = fit(others, few).without([]) if few else others
            chosen[number] = others
    return chosen


def fit_family(groups: list[Group]) -> tuple[Fit | None, list[int]]:
    """The common fit of all groups of one framework and hardware, and which group each block belongs to."""
    blocks: list[Block] = []
    owners: list[int] = []
    for position, group in enumerate(groups):
        for block in group.blocks:
            if not (np.isnan(block.time).all() and np.isnan(block.memory).all()):
                blocks.append(_measured_only(block))
                owners.append(position)
    if not blocks:
        return None, owners
    return fit(widened(prior(blocks[0].setting), 1.5), blocks), owners


def _measured_only(block: Block) -> Block:
    return block.take(~(np.isnan(block.time) & np.isnan(block.memory)))


def _first_rows(group: Group, count: int) -> list[Block]:
    left, out = count, []
    for block in group.blocks:
        measured = np.flatnonzero(~np.isnan(block.time))[:left]
        if len(measured):
            part = block.take(measured)
            out.append(part)
            left -= len(measured)
    return out


class _Tallies:
    """Sums over all groups."""

    def __init__(self, margins: tuple[float, ...]) -> None:
        self.margins = margins
        self.fill: list[tuple[float, bool]] = []
        self.step_errors: list[float] = []
        self.memory_errors: dict[str, list[float]] = defaultdict(list)
        self.assumed_errors: dict[str, list[float]] = defaultdict(list)
        self.unjudged = 0
        self.covered: list[bool] = []
        self.widths: list[float] = []
        self.ran: list[bool] = []
        self.died: list[bool] = []


def _judge(group: Group, scored: Scored, tallies: _Tallies, own: int) -> dict[str, Any]:
    rows: list[Row] = [priced.row for priced in group.rows]
    measured = np.array([row.step_time_s() or np.nan for row in rows])
    timed = ~np.isnan(measured)
    capacity = group.blocks[0].setting.hardware.memory_bytes / GIB
    fits = scored.surely_gib <= capacity * (1 - tallies.margins[0])
    for i, row in enumerate(rows):
        oom = row.flag("oom")
        if not group.rows[i].judged:
            tallies.unjudged += oom is not None
        elif oom is not None:
            (tallies.died if oom else tallies.ran).append(bool(fits[i]))
            tallies.fill.append((float(scored.surely_gib[i] / capacity), oom))
        peak = row.number("peak_mem_gib")
        if peak and row.table in MEMORY:
            errors = tallies.memory_errors if group.rows[i].shaped else tallies.assumed_errors
            errors[row.table].append(100 * abs(scored.memory_gib[i] / peak - 1))
    if rows[0].table not in RELATIVE_TIMES:
        predicted, truth = scored.step_s[timed], measured[timed]
        tallies.step_errors += list(100 * np.abs(predicted / truth - 1))
        tallies.covered += list((scored.low_s[timed] <= truth) & (truth <= scored.high_s[timed]))
        tallies.widths += list(50 * (scored.high_s[timed] - scored.low_s[timed]) / predicted)
    timed = timed & np.array([row.ranks for row in rows])
    n = int(timed.sum())
    alike = _configurations(group, timed)
    predicted = np.array([np.median(scored.step_s[index]) for index in alike])
    truth = np.array([np.median(measured[index]) for index in alike])
    enough = len(alike) >= 2
    best = alike[int(truth.argmin())][0] if n else None
    table, model, hardware, gpus, seq_len, batch = group.key
    return {
        "table": table,
        "model": model,
        "hardware": hardware,
        "gpus": int(gpus),
        "seq_len": int(seq_len),
        "global_batch_seqs": int(float(batch)) if batch else None,
        "rows": len(rows),
        "n": n,
        "configurations": len(alike),
        "spearman": _finite(metrics.spearman(predicted, truth)) if enough else None,
        "top1_regret_pct": metrics.regret_pct(predicted, truth, 1) if enough else None,
        "top3_regret_pct": metrics.regret_pct(predicted, truth, 3) if enough else None,
        "top1_regret_rows_pct": metrics.regret_pct(scored.step_s[timed], measured[timed], 1) if n >= 2 else None,
        "step_time_mape_pct": metrics.mean_error_pct(scored.step_s[timed], measured[timed]) if n else None,
        "best_rejected": bool(best is not None and group.rows[best].judged and not fits[best]),
    }


def _configurations(group: Group, timed: np.ndarray) -> list[np.ndarray]:
    """Positions of the timed rows of each configuration that the ledger can tell apart.

    Tables repeat one configuration under several software releases or on several days. Nothing that a planner knows
    tells these rows apart, so they rank as one, by their medians.
    """
    found: dict[Any, list[int]] = defaultdict(list)
    for i in np.flatnonzero(timed):
        row = group.rows[i]
        found[(row.candidate, row.account, row.setting.shape)].append(int(i))
    return [np.array(index) for index in found.values()]


def _overall(results: list[dict[str, Any]], tallies: _Tallies) -> dict[str, Any]:
    counted = [result for result in results if result["n"] >= COUNTS]
    memory = [error for errors in tallies.memory_errors.values() for error in errors]
    overall: dict[str, Any] = {"groups": len(counted)} | _medians(counted)
    overall |= {
        "step_time_mape_pct": _mean(tallies.step_errors),
        "memory_mape_pct": _mean(memory),
        "memory_max_pct": max(memory, default=None),
        "memory_mape_pct_by_table": {table: _mean(errors) for table, errors in tallies.memory_errors.items()},
        "memory_mape_pct_assumed_shapes": {table: _mean(errors) for table, errors in tallies.assumed_errors.items()},
        "false_feasible_pct": _share([fits for fits in tallies.died]),
        "false_infeasible_pct": _share([not fits for fits in tallies.ran]),
        "feasibility_by_margin": {
            f"{margin:g}": {
                "false_feasible_pct": _share([fill <= 1 - margin for fill, oom in tallies.fill if oom]),
                "false_infeasible_pct": _share([fill > 1 - margin for fill, oom in tallies.fill if not oom]),
            }
            for margin in tallies.margins
        },
        "interval_coverage_pct": _share(tallies.covered),
        "median_interval_width_pct": metrics.median(tallies.widths),
        "best_rejected": sum(result["best_rejected"] for result in counted),
        "best_rejected_small_groups": sum(result["best_rejected"] for result in results if result["n"] < COUNTS),
        "ran_rows": len(tallies.ran),
        "oom_rows": len(tallies.died),
        "feasibility_unjudged_rows": tallies.unjudged,
        "tables": {
            table: {"groups": len(mine)} | _medians(mine)
            for table in dict.fromkeys(result["table"] for result in counted)
            for mine in [[result for result in counted if result["table"] == table]]
        },
    }
    return overall


def _medians(counted: list[dict[str, Any]]) -> dict[str, Any]:
    def column(name: str) -> list[float]:
        return [result[name] for result in counted if result[name] is not None]

    return {
        "median_spearman": metrics.median(column("spearman")),
        "median_top1_regret_pct": metrics.median(column("top1_regret_pct")),
        "median_top1_regret_rows_pct": metrics.median(column("top1_regret_rows_pct")),
        "p90_top3_regret_pct": metrics.percentile(column("top3_regret_pct"), 90),
        "median_step_time_mape_pct": metrics.median(column("step_time_mape_pct")),
    }


def _finite(value: float) -> float | None:
    return None if np.isnan(value) else value


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _share(flags: list[bool]) -> float | None:
    return float(100 * np.mean(flags)) if flags else None
