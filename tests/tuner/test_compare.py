"""Comparisons and the noise floor: real gains are seen, noise is not taken for one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from tuner.evidence.compare import compare
from tuner.evidence.compare import repeat_interval
from tuner.evidence.compare import unchanged
from tuner.evidence.noise import estimate
from tuner.evidence.noise import net_of_rounds
from tuner.evidence.noise import PRIOR_DOF
from tuner.evidence.noise import PRIOR_SD


QUIET = estimate([[1.0, 1.001, 0.999, 1.0]], "gpu")


def runs(rng: np.random.Generator, median: float, count: int = 2, steps: int = 50, sd: float = 0.0) -> list[np.ndarray]:
    return [median * np.exp(sd * rng.normal()) * rng.lognormal(0, 0.03, steps) for _ in range(count)]


def test_a_real_gain_is_significant() -> None:
    rng = np.random.default_rng(1)
    found = compare(runs(rng, 0.8), runs(rng, 1.0), 0.4, QUIET)
    assert found.significant and found.decided and -25 < found.step_time_change_pct < -15
    low, high = found.step_time_change_ci_pct
    assert low < found.step_time_change_pct < high < 0
    assert 8 < found.mfu_points < 12 and found.mfu_points_ci[0] < found.mfu_points < found.mfu_points_ci[1]


def test_no_gain_is_noise() -> None:
    rng = np.random.default_rng(2)
    assert not any(compare(runs(rng, 1.0), runs(rng, 1.0), 0.4, QUIET).significant for _ in range(10))


def test_a_gain_below_one_mfu_point_is_noise() -> None:
    rng = np.random.default_rng(3)
    found = compare(runs(rng, 0.9), runs(rng, 1.0), 0.05, QUIET)
    assert found.step_time_change_ci_pct[1] < 0 and found.mfu_points < 1 and not found.significant and found.decided


def test_noise_between_runs_widens_the_interval() -> None:
    """Steps of one run agree to 0.1%, runs differ by 3%: the steps alone would swear to a gain that is none."""
    rng = np.random.default_rng(4)
    wrong = covered = 0
    for _ in range(200):
        one, other = ([np.exp(0.03 * rng.normal()) * rng.lognormal(0, 0.001, 30) for _ in range(2)] for _ in "ab")
        noise = estimate([[float(np.median(run)) for run in side] for side in (one, other)], "cpu")
        found = compare(one, other, 0.4, noise)
        low, high = found.step_time_change_ci_pct
        covered += low <= 0 <= high
        wrong += found.significant
    assert covered >= 184 and wrong <= 10


def test_the_interval_for_another_study_holds_what_another_study_measures() -> None:
    """Runs differ by 2%, hours by as much; two runs in one hour say where a run in another falls."""
    rng = np.random.default_rng(5)
    inside = 0
    for _ in range(300):
        here, there = (np.exp(0.02 * rng.normal()) for _ in range(2))
        mine = runs(rng, here, 2, 30, sd=0.02)
        noise = estimate([[float(np.median(run)) for run in mine]], "cpu")
        low, high = repeat_interval(mine, noise)
        inside += low <= float(np.median(runs(rng, there, 1, 30, sd=0.02)[0])) <= high
    assert inside >= 276


@given(st.lists(st.lists(st.floats(0.1, 10), min_size=1, max_size=4), max_size=5), st.sampled_from(["cpu", "gpu"]))
def test_the_noise_floor_is_positive_and_counts_repeats(groups: list[list[float]], device: str) -> None:
    noise = estimate(groups, device)
    assert noise.sd > 0 and noise.floor_pct > 0
    assert noise.repeats == sum(len(group) - 1 for group in groups)
    assert noise.dof == pytest.approx(PRIOR_DOF + noise.repeats)
    if not noise.repeats:
        assert noise.sd == pytest.approx(PRIOR_SD[device])


@given(st.floats(0.001, 0.2))
def test_many_repeats_tell_the_true_noise(sd: float) -> None:
    rng = np.random.default_rng(5)
    noise = estimate([list(np.exp(sd * rng.normal(size=200))) for _ in range(3)], "gpu")
    assert noise.sd == pytest.approx(sd, rel=0.15)


def test_a_configuration_against_itself_has_no_gain() -> None:
    found = unchanged(QUIET)
    assert not found.significant and found.mfu_points == 0 and found.noise_floor_pct == QUIET.floor_pct


def test_what_a_round_shares_is_no_noise() -> None:
    """The machine is 40% slower in the second round for everybody: the floor stays that of the runs."""
    rng = np.random.default_rng(6)
    cells = [
        (name, number, level * (1.4 if number else 1.0) * float(np.exp(0.01 * rng.normal())))
        for number in range(4)
        for name, level in (("a", 1.0), ("b", 0.8), ("c", 0.9))
    ]
    noise = net_of_rounds(cells, "cpu")
    assert noise.repeats == 12 - 3 - 4 + 1 and noise.sd < 0.02
    assert estimate([[s for n, _, s in cells if n == name] for name in "abc"], "cpu").sd > 0.1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.floats(0.1, 10)), max_size=12))
def test_cells_that_repeat_nothing_say_nothing(cells: list[tuple[str, int, float]]) -> None:
    noise = net_of_rounds(cells, "gpu")
    assert noise.sd > 0 and 0 <= noise.repeats <= max(0, len(cells) - 1)
    assert net_of_rounds(cells[:1], "gpu").repeats == 0
