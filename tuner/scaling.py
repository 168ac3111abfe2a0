"""Predicted MFU against scale: the best candidate at every device count, and the part that limits it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pruning.assess import assess
from pruning.coefficients import Coefficients
from pruning.explain import plan_entry
from pruning.ledger.prices import PARTS
from search_space.enumerate import enumerate_pool
from search_space.errors import UserError
from search_space.job import SearchSection
from search_space.setting import Setting
from tuner.figures import save_figure


BATCHES = ("recipe", "per-device")
"""What happens to the global batch: it stays as the recipe says, or grows with the devices."""


def parse_scales(text: str) -> list[int]:
    """Device counts from ``8,64,512``, ascending.

    Raises:
        UserError: one is no positive whole number.
    """
    words = [word.strip().replace("_", "") for word in text.split(",") if word.strip()]
    if not words or not all(word.isdigit() and 0 < int(word) <= 1_000_000 for word in words):
        raise UserError(f"--scaling {text!r}: needs device counts such as 8,64,512,1024")
    return sorted({int(word) for word in words})


def at_scale(setting: Setting, devices: int, batch: str) -> Setting:
    """The setting on another number of devices.

    Raises:
        UserError: the devices are no whole number of nodes.
    """
    per_node = min(setting.devices_per_node, devices)
    if devices % per_node:
        raise UserError(f"--scaling: {devices} devices are no whole number of nodes of {per_node}")
    seqs = setting.global_batch_seqs
    if batch == "per-device":
        seqs = max(1, round(seqs * devices / setting.num_devices))
    return replace(setting, devices_per_node=per_node, nodes=devices // per_node, global_batch_seqs=seqs)


def scaling(
    setting: Setting,
    search: SearchSection,
    scales: Sequence[int],
    batch: str = "recipe",
    coefficients: Coefficients | None = None,
) -> list[dict[str, Any]]:
    """One entry a device count, with the keys of a plan's candidate where anything is feasible.

    ``limiting_part`` is the part whose share of the step grew most since the smallest feasible scale, there the largest
    part; ``points`` is each part's share of the step in percent: with the MFU they add up to 100.

    Args:
        setting: the job's.
        search: allowed knob values; degrees that the job lists stay listed.
        scales: device counts, ascending.
        batch: one of :data:`BATCHES`.
        coefficients: calibrated ones.

    Raises:
        UserError: a count is no whole number of nodes.
    """
    entries: list[dict[str, Any]] = []
    first: dict[str, float] | None = None
    for devices in scales:
        here = at_scale(setting, devices, batch)
        pool = enumerate_pool(here, search.knobs, search.allow_numeric_changes)
        entry: dict[str, Any] = {
            "devices": devices,
            "global_batch_seqs": here.global_batch_seqs,
            "enumerated": len(pool),
            "feasible": 0,
        }
        entries.append(entry)
        if not len(pool):
            entry |= {"limiting_part": None, "why": "no layout divides the batch over so many devices"}
            continue
        assessment = assess(pool, here, coefficients)
        feasible = np.flatnonzero(assessment.feasible)
        entry["feasible"] = len(feasible)
        if not len(feasible):
            why = ", ".join(f"{group['count']} {group['code']}" for group in assessment.rejected())
            entry |= {"limiting_part": None, "why": f"nothing fits: {why}"}
            continue
        order = np.lexsort((assessment.prices.step_time_s[feasible], assessment.doubtful[feasible]))
        entry |= plan_entry(assessment, int(feasible[order[0]]))
        shares = {part: entry["parts_s"][part] / entry["step_time_s"] for part in PARTS}
        entry["points"] = {part: 100 * share for part, share in shares.items()}
        entry["largest_part"] = max(PARTS, key=lambda part: shares[part])
        grown = {part: shares[part] - (first or {}).get(part, 0.0) for part in PARTS}
        entry["limiting_part"] = max(PARTS, key=lambda part: grown[part])
        first = first or shares
    return entries


def plot(entries: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """MFU with its interval against devices, and under it what each part costs.

    Raises:
        UserError: nothing is feasible anywhere, or the picture cannot be written.
    """
    known = [entry for entry in entries if entry["feasible"]]
    if not known:
        raise UserError("--plot: nothing is feasible at any of these scales, so there is nothing to draw")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    devices = [entry["devices"] for entry in known]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9.0, 6.5), sharex=True, layout="constrained")
    above.plot(devices, [entry["mfu_pct"] for entry in known], marker="o")
    low, high = zip(*(entry["mfu_pct_interval"] for entry in known))
    above.fill_between(devices, low, high, alpha=0.15, linewidth=0)
    for number, entry in enumerate(known):
        words = entry["limiting_part"].replace("_", " ")
        place = (0, 8) if number % 2 == 0 else (0, -16)
        point = (entry["devices"], entry["mfu_pct"])
        above.annotate(words, point, textcoords="offset points", xytext=place, fontsize=8, ha="center")
    above.margins(x=0.12)
    above.set_ylabel("predicted MFU, %")
    above.set_title(title, fontsize=10)
    below.stackplot(
        devices,
        *[[max(0.0, entry["points"][part]) for entry in known] for part in PARTS],
        labels=[part.replace("_", " ") for part in PARTS],
    )
    below.set_ylabel("lost to each part, % of the step")
    below.set_xlabel("devices")
    below.set_xscale("log", base=2)
    below.set_xticks(devices, [str(count) for count in devices])
    below.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
    save_figure(figure, path)
