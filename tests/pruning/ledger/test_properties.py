"""Properties that hold for every candidate: monotonicity, conservation, and the fast path equal to one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies
import numpy as np
import pytest

from benchmarks.ledger_rate import shuffled_pool
from pruning.accounts.account import TORCHTITAN
from pruning.coefficients import prior
from pruning.ledger.communication import block_tensor_traffic
from pruning.ledger.compute import block_work
from pruning.ledger.layout import layout_of
from pruning.ledger.layout import ranks_of
from pruning.ledger.memory import memory_of
from pruning.ledger.parameters import rank_parameters
from pruning.ledger.pipeline import flow_of
from pruning.ledger.prices import PARTS
from pruning.ledger.prices import price
from search_space.candidate import Candidate
from search_space.hardware import find_hardware
from search_space.hardware import GIB
from search_space.model_torchtitan import preset_shape
from search_space.pool import Pool
from search_space.setting import Setting


SHAPE = preset_shape("llama3:llama3_8b")
assert SHAPE is not None
SETTING = Setting(
    shape=SHAPE,
    hardware=find_hardware("H100-SXM"),
    devices_per_node=8,
    nodes=8,
    seq_len=8192,
    global_batch_seqs=256,
)
COEFFICIENTS = prior(SETTING)


@strategies.composite
def candidates(draw: Any) -> Candidate:
    tp = draw(strategies.sampled_from([1, 2, 4, 8]))
    pp = draw(strategies.sampled_from([1, 2, 4]))
    schedule = (
        draw(strategies.sampled_from(["1F1B", "Interleaved1F1B", "ZBVZeroBubble", "GPipe"])) if pp > 1 else "1F1B"
    )
    replicate = draw(strategies.sampled_from([1, 2]))
    return Candidate(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        schedule=schedule,
        virtual_stages=2 if schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 1,
        data_parallel_replicate=replicate,
        data_parallel_shard=64 // (tp * pp * replicate),
        micro_batch=draw(strategies.sampled_from([1, 2, 4])),
        activation_checkpoint=draw(strategies.sampled_from(["none", "selective", "full", "memory_budget"])),
        memory_budget=0.5,
        compile=draw(strategies.booleans()),
        reshard_after_forward=draw(strategies.sampled_from(["default", "always", "never"])),
        accumulate_without_sync=draw(strategies.booleans()),
        fsdp_bucket=draw(strategies.sampled_from([1, 2, 4])),
        loss_chunks=draw(strategies.sampled_from([1, 8])),
    )


def memory(candidate: Candidate, setting: Setting) -> float:
    return float(price(Pool.from_candidates([candidate]), setting).memory_bytes[0])


def step(candidate: Candidate, setting: Setting) -> float:
    return float(price(Pool.from_candidates([candidate]), setting).step_time_s[0])


@given(candidates())
@settings(max_examples=40, deadline=None)
def test_memory_grows_with_micro_batch_sequence_and_layers(candidate: Candidate) -> None:
    base = memory(candidate, SETTING)
    # as many micro-batches as before: with fewer, accumulation and its buffers may go away
    wider = replace(SETTING, global_batch_seqs=2 * SETTING.global_batch_seqs)
    assert memory(replace(candidate, micro_batch=2 * candidate.micro_batch), wider) >= base
    longer = replace(SETTING, seq_len=2 * SETTING.seq_len)
    assert memory(candidate, longer) > base
    deeper = replace(SETTING, shape=replace(SETTING.shape, layers=SETTING.shape.layers + 8))
    assert memory(candidate, deeper) > base


@given(candidates())
@settings(max_examples=40, deadline=None)
def test_time_grows_with_sequence_and_layers(candidate: Candidate) -> None:
    base = step(candidate, SETTING)
    assert step(candidate, replace(SETTING, seq_len=2 * SETTING.seq_len)) > base
    deeper = replace(SETTING, shape=replace(SETTING.shape, layers=SETTING.shape.layers + 8))
    assert step(candidate, deeper) > base


@given(candidates())
@settings(max_examples=60, deadline=None)
def test_ranks_add_up_to_the_whole_model(candidate: Candidate) -> None:
    layout = layout_of(Pool.from_candidates([candidate]), SETTING)
    ranks = ranks_of(layout)
    assert ranks.layers.sum() == SETTING.shape.layers
    whole = rank_parameters(layout, ranks).sum() * candidate.tensor_parallel
    assert whole == pytest.approx(SETTING.shape.num_params, rel=1e-9)


@given(candidates())
@settings(max_examples=60, deadline=None)
def test_matrix_products_are_conserved(candidate: Candidate) -> None:
    layout = layout_of(Pool.from_candidates([candidate]), SETTING)
    work = block_work(layout, TORCHTITAN, COEFFICIENTS)
    devices = candidate.num_devices / candidate.pipeline_parallel
    forward = float(work.gemm_flop[0] * layout.micro_batches[0]) * SETTING.shape.layers * devices
    blocks = SETTING.shape.num_params - SETTING.shape.embedding_params - SETTING.shape.head_params
    norms = (2 * SETTING.shape.layers + 1) * SETTING.shape.hidden
    assert forward == pytest.approx(2 * (blocks - norms) * SETTING.tokens_per_step, rel=1e-9)


@given(candidates())
@settings(max_examples=60, deadline=None)
def test_terms_add_up_and_parts_too(candidate: Candidate) -> None:
    pool = Pool.from_candidates([candidate])
    layout = layout_of(pool, SETTING)
    ranks = ranks_of(layout)
    found = memory_of(layout, ranks, flow_of(layout, ranks), TORCHTITAN, COEFFICIENTS, itemise=True)
    np.testing.assert_allclose(sum(found.terms.values()), found.device, rtol=1e-5)
    prices = price(pool, SETTING)
    np.testing.assert_allclose(
        prices.step_time_s, prices.ideal_s + sum(prices.parts_s[name] for name in PARTS), rtol=1e-9
    )
    np.testing.assert_allclose(prices.memory_by_rank_bytes, found.device, rtol=1e-6)
    traffic = block_tensor_traffic(layout, COEFFICIENTS)
    assert (traffic.wire_bytes <= traffic.bytes).all()


def test_the_fast_path_prices_like_one_by_one() -> None:
    pool, setting = shuffled_pool(20_000, seed=3)
    together = price(pool, setting)
    for i in np.random.default_rng(1).integers(0, len(pool), size=60):
        alone = price(Pool.from_candidates([pool.candidate(int(i))]), setting)
        assert alone.step_time_s[0] == pytest.approx(together.step_time_s[i], rel=1e-9)
        assert alone.log_sigma[0] == pytest.approx(together.log_sigma[i], rel=1e-6)
        assert alone.memory_bytes[0] == pytest.approx(together.memory_bytes[i], rel=1e-6)
        ranks = int(pool["pipeline_parallel"][i])
        np.testing.assert_allclose(alone.memory_by_rank_bytes[0], together.memory_by_rank_bytes[i, :ranks], rtol=1e-6)
        assert np.isnan(together.memory_by_rank_bytes[i, ranks:]).all()


def test_units() -> None:
    hardware = SETTING.hardware
    assert hardware.memory_bytes / GIB == pytest.approx(79.1)
    assert hardware.peak("bf16") == 989e12
    seconds = SETTING.flop_per_step / (SETTING.num_devices * hardware.peak("bf16"))
    assert SETTING.ideal_s == pytest.approx(seconds)
    prices = price(Pool.from_candidates([Candidate(data_parallel_shard=64)]), SETTING)
    assert prices.mfu_pct[0] == pytest.approx(100 * seconds / prices.step_time_s[0])
    assert 1e9 < prices.memory_bytes[0] < 1e12
