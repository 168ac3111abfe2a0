"""Stationarity of a window: warm-up ends by rule, a change inside is found, noise is none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
import numpy as np

from trial_runner.stationary import change_point
from trial_runner.stationary import FEWEST
from trial_runner.stationary import SHIFT
from trial_runner.stationary import warmed_up_at


def steps(seed: int, count: int, level: float = 1.0, spread: float = 0.01) -> np.ndarray:
    return level * np.random.default_rng(seed).lognormal(0, spread, count)


@given(st.integers(0, 300), st.integers(FEWEST, 200), st.floats(0.001, 0.05))
def test_steps_of_one_kind_are_left_whole(seed: int, count: int, spread: float) -> None:
    times = steps(seed, count, spread=spread)
    found = change_point(times)
    assert found is None or abs(found.after_s / found.before_s - 1) >= SHIFT / (1 + SHIFT)
    if spread < 0.02:
        assert found is None and warmed_up_at(times) == 0


@given(st.integers(0, 300), st.integers(15, 60), st.integers(15, 60), st.floats(1.15, 3) | st.floats(0.3, 0.85))
def test_a_change_is_found_where_it_is(seed: int, before: int, after: int, factor: float) -> None:
    times = np.concatenate([steps(seed, before), steps(seed + 1, after, factor)])
    found = change_point(times)
    assert found is not None and abs(found.at - before) <= 2
    assert (found.after_s > found.before_s) == (factor > 1)


@given(st.integers(0, 300), st.integers(10, 25), st.floats(0.92, 0.94))
def test_a_warm_up_too_gentle_for_single_steps_is_cut_off(seed: int, warm: int, factor: float) -> None:
    """7% slower for the first steps: no single one stands out, together they do."""
    times = np.concatenate([steps(seed, warm), steps(seed + 1, 60, factor)])
    assert abs(warmed_up_at(times) - warm) <= 3


def test_single_slow_steps_are_no_change() -> None:
    times = steps(3, 60)
    times[[7, 30, 51]] *= 5
    assert change_point(times) is None


def test_short_windows_are_not_judged() -> None:
    assert change_point(np.array([1.0] * 9 + [2.0] * 10)) is None
    assert warmed_up_at(np.array([1.0, 2.0])) == 0
