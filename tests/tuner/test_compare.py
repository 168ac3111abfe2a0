"""Comparisons: real gains are seen, noise is not taken for one."""

from __future__ import annotations

import numpy as np

from tuner.evidence.compare import compare


def runs(rng: np.random.Generator, median: float, count: int = 2, steps: int = 50) -> list[np.ndarray]:
    return [median * rng.lognormal(0, 0.03, steps) for _ in range(count)]


def test_a_real_gain_is_significant() -> None:
    rng = np.random.default_rng(1)
    found = compare(runs(rng, 0.8), runs(rng, 1.0), ideal_s=0.4)
    assert found.significant and -25 < found.step_time_change_pct < -15
    low, high = found.step_time_change_ci_pct
    assert low < found.step_time_change_pct < high < 0
    assert 8 < found.mfu_points < 12


def test_no_gain_is_noise() -> None:
    rng = np.random.default_rng(2)
    assert not any(compare(runs(rng, 1.0), runs(rng, 1.0), ideal_s=0.4).significant for _ in range(10))


def test_a_gain_below_one_mfu_point_is_noise() -> None:
    rng = np.random.default_rng(3)
    found = compare(runs(rng, 0.9), runs(rng, 1.0), ideal_s=0.05)
    assert found.step_time_change_ci_pct[1] < 0 and found.mfu_points < 1 and not found.significant
