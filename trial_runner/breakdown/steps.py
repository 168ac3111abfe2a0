"""The steps of a trace: from the profiler's marks, or inferred from what repeats, and labelled so."""

from __future__ import annotations

from dataclasses import dataclass
import itertools
import re

import numpy as np
from numpy.typing import NDArray

from trial_runner.breakdown import names
from trial_runner.breakdown.trace import ANNOTATION
from trial_runner.breakdown.trace import KERNEL
from trial_runner.breakdown.trace import OPERATOR
from trial_runner.breakdown.trace import Trace


_MARK = re.compile(r"^ProfilerStep\s*#\s*(\d{1,12})")

CLAMPED_SHARE = 0.05
"""Overlap of two steps, as a share of the shorter one, up to which it is cut off without a word."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of one rank."""

    number: int
    """The profiler's number; counted from 0 when inferred."""

    start: int
    """First nanosecond, after the trace's origin."""

    end: int
    """Nanosecond after the last."""

    inferred: str = ""
    """How the bounds were found when the trace has no marks."""

    thread: int = -1
    """Thread that the mark is on: the training loop."""


def find_steps(trace: Trace) -> tuple[list[Step], list[str]]:
    """The steps in order of time, none overlapping another, and warnings.

    A trace without marks is cut where its work repeats exactly, so that no step mixes several; when nothing repeats,
    the whole trace is one inferred step.
    """
    marked, warnings = _marked(trace)
    if marked:
        return marked, warnings
    return _inferred(trace)


def _marked(trace: Trace) -> tuple[list[Step], list[str]]:
    rows = trace.named(np.flatnonzero(trace.lane != KERNEL), _MARK.match)
    best: dict[int, int] = {}
    for row in rows.tolist():
        number = int(_MARK.match(trace.names[trace.name[row]]).group(1))  # type: ignore[union-attr]
        if number not in best or _length(trace, row) > _length(trace, best[number]):
            best[number] = row
    warnings = []
    if len(rows) > len(best):
        warnings.append(f"{len(rows) - len(best)} step marks occur twice; the longest of each number is used")
    ordered = sorted(best.items(), key=lambda item: int(trace.start[item[1]]))
    steps: list[Step] = []
    for index, (number, row) in enumerate(ordered):
        start, end = int(trace.start[row]), int(trace.end[row])
        if index + 1 < len(ordered):
            following = ordered[index + 1]
            overlap = end - int(trace.start[following[1]])
            if overlap > 0:
                share = overlap / max(1, min(_length(trace, row), _length(trace, following[1])))
                if share > CLAMPED_SHARE:
                    warnings.append(
                        f"steps {number} and {following[0]} overlap by {100 * share:.0f}%; the overlap is counted in "
                        f"step {following[0]} only, so take the times of both with care"
                    )
                end = int(trace.start[following[1]])
        if end > start:
            steps.append(Step(number=number, start=start, end=end, thread=int(trace.thread[row])))
    return steps, warnings


def _length(trace: Trace, row: int) -> int:
    return int(trace.end[row] - trace.start[row])


def _inferred(trace: Trace) -> tuple[list[Step], list[str]]:
    busy = trace.rows(KERNEL)
    if not len(busy):
        busy = trace.named(trace.rows(OPERATOR), names.is_cpu_work)
    busy = busy[trace.end[busy] > trace.start[busy]]
    ends = trace.named(trace.rows(ANNOTATION), names.is_optimizer)
    cuts = _cuts_of_repetition(trace, busy)
    how = "no step marks; steps inferred from the repeating sequence of kernels"
    if len(cuts) < 3 and len(ends) >= 2 and len(busy):
        marks = trace.named(ends, lambda name: name.startswith("Optimizer.step"))
        last = np.unique(trace.end[marks])
        last = last[np.append(np.diff(last) > 1_000_000, True)] if len(last) else last
        if len(last) >= 2:
            cuts, how = last, "no step marks; steps inferred from the optimizer's annotations"
    if len(cuts) >= 3 or (len(cuts) >= 2 and "optimizer" in how):
        steps = [
            Step(number=index, start=int(low), end=int(high), inferred=how)
            for index, (low, high) in enumerate(itertools.pairwise(cuts.tolist()))
        ]
        return steps, [f"{how} (label: inferred)"]
    rows = busy if len(busy) else np.arange(len(trace.start))
    if not len(rows) or int(trace.end[rows].max()) <= int(trace.start[rows].min()):
        return [], []
    how = "no step marks and nothing that repeats; the whole trace is taken as one inferred step"
    start, end = int(trace.start[rows].min()), int(trace.end[rows].max())
    return [Step(number=0, start=start, end=end, inferred=how)], [f"{how} (label: inferred)"]


def _cuts_of_repetition(trace: Trace, rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """Bounds of the repetitions of an exactly repeating sequence of names, shape (repetitions + 1,); empty if none."""
    none = np.empty(0, dtype=np.int64)
    sequence = trace.name[rows[:50_000]]
    count = len(sequence)
    if count < 4 or len(rows) > count:
        return none
    for period in (np.flatnonzero(sequence[1 : count // 2 + 1] == sequence[0]) + 1).tolist():
        repeats = count // period
        whole = repeats * period
        if count - whole or not np.array_equal(sequence[period:whole], sequence[: whole - period]):
            continue
        if len(np.unique(sequence[:period])) < 2:
            return none
        firsts = trace.start[rows[:whole:period]]
        return np.append(firsts, int(trace.end[rows[:whole]].max()))
    return none
