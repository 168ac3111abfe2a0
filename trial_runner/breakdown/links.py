"""Which call on the CPU put each device event on the device, and what stood around that call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from trial_runner.breakdown import intervals
from trial_runner.breakdown import names
from trial_runner.breakdown.intervals import Intervals
from trial_runner.breakdown.trace import ANNOTATION
from trial_runner.breakdown.trace import grouped
from trial_runner.breakdown.trace import KERNEL
from trial_runner.breakdown.trace import MEMORY
from trial_runner.breakdown.trace import OPERATOR
from trial_runner.breakdown.trace import RUNTIME
from trial_runner.breakdown.trace import Trace


class Links:
    """Joins of one trace, computed when first asked for."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    @cached_property
    def on_device(self) -> bool:
        """Whether the trace has device kernels; otherwise the CPU's own operators are the work."""
        rows = self.trace.rows(KERNEL)
        return bool(len(rows)) and bool((self.trace.end[rows] > self.trace.start[rows]).any())

    @cached_property
    def lost(self) -> NDArray[np.bool_]:
        """Which events are launches with a correlation number that no device event has; shape (n,).

        Where device events have no numbers at all, nothing is known to be lost.
        """
        trace = self.trace
        lost = np.zeros(len(trace.start), dtype=bool)
        device = np.flatnonzero((trace.lane == KERNEL) | (trace.lane == MEMORY))
        seen = trace.correlation[device]
        seen = np.unique(seen[seen >= 0])
        calls = trace.named(trace.rows(RUNTIME), names.is_launch)
        calls = calls[trace.correlation[calls] >= 0]
        if len(seen):
            place = np.minimum(np.searchsorted(seen, trace.correlation[calls]), len(seen) - 1)
            lost[calls] = seen[place] != trace.correlation[calls]
        elif not len(device):
            lost[calls] = True
        return lost

    @cached_property
    def launch(self) -> NDArray[np.int64]:
        """Row of the launching call of each device event (by correlation, else by external id), -1 without; (n,)."""
        trace = self.trace
        found = np.full(len(trace.start), -1, dtype=np.int64)
        device = np.flatnonzero((trace.lane == KERNEL) | (trace.lane == MEMORY))
        for keys, lanes in ((trace.correlation, (RUNTIME,)), (trace.external, (OPERATOR, ANNOTATION))):
            missing = device[found[device] < 0]
            calls = np.flatnonzero(np.isin(trace.lane, lanes) & (keys >= 0))
            if not len(missing) or not len(calls):
                continue
            order = calls[np.argsort(keys[calls], kind="stable")]
            place = np.searchsorted(keys[order], keys[missing])
            place = np.minimum(place, len(order) - 1)
            hit = (keys[order[place]] == keys[missing]) & (keys[missing] >= 0)
            found[missing[hit]] = order[place[hit]]
        return found

    @cached_property
    def called_at(self) -> NDArray[np.int64]:
        """Time of the launching call of each event; CPU events are their own call; -1 when not known; (n,) ns."""
        trace = self.trace
        device = (trace.lane == KERNEL) | (trace.lane == MEMORY)
        calls = self.launch
        return np.where(device, np.where(calls >= 0, trace.start[np.maximum(calls, 0)], -1), trace.start)

    @cached_property
    def called_from(self) -> NDArray[np.int64]:
        """Thread of the launching call of each event, -1 when not known; (n,)."""
        trace = self.trace
        device = (trace.lane == KERNEL) | (trace.lane == MEMORY)
        calls = self.launch
        return np.where(device, np.where(calls >= 0, trace.thread[np.maximum(calls, 0)], -1), trace.thread)

    def windows(self, rows: NDArray[np.intp]) -> dict[int, Intervals]:
        """Union of the given CPU events by thread."""
        trace = self.trace
        return {
            thread: intervals.union(trace.start[mine], trace.end[mine])
            for thread, mine in grouped(trace.thread[rows], rows).items()
        }

    def called_inside(self, rows: NDArray[np.intp], windows: dict[int, Intervals]) -> NDArray[np.bool_]:
        """Which of ``rows`` were called from a thread while one of its windows was open."""
        inside = np.zeros(len(rows), dtype=bool)
        if not windows:
            return inside
        for thread, mine in grouped(self.called_from[rows], np.arange(len(rows))).items():
            if thread in windows:
                inside[mine] = intervals.contains(windows[thread], self.called_at[rows[mine]])
        return inside

    @cached_property
    def backward(self) -> dict[int, Intervals]:
        """Windows of the backward pass by thread, from the marks of the autograd engine."""
        return self.windows(self._operators(names.is_backward))

    def _operators(self, test: Callable[[str], bool]) -> NDArray[np.intp]:
        return self.trace.named(self.trace.rows(OPERATOR), test)

    def around(self, rows: NDArray[np.intp], candidates: NDArray[np.intp]) -> NDArray[np.int64]:
        """The innermost of ``candidates`` (CPU events) around the call of each of ``rows``, -1 without; (rows,)."""
        trace = self.trace
        found = np.full(len(rows), -1, dtype=np.int64)
        callers = grouped(self.called_from[rows], np.arange(len(rows)))
        for thread, mine in grouped(trace.thread[candidates], candidates).items():
            asked = callers.get(thread)
            if asked is None:
                continue
            at = self.called_at[rows[asked]]
            place = np.searchsorted(trace.start[mine], at, side="right") - 1
            open_ = np.full(len(asked), -1, dtype=np.int64)
            for _ in range(16):
                todo = (open_ < 0) & (place >= 0)
                if not todo.any():
                    break
                hit = todo & (trace.end[mine[np.maximum(place, 0)]] >= at)
                open_[hit] = mine[place[hit]]
                place -= 1
            found[asked] = open_
        return found
