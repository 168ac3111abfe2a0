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
from tuner.evidence.noise import estimate
from tuner.evidence.noise import Noise


def again(rng: np.random.Generator, true_s: float, sd: float, noise: Noise, claimed_s: float, most: int = 5) -> Holding:
    """What `tune verify` does: run until it is decided, at least twice, at most ``most`` times."""
    claimed = side(Candidate(), claimed_s)
    runs: list[np.ndarray] = []
    while True:
        runs.append(true_s * np.exp(sd * rng.normal()) * rng.lognormal(0, 0.01, 40))
        found = holding(claimed, noise, runs)
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
        noise = estimate([first, *others], "cpu" if sd > 0.01 else "gpu")
        claimed, now = (float(np.exp(hour * sd * rng.normal())) for _ in range(2))
        claimed *= float(np.exp(np.mean(np.log(first))))
        same = again(rng, now, sd, noise, claimed)
        alarms += same.verdict == REGRESSED
        doubts += same.verdict == CANNOT_TELL
        floor = float(np.log1p(noise.floor_pct / 100))
        caught += again(rng, now * float(np.exp(2 * floor)), sd, noise, claimed).verdict == REGRESSED
    assert alarms <= (3 if hour == 0 else 8) and doubts <= 20 and caught >= 190


@given(st.floats(0.2, 5), st.floats(0.5, 2))
def test_the_change_is_what_it_is(claimed: float, factor: float) -> None:
    noise = Noise(sd=0.005, dof=6, repeats=4)
    runs = [np.full(30, claimed * factor)] * 3
    found = holding(side(Candidate(), claimed), noise, runs)
    assert found.change_pct == pytest.approx(100 * (factor - 1), abs=1e-6)
    assert found.change_ci_pct[0] <= found.change_pct <= found.change_ci_pct[1]
    if factor < 1:
        assert found.verdict == HOLDS


def test_exit_codes_tell_the_verdicts_apart() -> None:
    assert EXIT_CODES == {HOLDS: 0, REGRESSED: 4, CANNOT_TELL: 5}
