"""Winner against baseline: the difference of medians with an interval that counts runs and steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.evidence.noise import Noise


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

    mfu_points_ci: tuple[float, float]
    """95% interval of the same."""

    runs: tuple[int, int]
    """Runs behind (candidate, baseline)."""

    significant: bool
    """Whether the interval excludes zero and the gain is at least :data:`NOISE_MFU_POINTS`."""

    noise_floor_pct: float = 0.0
    """Difference of two single runs of one configuration that 95% of repeats stay within, percent."""

    @property
    def decided(self) -> bool:
        """Whether more runs would not change the verdict: a sure gain, or surely less than what counts as one."""
        return self.mfu_points_ci[0] >= NOISE_MFU_POINTS or self.mfu_points_ci[1] < NOISE_MFU_POINTS

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)


def unchanged(noise: Noise | None = None) -> Comparison:
    """A configuration against itself: what is committed when the baseline is kept."""
    return Comparison(
        step_time_change_pct=0.0,
        step_time_change_ci_pct=(0.0, 0.0),
        mfu_points=0.0,
        mfu_points_ci=(0.0, 0.0),
        runs=(1, 1),
        significant=False,
        noise_floor_pct=noise.floor_pct if noise is not None else 0.0,
    )


def compare(
    candidate: Sequence[np.ndarray], baseline: Sequence[np.ndarray], ideal_s: float, noise: Noise
) -> Comparison:
    """Compare step times.

    The ratio is that of the geometric means of the runs' medians. Its interval counts the spread inside runs (a
    bootstrap of blocks of √n successive steps, so that their correlation counts) and the noise between runs, which is
    drawn from the study's own floor: two runs of one configuration differ by more than their steps tell.

    Args:
        candidate: step times of each of its runs, seconds.
        baseline: the same for the baseline.
        ideal_s: ideal step time, seconds.
        noise: run-to-run noise.
    """
    rng = np.random.default_rng(0)
    ratio = float(np.exp(_level(candidate) - _level(baseline)))
    error = spread(candidate, noise, rng) - spread(baseline, noise, rng)
    low, high = (float(100 * (ratio * np.exp(q) - 1)) for q in np.quantile(error, [0.025, 0.975]))
    other = float(np.exp(_level(baseline)))
    per_ratio = 100 * ideal_s / other
    points = per_ratio * (1 / ratio - 1)
    return Comparison(
        step_time_change_pct=100 * (ratio - 1),
        step_time_change_ci_pct=(low, high),
        mfu_points=points,
        mfu_points_ci=(per_ratio * (1 / (1 + high / 100) - 1), per_ratio * (1 / (1 + low / 100) - 1)),
        runs=(len(candidate), len(baseline)),
        significant=high < 0 and points >= NOISE_MFU_POINTS,
        noise_floor_pct=noise.floor_pct,
    )


def level_interval(runs: Sequence[np.ndarray], noise: Noise) -> tuple[float, tuple[float, float]]:
    """Step time of one configuration and its 95% interval, seconds: geometric mean of the runs' medians."""
    level, error = _level(runs), spread(runs, noise, np.random.default_rng(0))
    low, high = (float(np.exp(level + q)) for q in np.quantile(error, [0.025, 0.975]))
    return float(np.exp(level)), (low, high)


def repeat_interval(runs: Sequence[np.ndarray], noise: Noise) -> tuple[float, float]:
    """Where the median step time of one run of the same configuration in another study falls in 95% of cases, seconds.

    A prediction interval: the error of the level, that of a single run, and what two hours differ by (as in
    :attr:`Noise.apart_pct`).
    """
    rng = np.random.default_rng(0)
    hours = noise.draws(1, rng, RESAMPLES) - noise.draws(1, rng, RESAMPLES)
    error = spread(runs, noise, rng) + spread(runs[:1], noise, rng) + hours
    low, high = (float(np.exp(_level(runs) + q)) for q in np.quantile(error, [0.025, 0.975]))
    return low, high


def _level(runs: Sequence[np.ndarray]) -> float:
    """Mean of the runs' log medians."""
    return float(np.mean([np.log(np.median(run)) for run in runs]))


def spread(runs: Sequence[np.ndarray], noise: Noise, rng: np.random.Generator) -> np.ndarray:
    """Draws of the error of :func:`_level`, shape (RESAMPLES,)."""
    inside = np.mean([np.log(_medians(run, rng)) - np.log(np.median(run)) for run in runs], axis=0)
    return np.asarray(inside + noise.draws(len(runs), rng, RESAMPLES))


def _medians(times: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Bootstrapped medians of one run, shape (RESAMPLES,)."""
    n = len(times)
    block = max(1, int(np.sqrt(n)))
    starts = rng.integers(0, n, size=(RESAMPLES, -(-n // block)))
    index = (starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :n] % n
    return np.asarray(np.median(times[index], axis=1))
