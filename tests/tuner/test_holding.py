"""Whether a claim holds: regressions are caught, unchanged code raises no alarm, and doubt is said."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from search_space.candidate import Candidate
from tests.tuner.claims import side
from tuner.evidence.holding import CANNOT_TELL
from tuner.evidence.holding import EXIT_CODES
from tuner.evidence.holding import Holding
from tuner.evidence.holding import holding
from tuner.evidence.holding import HOLDS
from tuner.evidence.holding import REGRESSED
from tuner.evidence.machine import Control
from tuner.evidence.machine import machine_change
from tuner.evidence.noise import estimate
from tuner.evidence.noise import Noise


def again(
    rng: np.random.Generator,
    true_s: float,
    sd: float,
    noise: Noise,
    claimed_s: float,
    most: int = 5,
    control: tuple[Control, float] | None = None,
) -> Holding:
    """What `tune verify` does: run until it is decided, at least twice, at most ``most`` times.

    ``control``: what the claim has, and the true time of a round now.
    """
    claimed = side(Candidate(), claimed_s)
    runs: list[np.ndarray] = []
    rounds: list[float] = []
    while True:
        runs.append(true_s * np.exp(sd * rng.normal()) * rng.lognormal(0, 0.01, 40))
        machine = None
        if control is not None:
            rounds.append(control[1] * float(np.exp(sd * rng.normal())))
            machine = machine_change(control[0], Control(work="w", runs_s=tuple(rounds)), device_of(sd))
        found = holding(claimed, noise, runs, machine)
        if len(runs) >= most or (len(runs) >= 2 and found.verdict != CANNOT_TELL):
            return found


@pytest.mark.parametrize("sd", [0.003, 0.01, 0.03])
@pytest.mark.parametrize("hour", [0.0, 0.7])
def test_unchanged_code_raises_no_alarm_and_a_regression_is_caught(sd: float, hour: float) -> None:
    """200 verifications each; the claim itself carries the noise of its own two runs, claim and verification that of
    their hours (``hour`` times the noise of a run), which no study sees."""
    rng = np.random.default_rng(7)
    alarms = doubts = caught = 0
    for _ in range(200):
        first = [1.0 * np.exp(sd * rng.normal()) for _ in range(2)]
        others = [[np.exp(sd * rng.normal()) for _ in range(3)] for _ in range(2)]
        noise = estimate([first, *others], device_of(sd))
        claimed, now = (float(np.exp(hour * sd * rng.normal())) for _ in range(2))
        claimed *= float(np.exp(np.mean(np.log(first))))
        same = again(rng, now, sd, noise, claimed)
        alarms += same.verdict == REGRESSED
        doubts += same.verdict == CANNOT_TELL
        floor = float(np.log1p(noise.floor_pct / 100))
        caught += again(rng, now * float(np.exp(2 * floor)), sd, noise, claimed).verdict == REGRESSED
    assert alarms <= (3 if hour == 0 else 8) and doubts <= 20 and caught >= 190


def device_of(sd: float) -> str:
    return "cpu" if sd > 0.01 else "gpu"


@pytest.mark.parametrize("sd", [0.003, 0.01, 0.03])
@pytest.mark.parametrize("slower", [0.0, 0.1, 0.25])
def test_a_slower_machine_is_no_regression_and_hides_none(sd: float, slower: float) -> None:
    """200 verifications on a machine that has become slower by ``slower`` for code and control alike; the control
    scatters as much as a step time does, its claim has that of both sides' runs."""
    rng = np.random.default_rng(11)
    alarms = doubts = caught = 0
    for _ in range(200):
        first = [float(np.exp(sd * rng.normal())) for _ in range(2)]
        others = [[np.exp(sd * rng.normal()) for _ in range(3)] for _ in range(2)]
        noise = estimate([first, *others], device_of(sd))
        claimed = float(np.exp(np.mean(np.log(first))))
        control = Control(work="w", runs_s=tuple(0.05 * float(np.exp(sd * rng.normal())) for _ in range(4)))
        round_s = 0.05 * (1 + slower)
        same = again(rng, 1 + slower, sd, noise, claimed, control=(control, round_s))
        alarms += same.verdict == REGRESSED
        doubts += same.verdict == CANNOT_TELL
        floor = float(np.log1p(noise.floor_pct / 100))
        worse = (1 + slower) * float(np.exp(2 * floor))
        caught += again(rng, worse, sd, noise, claimed, control=(control, round_s)).verdict == REGRESSED
    assert alarms <= 5 and doubts <= 32 and caught >= 182, (alarms, doubts, caught)


def test_a_faster_machine_excuses_nothing_and_accuses_nobody() -> None:
    noise = Noise(sd=0.005, dof=20, repeats=4)
    faster = machine_change(Control(work="w", runs_s=(0.05,) * 3), Control(work="w", runs_s=(0.04,) * 3), "gpu")
    assert faster is not None and faster.pct == pytest.approx(-20)
    found = holding(side(Candidate(), 1.0), noise, [np.full(30, 1.0)] * 3, faster)
    assert found.verdict == HOLDS and found.net_change_pct == pytest.approx(0, abs=1e-6)
    assert holding(side(Candidate(), 1.0), noise, [np.full(30, 1.2)] * 3, faster).verdict == REGRESSED


def test_a_small_difference_of_the_control_excuses_little_and_a_large_one_nearly_all() -> None:
    rng = np.random.default_rng(0)
    claimed = Control(work="w", runs_s=(0.05,) * 4)

    def excuse(change: float) -> float:
        # The spread of the prior alone: 2%.
        found = machine_change(claimed, Control(work="w", runs_s=(0.05 * float(np.exp(change)),) * 3), "cpu")
        assert found is not None and found.change == pytest.approx(change)
        return float(found.draws(0.02, rng, 4000).mean())

    small, large = excuse(0.01), excuse(0.2)
    assert 0 < small < 0.008 and 0.18 < large < 0.2
    assert excuse(-0.2) == pytest.approx(-large, abs=0.005)


def test_the_machine_is_only_compared_by_the_same_work() -> None:
    one, other = Control(work="w", runs_s=(0.05, 0.05)), Control(work="v", runs_s=(0.06, 0.06))
    assert machine_change(one, other, "cpu") is None and machine_change(Control(), one, "cpu") is None
    same, mixed = {"control": "w", "control_s": 0.05}, {"control": "v", "control_s": 0.05}
    assert Control.of([same, same]) == one
    assert Control.of([same, mixed]) == Control.of([same, {}]) == Control.of([]) == Control()


@given(st.floats(0.2, 5), st.floats(0.5, 2))
def test_the_change_is_what_it_is(claimed: float, factor: float) -> None:
    noise = Noise(sd=0.005, dof=6, repeats=4)
    runs = [np.full(30, claimed * factor)] * 3
    found = holding(side(Candidate(), claimed), noise, runs)
    assert found.net_change_pct == pytest.approx(found.change_pct) and found.machine_change_pct is None
    assert found.change_pct == pytest.approx(100 * (factor - 1), abs=1e-6)
    assert found.change_ci_pct[0] <= found.change_pct <= found.change_ci_pct[1]
    if factor < 1:
        assert found.verdict == HOLDS


def test_exit_codes_tell_the_verdicts_apart() -> None:
    assert EXIT_CODES == {HOLDS: 0, REGRESSED: 4, CANNOT_TELL: 5}
