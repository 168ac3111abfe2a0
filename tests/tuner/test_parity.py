"""Loss parity: the same training agrees, a changed one is caught, and what cannot be compared is said."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
import numpy as np

from search_space.candidate import Candidate
from tuner.evidence.parity import compare_curves
from tuner.evidence.parity import numeric_changes
from tuner.evidence.parity import same_samples
from tuner.evidence.parity import same_start
from tuner.evidence.parity import TOLERANCE


def curve(rate: float = 0.02, steps: int = 30, noise: float = 0.0, seed: int = 0) -> list[float]:
    """A loss that falls from 8; ``noise`` grows from rounding at the first step as real runs' differences do."""
    step = np.arange(steps)
    wander = np.random.default_rng(seed).normal(0, 1, steps) * noise * step / steps
    return list((8 * np.exp(-rate * step)) * (1 + wander))


@given(st.sampled_from(["fp32", "bf16"]), st.integers(0, 100), st.floats(0, 0.3))
def test_rounding_agrees(precision: str, seed: int, share: float) -> None:
    noise = share * TOLERANCE[precision]
    found = compare_curves(curve(noise=noise, seed=seed), [curve()], precision)
    assert found.verdict == "agree" and found.may_win and found.gap_pct is not None


@given(st.sampled_from(["fp32", "bf16"]), st.floats(1.05, 3) | st.floats(0.2, 0.95))
def test_another_learning_rate_differs(precision: str, factor: float) -> None:
    found = compare_curves(curve(rate=0.02 * factor), [curve(), curve(noise=1e-4)], precision)
    assert found.verdict == "differ" and not found.may_win, found.why


def test_a_wrong_first_step_is_caught_whatever_follows() -> None:
    wrong = curve()
    wrong[0] *= 1.001
    assert compare_curves(wrong, [curve()], "fp32").verdict == "differ"


def test_noise_of_the_baseline_itself_is_no_difference() -> None:
    """Two baseline runs 2% apart: a candidate as far away cannot be called different."""
    noisy = [curve(noise=0.02, seed=seed) for seed in (1, 2)]
    assert compare_curves(curve(noise=0.02, seed=3), noisy, "bf16").verdict == "agree"
    assert compare_curves(curve(noise=0.02, seed=3), noisy[:1], "fp32").verdict == "differ"


def test_what_cannot_be_compared_is_untested_and_a_numeric_change_then_never_wins() -> None:
    short = compare_curves([8.0], [curve()], "fp32")
    assert short.verdict == "untested" and short.may_win
    assert not compare_curves([8.0], [curve()], "fp32", ("float8",)).may_win
    assert compare_curves([8.0, float("nan"), 7.0, 6.0], [curve()], "fp32").verdict == "differ"


def test_what_depends_on_the_layout() -> None:
    base = Candidate(data_parallel_shard=2)
    assert same_start(replace(base, micro_batch=4, activation_checkpoint="full"), base)
    assert not same_start(Candidate(tensor_parallel=2), base)
    assert same_samples(Candidate(tensor_parallel=2), base, "synthetic")
    assert not same_samples(Candidate(tensor_parallel=2), base, "config")
    assert numeric_changes(replace(base, float8=True, compile=True), base) == ("float8",)
