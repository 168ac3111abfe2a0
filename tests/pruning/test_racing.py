"""Racing: losers are stopped, winners are not, and the error rate holds over all the looks together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from pruning.racing import block_length
from pruning.racing import capital
from pruning.racing import FEWEST
from pruning.racing import SLACK
from pruning.racing import stand


def steps(rng: np.random.Generator, n: int, phi: float, spread: float, heavy: bool = False) -> np.ndarray:
    """Step times around 1 with first-order correlated log noise."""
    shocks = rng.standard_t(3, n) if heavy else rng.normal(size=n)
    noise = np.zeros(n)
    noise[:1] = shocks[:1] / np.sqrt(1 - phi**2)
    for i in range(1, n):
        noise[i] = phi * noise[i - 1] + shocks[i]
    return np.exp(spread * noise * np.sqrt(1 - phi**2))


def ever_lost(times: np.ndarray, high: float, confidence: float = 0.95) -> bool:
    return any(stand(times[:n], high, confidence).lost for n in range(FEWEST, len(times) + 1))


@pytest.mark.parametrize("phi", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("heavy", [False, True])
def test_a_trial_as_good_as_the_incumbent_is_stopped_at_most_as_often_as_said(phi: float, heavy: bool) -> None:
    """The hardest case that a job meets: both have one true median, and the trial is looked at after every step."""
    rng = np.random.default_rng(1)
    runs = 300
    lost = sum(ever_lost(steps(rng, 100, phi, 0.03, heavy), 1.0) for _ in range(runs))
    assert lost / runs <= 0.05


@pytest.mark.parametrize("phi", [0.0, 0.6])
def test_without_any_slack_the_error_is_near_the_confidence(phi: float) -> None:
    rng = np.random.default_rng(2)
    runs = 300
    times = [steps(rng, 100, phi, 0.03) for _ in range(runs)]
    lost = sum(any(capital(t[:n], 1.0) >= 20 for n in range(FEWEST, 101)) for t in times)
    assert lost / runs <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / runs)


def test_a_clear_loser_goes_after_a_third_of_its_steps() -> None:
    rng = np.random.default_rng(3)
    ends = []
    for _ in range(40):
        times = 1.2 * steps(rng, 100, 0.0, 0.03)
        ends.append(next(n for n in range(FEWEST, 101) if stand(times[:n], 1.0, 0.95).lost))
    assert np.median(ends) <= 34


@given(seed=st.integers(0, 10_000), factor=st.floats(0.2, 1.0), n=st.integers(0, 120), confidence=st.floats(0.6, 0.999))
@settings(max_examples=60, deadline=None)
def test_a_faster_trial_is_never_stopped(seed: int, factor: float, n: int, confidence: float) -> None:
    times = factor * steps(np.random.default_rng(seed), n, 0.0, 0.001)
    assert not stand(times, 1.005, confidence).lost


def test_nothing_is_decided_early_without_an_incumbent_or_at_full_confidence() -> None:
    slow = np.full(60, 9.0)
    assert not stand(slow[: FEWEST - 1], 1.0, 0.95).lost
    assert not stand(slow, None, 0.95).lost
    assert not stand(slow, 1.0, 1.0).lost
    assert stand(slow, 1.0, 0.95).lost
    assert not stand(np.full(60, 1 + SLACK / 2), 1.0, 0.95).lost


def test_blocks_are_longer_than_the_correlation() -> None:
    rng = np.random.default_rng(4)
    lengths = [np.median([block_length(steps(rng, 400, phi, 0.05)) for _ in range(9)]) for phi in (0.0, 0.5, 0.8)]
    assert lengths[0] < lengths[1] < lengths[2]
    assert lengths[1] >= 3 and lengths[2] >= 9  # (1 + φ) / (1 - φ)


def test_a_tight_interval_ends_a_promising_trial() -> None:
    rng = np.random.default_rng(5)
    quiet, loud = steps(rng, 100, 0.0, 0.002), steps(rng, 100, 0.0, 0.3)
    assert stand(quiet, 2.0, 0.95, tight_pct=1.0).tight
    assert not stand(loud, 2.0, 0.95, tight_pct=1.0).tight
    assert not stand(quiet, 2.0, 0.95).tight
    assert not stand(quiet[:15], 2.0, 0.95, tight_pct=1.0).tight


def test_the_tight_interval_holds_the_median_over_all_looks() -> None:
    """Wherever a trial ends as tight within 1%, its median is within 1% of the truth nearly always."""
    rng = np.random.default_rng(6)
    wrong = ended = 0
    for _ in range(200):
        times = steps(rng, 150, 0.3, 0.015)
        end = next((n for n in range(FEWEST, 151) if stand(times[:n], None, 0.95, tight_pct=1.0).tight), None)
        if end is not None:
            ended += 1
            wrong += abs(np.median(times[:end]) - 1) > 0.01
    assert ended > 50 and wrong / ended <= 0.05
