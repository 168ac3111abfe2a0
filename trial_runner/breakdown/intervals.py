"""Algebra of time intervals: sets of half-open intervals as integer arrays, exact to the nanosecond.

An interval set is an int64 array of shape (n, 2): rows ``[start, end)`` in nanoseconds, sorted, disjoint, none empty.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray


Intervals: TypeAlias = NDArray[np.int64]
"""Interval set of shape (n, 2), nanoseconds."""

EMPTY: Intervals = np.empty((0, 2), dtype=np.int64)
"""The empty set."""


def union(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> Intervals:
    """The set covered by any of the given intervals (any order, overlaps allowed, empty ones ignored).

    Args:
        starts: shape (n,), ns.
        ends: shape (n,), ns.
    """
    keep = ends > starts
    starts, ends = starts[keep], ends[keep]
    if not len(starts):
        return EMPTY
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.empty(len(starts), dtype=bool)
    first[0] = True
    np.greater(starts[1:], reach[:-1], out=first[1:])
    last = np.append(first[1:], True)
    return np.stack([starts[first], reach[last]], axis=1)


def clip(intervals: Intervals, start: int, end: int) -> Intervals:
    """The part of a set inside ``[start, end)``."""
    low, high = np.maximum(intervals[:, 0], start), np.minimum(intervals[:, 1], end)
    keep = high > low
    return np.stack([low[keep], high[keep]], axis=1)


def _sweep(a: Intervals, b: Intervals, inside_b: bool) -> Intervals:
    """Where ``a`` holds and ``b`` does (``inside_b``) or does not."""
    if not len(a) or (inside_b and not len(b)):
        return EMPTY
    if not len(b):
        return a
    points = np.concatenate([a[:, 0], a[:, 1], b[:, 0], b[:, 1]])
    n, m = len(a), len(b)
    in_a = np.concatenate([np.ones(n), -np.ones(n), np.zeros(2 * m)]).astype(np.int8)
    in_b = np.concatenate([np.zeros(2 * n), np.ones(m), -np.ones(m)]).astype(np.int8)
    order = np.argsort(points, kind="stable")
    points = points[order]
    depth_a, depth_b = np.cumsum(in_a[order], dtype=np.int32), np.cumsum(in_b[order], dtype=np.int32)
    wanted = (depth_a > 0) & ((depth_b > 0) if inside_b else (depth_b <= 0))
    return union(points[:-1][wanted[:-1]], points[1:][wanted[:-1]])


def intersect(a: Intervals, b: Intervals) -> Intervals:
    """What is in both sets."""
    return _sweep(a, b, True)


def subtract(a: Intervals, b: Intervals) -> Intervals:
    """What is in ``a`` and not in ``b``."""
    return _sweep(a, b, False)


def join(*sets: Intervals) -> Intervals:
    """What is in any of the sets."""
    together = np.concatenate([EMPTY, *sets])
    return union(together[:, 0], together[:, 1])


def total(intervals: Intervals) -> int:
    """Length of a set, ns."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


class Cover:
    """How much of any set lies inside one base set, at the cost of a look-up."""

    def __init__(self, base: Intervals) -> None:
        self._base = base
        self._before = np.append(0, np.cumsum(base[:, 1] - base[:, 0]))

    def __call__(self, other: Intervals) -> int:
        """Length of what ``other`` (any intervals, overlaps counted each) has inside the base set, ns."""
        if not len(self._base) or not len(other):
            return 0
        return int((self._up_to(other[:, 1]) - self._up_to(other[:, 0])).sum())

    def _up_to(self, points: NDArray[np.int64]) -> NDArray[np.int64]:
        index = np.searchsorted(self._base[:, 0], points, side="right") - 1
        at = np.maximum(index, 0)
        inside = np.minimum(points, self._base[at, 1]) - self._base[at, 0]
        return np.where(index >= 0, self._before[at] + inside, 0)


def contains(intervals: Intervals, points: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of ``points`` (ns, shape (n,)) lie inside the set."""
    if not len(intervals):
        return np.zeros(len(points), dtype=bool)
    index = np.searchsorted(intervals[:, 0], points, side="right") - 1
    return (index >= 0) & (points < intervals[np.maximum(index, 0), 1])
