"""Are the steps of a window all of one kind? Where warm-up really ended, and whether the step time changed inside."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata


SETTLED = 0.1
"""Excess over the later median by which a single step still counts as warm-up, as a share of it."""

SPREADS = 6.0
"""The same in median absolute deviations, where those are larger."""

SHIFT = 0.05
"""Change of the step time from which two parts of a window are of two kinds, as a share of the faster part."""

CHANCE = 0.01
"""Chance at which steps of one kind may be taken for two."""

FEWEST = 20
"""Steps of a window below which no change is looked for."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the step time."""

    at: int
    """First step of the later part."""

    before_s: float
    """Median of the earlier part, seconds."""

    after_s: float
    """Median of the later part, seconds."""


def change_point(times: np.ndarray) -> Change | None:
    """Where the step time changed, if it did.

    Pettitt's test (1979, "A non-parametric approach to the change-point problem") says whether: from ranks, so single
    slow steps do not count; p ≈ 2·exp(-6K²/(n³+n²)). Steps are correlated, which makes the chance approximate; a
    change smaller than :data:`SHIFT` is none whatever its p.

    Args:
        times: step times, seconds, shape (n,).
    """
    n = len(times)
    if n < FEWEST:
        return None
    sums = 2 * np.cumsum(rankdata(times))[:-1] - np.arange(1, n) * (n + 1)
    if 2 * np.exp(-6.0 * float(np.abs(sums).max()) ** 2 / (n**3 + n**2)) > CHANCE:
        return None
    at = _split(np.log(times))
    before, after = float(np.median(times[:at])), float(np.median(times[at:]))
    if max(before, after) < (1 + SHIFT) * min(before, after):
        return None
    return Change(at=at, before_s=before, after_s=after)


def _split(logs: np.ndarray) -> int:
    """Where two levels fit best: the cut with the smallest sum of absolute deviations from its parts' medians.

    Pettitt's own maximum leans to the middle when one part is short.
    """
    cuts = range(3, len(logs) - 2)
    sums = [np.abs(logs[:k] - np.median(logs[:k])).sum() + np.abs(logs[k:] - np.median(logs[k:])).sum() for k in cuts]
    return cuts[int(np.argmin(sums))]


def warmed_up_at(times: np.ndarray) -> int:
    """First step of the window that belongs to the steady state: warm-up may last longer than was planned for.

    Leading steps are dropped while they exceed the median of the window's second half by more than its own spread
    allows, and up to a change point from slower to faster; a window that does not settle in its first half is kept
    whole from there.
    """
    half = times[len(times) // 2 :]
    if len(half) < 3:
        return 0
    middle = float(np.median(half))
    bound = middle + max(SETTLED * middle, SPREADS * float(np.median(np.abs(half - middle))))
    steady = np.flatnonzero(times <= bound)
    first = min(int(steady[0]) if len(steady) else 0, len(times) // 2)
    found = change_point(times[first:])
    if found is not None and found.after_s < found.before_s and first + found.at <= len(times) // 2:
        return first + found.at
    return first


def shift(times: np.ndarray) -> Change | None:
    """A change of the step time inside a window that warm-up has been cut off from: something disturbed the trial."""
    return change_point(times)
