"""Measured facts of one trial, from the per-step records of all its ranks."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
import json
from pathlib import Path
from typing import Any

import numpy as np

from trial_runner.spec import rank_steps


BOOTSTRAP = 2000
"""Resamples of the bootstrap."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a trial measured. Times in seconds, memory in bytes."""

    steps: int
    """Steps in the measured window."""

    step_time_s: float
    """Median over the window of the slowest rank's step time."""

    step_time_p95_s: float
    """95th percentile of the same."""

    step_time_ci_s: tuple[float, float]
    """95% bootstrap interval of the median."""

    tokens_per_s_per_device: float
    """Tokens of a step / median step time / devices."""

    mfu_pct: float
    """Model FLOP utilisation: ideal time / median step time, percent."""

    hfu_pct: float
    """Hardware FLOP utilisation: the same with recomputed FLOP counted, percent."""

    peak_allocated_bytes: float
    """Largest allocation over all ranks after step 2 (resident memory on a CPU)."""

    peak_reserved_bytes: float
    """Largest reservation over all ranks after step 2 (resident memory on a CPU)."""

    loss: tuple[float, ...]
    """Loss of every step, warm-up included."""

    startup_s: dict[str, float] = field(default_factory=dict)
    """Seconds from process start to imports done, trainer built, first step done."""

    flags: tuple[str, ...] = ()
    """What disturbed the window: ``recompile``, ``alloc_retry``, ``gc``; or makes the trial no measure of a long run:
    ``leak``."""

    leak_bytes_per_step: float = 0.0
    """Growth of the memory held between steps, where it is flagged as a leak."""

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)


@dataclass(frozen=True)
class Records:
    """The per-step records of one trial, by rank."""

    steps: dict[int, list[dict[str, Any]]]
    """Step lines of each rank, in order."""

    events: dict[int, dict[str, float]]
    """Seconds since process start of each start-up event, by rank."""


def read_records(folder: Path, world_size: int) -> Records:
    """Read what the ranks wrote; ranks that wrote nothing are absent, a torn last line is dropped."""
    steps: dict[int, list[dict[str, Any]]] = {}
    events: dict[int, dict[str, float]] = {}
    for rank in range(world_size):
        path = rank_steps(folder, rank)
        if not path.exists():
            continue
        for line in path.read_text().splitlines():
            try:
                facts = json.loads(line)
            except json.JSONDecodeError:
                continue
            if "step" in facts:
                steps.setdefault(rank, []).append(facts)
            else:
                events.setdefault(rank, {})[facts["event"]] = facts["at_s"]
    return Records(steps, events)


def slowest_rank_times(records: Records, phase: str = "measured") -> np.ndarray:
    """Step times of ``phase``, the slowest rank's at each step, shape (steps that every rank recorded,)."""
    rows = [[step["step_time_s"] for step in steps if step["phase"] == phase] for steps in records.steps.values()]
    if not rows:
        return np.zeros(0)
    length = min(len(row) for row in rows)
    return np.array([row[:length] for row in rows]).max(axis=0)


def median_interval(times: np.ndarray, seed: int = 0, level: float = 0.95) -> tuple[float, float]:
    """Bootstrap interval of the median of ``times`` (shape (n,), n ≥ 1).

    Successive steps are correlated, so blocks of √n steps are drawn, not single ones.
    """
    n = len(times)
    block = max(1, int(np.sqrt(n)))
    starts = np.random.default_rng(seed).integers(0, n, size=(BOOTSTRAP, -(-n // block)))
    index = (starts[:, :, None] + np.arange(block)).reshape(BOOTSTRAP, -1)[:, :n] % n
    medians = np.median(times[index], axis=1)
    low, high = np.quantile(medians, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def measure(
    folder: Path,
    *,
    world_size: int,
    tokens_per_step: int,
    ideal_s: float,
    recompute_flop_share: float = 0.0,
    min_steps: int = 1,
) -> Measurement | None:
    """Summarise a trial.

    Args:
        folder: the trial's folder.
        world_size: ranks that should have recorded.
        tokens_per_step: tokens of one optimizer step over all devices.
        ideal_s: model FLOP / (devices × peak), seconds.
        recompute_flop_share: FLOP recomputed in backward as a share of the model FLOP (for HFU).
        min_steps: fewest measured steps that count.

    Returns:
        The measurement, or None when a rank recorded nothing or fewer than ``min_steps`` steps were measured.
    """
    records = read_records(folder, world_size)
    if len(records.steps) < world_size:
        return None
    times = slowest_rank_times(records)
    if len(times) < min_steps:
        return None
    median = float(np.median(times))
    leak = max(map(leak_bytes_per_step, records.steps.values()))
    mfu = 100 * ideal_s / median
    return Measurement(
        steps=len(times),
        step_time_s=median,
        step_time_p95_s=float(np.quantile(times, 0.95)),
        step_time_ci_s=median_interval(times),
        tokens_per_s_per_device=tokens_per_step / median / world_size,
        mfu_pct=mfu,
        hfu_pct=mfu * (1 + recompute_flop_share),
        peak_allocated_bytes=_peak(records, "allocated_bytes"),
        peak_reserved_bytes=_peak(records, "reserved_bytes"),
        loss=_losses(records),
        startup_s=_startup(records),
        flags=_flags(records) + (("leak",) if leak else ()) + (("impossible_mfu",) if mfu > 100 else ()),
        leak_bytes_per_step=leak,
    )


LEAK_SHARE = 0.03
"""Growth over the measured window, as a share of what is held, from which a steady growth is called a leak."""

LEAK_STEPS = 20
"""Fewest measured steps that show a leak."""


def leak_bytes_per_step(steps: list[dict[str, Any]]) -> float:
    """Steady growth of the memory that one rank holds between steps, bytes a step; 0 when there is none.

    A leak grows in every third of the window, by at least a quarter of the mean pace in each, and by
    :data:`LEAK_SHARE` in all. A pool that fills up once, or memory that goes up and down, does not.
    """
    held = np.array([step.get("held_bytes", 0.0) for step in steps if step["phase"] == "measured"])
    if len(held) < LEAK_STEPS or held[0] <= 0:
        return 0.0
    pace = (held[-1] - held[0]) / (len(held) - 1)
    cuts = np.linspace(0, len(held) - 1, 4).astype(int)
    thirds = np.diff(held[cuts]) / np.diff(cuts)
    steady = bool((thirds > pace / 4).all()) and held[-1] - held[0] > LEAK_SHARE * held[0]
    return float(pace) if steady and pace > 0 else 0.0


def _peak(records: Records, key: str) -> float:
    values = [
        step.get(key, 0)
        for steps in records.steps.values()
        for step in steps
        if step["step"] > 2 and step["phase"] != "trace"
    ]
    return float(max(values, default=0))


def _losses(records: Records) -> tuple[float, ...]:
    """The loss of each step from the first rank that knows it."""
    for _, steps in sorted(records.steps.items()):
        known = [step["loss"] for step in steps if step["loss"] is not None]
        if known:
            return tuple(known)
    return ()


def _startup(records: Records) -> dict[str, float]:
    names = ("imported", "built", "training")
    facts = {name: max((events.get(name, 0.0) for events in records.events.values()), default=0.0) for name in names}
    facts["first_step"] = max(steps[0]["at_s"] for steps in records.steps.values())
    return facts


def _flags(records: Records) -> tuple[str, ...]:
    flags = set()
    for steps in records.steps.values():
        window = [step for step in steps if step["phase"] == "measured"]
        if any(step["compiles"] for step in window):
            flags.add("recompile")
        if any(step["gc_s"] > 0.1 * step["step_time_s"] for step in window):
            flags.add("gc")
        if window and window[-1].get("alloc_retries", 0) > window[0].get("alloc_retries", 0):
            flags.add("alloc_retry")
    return tuple(sorted(flags))
