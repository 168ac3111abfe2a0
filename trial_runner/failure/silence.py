"""Silence: a rank that records no step although its pace says that it should."""

from __future__ import annotations

from dataclasses import dataclass
import json
from pathlib import Path

import numpy as np

from trial_runner.spec import rank_steps


PATIENCE_STEPS = 50.0
"""Median step times without a step after which a trial counts as hung: recompilation and checkpoints are shorter."""

PATIENCE_S = {"cpu": 60.0, "gpu": 300.0}
"""Least patience by kind of device, seconds."""


@dataclass(frozen=True)
class Pace:
    """What a rank has recorded so far."""

    step: int
    """Its last step; 0 before the first."""

    median_s: float
    """Median step time, seconds; 0 before the second step."""

    at_s: float
    """When it last wrote, seconds since the epoch; 0 when it never did."""

    over: bool
    """Whether its measured window has ended: tracing and leaving keep their own time."""


def pace(folder: Path, rank: int) -> Pace:
    """The pace of one rank, from the end of its record."""
    path = rank_steps(folder, rank)
    try:
        written = path.stat().st_mtime
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 16_000))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return Pace(0, 0.0, 0.0, False)
    steps = []
    over = False
    for line in lines:
        try:
            facts = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "step" in facts:
            steps.append(facts)
            over = facts["phase"] == "trace"
        elif facts.get("event") == "finished":
            over = True
    times = [step["step_time_s"] for step in steps[1:]]
    return Pace(steps[-1]["step"] if steps else 0, float(np.median(times)) if times else 0.0, written, over)


def least_advanced(folder: Path, world_size: int) -> tuple[int | None, int]:
    """The rank that recorded the fewest steps, the earliest silent among equals, and its last step; None if none."""
    paces = [(pace(folder, rank), rank) for rank in range(world_size)]
    known = [(found.step, found.at_s, rank) for found, rank in paces if found.at_s]
    if not known:
        return None, 0
    step, _, rank = min(known)
    return rank, step


def hung(folder: Path, world_size: int, now_unix_s: float, device: str, first_step_left_s: float) -> str | None:
    """Failure class of a gang that has fallen silent; None while it is within its patience.

    Args:
        folder: the trial's folder.
        world_size: ranks.
        now_unix_s: the present, seconds since the epoch.
        device: ``cpu`` or ``gpu``.
        first_step_left_s: seconds left for the first step; negative when its deadline has passed.
    """
    lead = pace(folder, 0)
    if lead.over or (lead.step == 0 and first_step_left_s >= 0):
        return None
    if lead.step and now_unix_s - lead.at_s <= PATIENCE_S[device]:
        # Ranks step together: while one goes on there is no need to read the records of all.
        return None
    paces = [pace(folder, rank) for rank in range(world_size)]
    if any(found.over for found in paces):
        return None
    if all(found.step == 0 for found in paces):
        return "hang_first_step"
    patience = max(PATIENCE_S[device], PATIENCE_STEPS * max(found.median_s for found in paces))
    newest = max(found.at_s for found in paces)
    return "hang" if now_unix_s - newest > patience else None
