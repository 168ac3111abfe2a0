"""Winner against baseline: the difference of medians with an interval that counts runs and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

import numpy as np


NOISE_MFU_POINTS = 1.0
"""Differences below this many MFU points are noise (design rule), whatever their interval."""

RESAMPLES = 2000
"""Bootstrap resamples."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One configuration against another, from their measured step times."""

    step_time_change_pct: float
    """Median step time of the candidate against the baseline's, percent; negative is faster."""

    step_time_change_ci_pct: tuple[float, float]
    """95% interval of the same."""

    mfu_points: float
    """Gain in MFU, percentage points."""

    runs: tuple[int, int]
    """Runs behind (candidate, baseline)."""

    significant: bool
    """Whether the interval excludes zero and the gain is at least :data:`NOISE_MFU_POINTS`."""

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)


UNCHANGED = Comparison(
    step_time_change_pct=0.0,
    step_time_change_ci_pct=(0.0, 0.0),
    mfu_points=0.0,
    runs=(1, 1),
    significant=False,
)
"""A configuration against itself: what is committed when the baseline is kept."""


def compare(candidate: Sequence[np.ndarray], baseline: Sequence[np.ndarray], ideal_s: float) -> Comparison:
    """Compare step times.

    Hierarchical bootstrap: runs are drawn, then blocks of √n successive steps inside each run, so that both the
    noise between runs and the correlation of steps count.

    Args:
        candidate: step times of each of its runs, seconds.
        baseline: the same for the baseline.
        ideal_s: ideal step time, seconds.
    """
    rng = np.random.default_rng(0)
    ratios = _medians(candidate, rng) / _medians(baseline, rng)
    own, other = float(np.median(np.concatenate(candidate))), float(np.median(np.concatenate(baseline)))
    low, high = (float(100 * (q - 1)) for q in np.quantile(ratios, [0.025, 0.975]))
    points = 100 * ideal_s * (1 / own - 1 / other)
    return Comparison(
        step_time_change_pct=100 * (own / other - 1),
        step_time_change_ci_pct=(low, high),
        mfu_points=points,
        runs=(len(candidate), len(baseline)),
        significant=high < 0 and points >= NOISE_MFU_POINTS,
    )


def _medians(runs: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    medians = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        drawn = [runs[k] for k in rng.integers(0, len(runs), len(runs))]
        medians[i] = np.median(np.concatenate([_resample(run, rng) for run in drawn]))
    return medians


def _resample(times: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    n = len(times)
    block = max(1, int(np.sqrt(n)))
    starts = rng.integers(0, n, -(-n // block))
    return times[(starts[:, None] + np.arange(block)).ravel()[:n] % n]
