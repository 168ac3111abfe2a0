"""Smaller trials: what stays the same, how they are corrected, and how their error is learned."""

from __future__ import annotations

from math import exp
from math import log

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from pruning.smaller import correction
from pruning.smaller import CorrectionError
from pruning.smaller import PRIOR_SIGMA
from pruning.smaller import shrink
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.hardware import find_hardware
from search_space.model_torchtitan import preset_shape
from search_space.setting import Setting


SHAPE = preset_shape("llama3:llama3_70b")
assert SHAPE is not None
SETTING = Setting(
    shape=SHAPE,
    hardware=find_hardware("H100-SXM"),
    devices_per_node=8,
    nodes=128,
    seq_len=8192,
    global_batch_seqs=512,
)
FULL = Candidate(tensor_parallel=8, pipeline_parallel=4, data_parallel_shard=16, data_parallel_replicate=2)


@given(replicas=st.sampled_from([1, 2, 4, 8, 16, 32]))
@settings(deadline=None)
def test_everything_but_the_replicas_stays(replicas: int) -> None:
    small = shrink(FULL, SETTING, 32 * replicas)
    assert small.candidate.num_devices == small.setting.num_devices == 32 * replicas
    assert small.candidate.data_parallel == replicas
    for knob in ("tensor_parallel", "pipeline_parallel", "schedule", "micro_batch", "activation_checkpoint"):
        assert getattr(small.candidate, knob) == getattr(FULL, knob)
    per_replica = SETTING.global_batch_seqs // FULL.data_parallel
    assert small.setting.global_batch_seqs == per_replica * replicas


def test_the_same_scale_needs_no_correction_and_fewer_layers_a_large_one() -> None:
    assert correction(shrink(FULL, SETTING, 1024)) == pytest.approx(1.0)
    fewer = shrink(FULL, SETTING, 64, layers=40)
    assert fewer.setting.shape.layers == 40 and 1.5 < correction(fewer) < 3.0
    assert 1.0 <= correction(shrink(FULL, SETTING, 32)) < 1.5


@pytest.mark.parametrize(
    ("devices", "layers", "words"),
    [(48, None, "no whole number"), (2048, None, "no part"), (32 * 3, None, "no part"), (64, 42, "multiple of 4")],
)
def test_what_does_not_fit_is_refused(devices: int, layers: int | None, words: str) -> None:
    with pytest.raises(UserError, match=words):
        shrink(FULL, SETTING, devices, layers)


@given(bias=st.floats(-0.3, 0.3), n=st.integers(1, 20))
def test_the_error_learns_a_steady_bias(bias: float, n: int) -> None:
    learned = CorrectionError.learn([(1.0, exp(bias))] * n)
    assert learned.pairs == n and learned.bias == pytest.approx(bias * n / (n + 1))
    step, (low, high) = learned.full_step(2.0)
    assert step == pytest.approx(2.0 * exp(learned.bias)) and low < step < high
    if n >= 10 and abs(bias) < 0.1:
        assert learned.sigma < PRIOR_SIGMA


def test_without_full_trials_the_interval_is_the_priors() -> None:
    step, (low, high) = CorrectionError().full_step(1.0)
    assert step == 1.0 and log(high) == pytest.approx(-log(low)) == pytest.approx(1.6449 * PRIOR_SIGMA)
    assert CorrectionError.learn([]).pairs == 0
