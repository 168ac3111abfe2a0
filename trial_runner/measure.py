"""Measured facts of one trial, from the per-step records of all its ranks."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
import json
from pathlib import Path
from typing import Any

import numpy as np

from trial_runner.compile_cache import cache_use
from trial_runner.spec import rank_steps
from trial_runner.stationary import shift
from trial_runner.stationary import warmed_up_at


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

    compile_cache: dict[str, int] = field(default_factory=dict)
    """Graphs found in the shared compile cache (``hits``) and compiled anew (``misses``), over all ranks."""

    flags: tuple[str, ...] = ()
    """What disturbed the window: ``recompile``, ``alloc_retry``, ``gc``, ``late_warmup``, ``shift`` (the step time
    changed inside it); or makes the trial no measure of a long run: ``leak``, ``impossible_mfu``; or that the machine's
    speed is not known: ``control_failed``."""

    undisturbed_s: float | None = None
    """Of a window whose step time changed, the median of its faster part, seconds."""

    leak_bytes_per_step: float = 0.0
    """Growth of the memory held between steps, where it is flagged as a leak."""

    gc_pct: float = 0.0
    """Garbage collection as a share of the window's time, on the rank where it is largest, percent."""

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

    began_unix_s: dict[int, float] = field(default_factory=dict)
    """When each rank's process began, seconds since the epoch."""

    prepared: dict[str, Any] = field(default_factory=dict)
    """How the trial was set up: ``gc_freq`` (steps between collections), ``start_mode``, and how fast its machine was:
    ``control`` (name of the work), ``control_s`` (the slowest rank's round, seconds), or ``control_failed`` in words.
    Only what was recorded."""


def read_records(folder: Path, world_size: int) -> Records:
    """Read what the ranks wrote; ranks that wrote nothing are absent, a torn last line is dropped."""
    steps: dict[int, list[dict[str, Any]]] = {}
    events: dict[int, dict[str, float]] = {}
    began: dict[int, float] = {}
    prepared: dict[str, Any] = {}
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
                if "unix_s" in facts:
                    began.setdefault(rank, facts["unix_s"] - facts["at_s"])
                if facts["event"] == "prepared":
                    prepared |= {key: facts[key] for key in ("gc_freq", "start_mode") if key in facts}
                if "control_s" in facts:
                    slowest = max(prepared.get("control_s", 0.0), facts["control_s"])
                    prepared |= {"control": facts["control"], "control_s": slowest}
                if "control_failed" in facts:
                    prepared["control_failed"] = facts["control_failed"]
    if "control_failed" in prepared:
        # The slowest rank may be the one that has no figure.
        prepared = {key: value for key, value in prepared.items() if key not in ("control", "control_s")}
    return Records(steps, events, began, prepared)


def slowest_rank_times(records: Records, phase: str = "measured") -> np.ndarray:
    """Step times of ``phase``, the slowest rank's at each step, shape (steps that every rank recorded,)."""
    rows = [[step["step_time_s"] for step in steps if step["phase"] == phase] for steps in records.steps.values()]
    if not rows:
        return np.zeros(0)
    length = min(len(row) for row in rows)
    return np.array([row[:length] for row in rows]).max(axis=0)


def steady_times(records: Records) -> np.ndarray:
    """The measured window of a trial without what of warm-up reached into it, shape (steps,)."""
    window = slowest_rank_times(records)
    return window[warmed_up_at(window) :]


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
    window = slowest_rank_times(records)
    if not len(window) or len(window) < min_steps:
        return None
    late = warmed_up_at(window)
    times = window[late:]
    median = float(np.median(times))
    leak = max(map(leak_bytes_per_step, records.steps.values()))
    mfu = 100 * ideal_s / median
    changed = shift(times)
    marks = {
        "leak": bool(leak),
        "impossible_mfu": mfu > 100,
        "late_warmup": bool(late),
        "shift": changed is not None,
    }
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
        compile_cache=cache_use(records.steps),
        undisturbed_s=min(changed.before_s, changed.after_s) if changed is not None else None,
        flags=_flags(records) + tuple(name for name, wanted in marks.items() if wanted),
        leak_bytes_per_step=leak,
        gc_pct=_gc_pct(records),
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


def _gc_pct(records: Records) -> float:
    shares = []
    for steps in records.steps.values():
        window = [step for step in steps if step["phase"] == "measured"]
        total = sum(step["step_time_s"] for step in window)
        shares.append(100 * sum(step["gc_s"] for step in window) / total if total else 0.0)
    return max(shares, default=0.0)


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
    if "control_failed" in records.prepared:
        flags.add("control_failed")
    return tuple(sorted(flags))


class StepWatch:
    """The steady steps of a running trial, read as its ranks write them.

    Args:
        folder: the trial's folder.
        world_size: ranks that record.
    """

    def __init__(self, folder: Path, world_size: int) -> None:
        self._folder, self._world = folder, world_size
        self._read: dict[int, int] = {}
        self._times: dict[int, list[float]] = {}
        self._skip = 0

    def times(self) -> np.ndarray:
        """The slowest rank's time of each measured step so far, after the last recompile and any late warm-up."""
        for rank in range(self._world):
            self._follow(rank)
        if len(self._times) < self._world:
            return np.zeros(0)
        length = min(len(times) for times in self._times.values())
        window = np.array([times[:length] for times in self._times.values()]).max(axis=0)[self._skip :]
        return np.asarray(window[warmed_up_at(window) :])

    def _follow(self, rank: int) -> None:
        """Read the whole lines that a rank has written since the last look."""
        path = rank_steps(self._folder, rank)
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read.get(rank, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[rank] = self._read.get(rank, 0) + len(whole)
        mine = self._times.setdefault(rank, [])
        for line in whole.splitlines():
            try:
                facts = json.loads(line)
            except json.JSONDecodeError:
                continue
            if facts.get("phase") == "measured":
                mine.append(facts["step_time_s"])
                if facts.get("compiles"):
                    self._skip = max(self._skip, len(mine))


@dataclass(frozen=True, kw_only=True)
class Phases:
    """Where a trial's wall time went, seconds. What happened before the first step is left to the caller."""

    compile: float = 0.0
    """Warm-up steps that compiled, beyond what such a step takes once it is compiled."""

    warmup: float = 0.0
    """The other warm-up steps, and the rest of those."""

    measured: float = 0.0
    """Steps of the window."""

    profile: float = 0.0
    """Traced steps and writing the trace."""

    first_step_at_s: float = 0.0
    """Process start to the start of the first step."""

    last_at_s: float = 0.0
    """Process start to the last thing a rank recorded."""


def phases(records: Records) -> Phases:
    """Where the time of the slowest rank's records went; all zero when there are none."""
    ends = [max(events.values(), default=0.0) for events in records.events.values()]
    if not records.steps:
        return Phases(first_step_at_s=max(ends, default=0.0), last_at_s=max(ends, default=0.0))
    rank = max(records.steps, key=lambda rank: records.steps[rank][-1]["at_s"])
    steps = records.steps[rank]
    begin = records.events.get(rank, {}).get("training", steps[0]["at_s"] - steps[0]["step_time_s"])
    warm = [step for step in steps if step["phase"] == "warmup"]
    steady = [step["step_time_s"] for step in steps if step["phase"] == "measured"] or [
        step["step_time_s"] for step in warm[-2:]
    ]
    usual = float(np.median(steady)) if steady else 0.0
    compiling = sum(max(0.0, step["step_time_s"] - usual) for step in warm if step["compiles"])
    warm_end = warm[-1]["at_s"] if warm else begin
    window = [step["at_s"] for step in steps if step["phase"] == "measured"]
    window_end = window[-1] if window else warm_end
    last = max([steps[-1]["at_s"], *ends])
    return Phases(
        compile=compiling,
        warmup=max(0.0, warm_end - begin - compiling),
        measured=window_end - warm_end,
        profile=max(0.0, last - window_end),
        first_step_at_s=begin,
        last_at_s=last,
    )
