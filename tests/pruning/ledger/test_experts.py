"""Experts spread over ranks: the account of a peak adds up, and what runs again is counted where it does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies
import numpy as np
import pytest

from pruning.accounts.account import MEGATRON
from pruning.accounts.account import TORCHTITAN
from pruning.coefficients import prior
from pruning.ledger.compute import block_work
from pruning.ledger.compute import recomputed
from pruning.ledger.executed import executed_collectives
from pruning.ledger.layout import layout_of
from pruning.ledger.layout import ranks_of
from pruning.ledger.memory import memory_of
from pruning.ledger.pipeline import flow_of
from search_space.candidate import Candidate
from search_space.hardware import find_hardware
from search_space.model_torchtitan import preset_shape
from search_space.pool import Pool
from search_space.setting import Setting


SHAPE = preset_shape("qwen3:qwen3_30b_a3b")
assert SHAPE is not None
SETTING = Setting(
    shape=SHAPE,
    hardware=find_hardware("H100-SXM"),
    devices_per_node=8,
    nodes=2,
    seq_len=4096,
    global_batch_seqs=64,
)


@strategies.composite
def candidates(draw: Any) -> Candidate:
    tp, pp = draw(strategies.sampled_from([1, 2])), draw(strategies.sampled_from([1, 2]))
    return Candidate(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel_shard=16 // tp // pp,
        expert_parallel=draw(strategies.sampled_from([1, 2, 4, 8])),
        activation_checkpoint=draw(strategies.sampled_from(["none", "selective", "full"])),
        reshard_after_forward=draw(strategies.sampled_from(["default", "always", "never"])),
        micro_batch=draw(strategies.sampled_from([1, 2])),
    )


@given(candidates(), strategies.sampled_from([4, 48]), strategies.sampled_from([16, 64]))
@settings(max_examples=80, deadline=None)
def test_terms_add_up_to_the_peak_and_none_is_negative(candidate: Candidate, layers: int, batch: int) -> None:
    setting = replace(SETTING, shape=replace(SHAPE, layers=layers), global_batch_seqs=batch)
    layout = layout_of(Pool.from_candidates([candidate]), setting)
    ranks = ranks_of(layout)
    found = memory_of(layout, ranks, flow_of(layout, ranks), TORCHTITAN, prior(setting), itemise=True)
    np.testing.assert_allclose(sum(found.terms.values()), found.device, rtol=1e-4)
    for name, term in found.terms.items():
        assert (term >= -1e-3 * found.device).all(), name


def exchanged(**knobs: Any) -> tuple[int, float]:
    layout = layout_of(Pool.from_candidates([Candidate(data_parallel_shard=16, **knobs)]), SETTING)
    ranks = ranks_of(layout)
    (found,) = [c for c in executed_collectives(layout, ranks, TORCHTITAN) if c.dimension == "expert"]
    return int(found.count[0, 0]), float(found.bytes[0, 0])


def test_what_runs_again_is_exchanged_again() -> None:
    micro_batches = SETTING.global_batch_seqs // 16
    assert exchanged() == (0, 0.0)
    count, size = exchanged(expert_parallel=4)
    again, more = exchanged(expert_parallel=4, activation_checkpoint="full")
    assert count == 5 * SHAPE.layers * micro_batches and again == 8 * SHAPE.layers * micro_batches
    assert more / size == pytest.approx(1.5, rel=1e-3)
    assert exchanged(expert_parallel=4, activation_checkpoint="selective") == (again, more)
    assert exchanged(expert_parallel=8) == (count, size)


@pytest.mark.parametrize(
    ("kind", "compile", "share"),
    [("none", False, 0.0), ("full", True, 1.0), ("selective", False, 1.0), ("selective", True, 0.0)],
)
def test_the_priced_exchanges_are_those_that_run_again(kind: str, compile: bool, share: float) -> None:
    candidate = Candidate(expert_parallel=4, data_parallel_shard=16, activation_checkpoint=kind, compile=compile)
    layout = layout_of(Pool.from_candidates([candidate]), SETTING)
    coefficients = prior(SETTING)
    for account, expected in ((TORCHTITAN, share), (MEGATRON, 0.0)):
        assert recomputed(layout, account, block_work(layout, account, coefficients)).exchanges[0] == expected
