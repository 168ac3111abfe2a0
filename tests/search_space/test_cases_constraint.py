"""Reports about combinations that cannot work; each test is named after its case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pruning.assess import assess
from search_space.candidate import Candidate
from search_space.enumerate import enumerate_pool
from search_space.errors import UserError
from search_space.hardware import find_hardware
from search_space.legal import crosses_domain
from search_space.legal import legal_by_heads
from search_space.legal import legal_tensor_parallel
from search_space.model import ModelShape
from search_space.model_torchtitan import preset_shape
from search_space.pool import canonical
from search_space.pool import Pool
from search_space.rules import judge
from search_space.rules import RISKS
from search_space.rules import RULES
from search_space.setting import Setting
from search_space.stages import check_split
from search_space.stages import split_layers
from tuner.cli.explain import candidate_from


LLAMA = preset_shape("llama3:llama3_8b") or ModelShape(layers=1, hidden=1, heads=1, kv_heads=1, ffn=1, vocab=1)


def setting(**changes: Any) -> Setting:
    values: dict[str, Any] = {
        "shape": LLAMA,
        "hardware": find_hardware("H100-SXM"),
        "devices_per_node": 8,
        "nodes": 2,
        "seq_len": 8192,
        "global_batch_seqs": 64,
    }
    return Setting(**(values | changes))


def codes(candidate: Candidate, where: Setting | None = None) -> set[str]:
    here, pool = where or setting(), Pool.from_candidates([candidate])
    return {reason.code for reason in judge(pool, here, RULES).reasons(pool, here, 0)}


def reason(candidate: Candidate, code: str, where: Setting | None = None) -> Any:
    here, pool = where or setting(), Pool.from_candidates([candidate])
    found = judge(pool, here, RULES).reasons(pool, here, 0)
    return next(r for r in found if r.code == code)


def risks(candidate: Candidate) -> set[str]:
    pool = Pool.from_candidates([candidate])
    return {r.code for r in judge(pool, setting(), RISKS).reasons(pool, setting(), 0)}


def test_CON_01_tensor_parallel_beyond_the_key_value_heads() -> None:
    found = reason(Candidate(tensor_parallel=16, micro_batch=1), "tp_divides_kv_heads")
    assert (found.required, found.available) == (16, 8)
    assert "largest that does: 8" in found.text


def test_symmetric_memory_needs_hopper_and_sharding() -> None:
    asked = Candidate(data_parallel_shard=16, symm_mem=True)
    assert "symm_mem_needs_hopper" not in codes(asked)
    old = reason(asked, "symm_mem_needs_hopper", setting(hardware=find_hardware("A100-80GB")))
    assert (old.required, old.available) == (9.0, 8.0)
    assert "gpu_only_knob" in codes(asked, setting(hardware=find_hardware("cpu")))
    assert not canonical(Candidate(data_parallel_replicate=16, symm_mem=True)).symm_mem


def test_CON_06_rules_are_by_schedule_and_version() -> None:
    few = Candidate(pipeline_parallel=4, data_parallel_shard=4, micro_batch=8, schedule="GPipe")
    assert "microbatches_fill_pipeline" not in codes(few)
    found = reason(replace(few, schedule="1F1B"), "microbatches_fill_pipeline")
    assert "1F1B" in found.text and "torch 2.14" in found.text


def test_CON_07_a_single_stage_schedule_runs_one_stage_per_rank() -> None:
    found = reason(Candidate(pipeline_parallel=4, data_parallel_shard=4, virtual_stages=2), "one_stage_per_rank")
    assert (found.required, found.available) == (2, 1)
    looped = Candidate(pipeline_parallel=4, data_parallel_shard=4, schedule="Interleaved1F1B")
    assert "several_stages_per_rank" in codes(looped)
    assert "two_stages_per_rank" in codes(replace(looped, schedule="ZBVZeroBubble", virtual_stages=4))


def test_CON_09_no_stage_is_ever_empty() -> None:
    small = setting(shape=replace(LLAMA, layers=8), nodes=1)
    deep = Candidate(pipeline_parallel=8, schedule="Interleaved1F1B", virtual_stages=2)
    assert "stages_exceed_layers" in codes(deep, small)
    with pytest.raises(UserError, match="exceed the 8 layers"):
        split_layers(8, 16)
    for layers in range(1, 40):
        for stages in range(1, layers + 1):
            split = split_layers(layers, stages)
            assert sum(split) == layers and min(split) >= 1


def test_CON_10_a_split_that_drops_layers_is_refused() -> None:
    assert sum(split_layers(61, 4)) == 61
    with pytest.raises(UserError, match="hold 60, the model has 61"):
        check_split(61, (15, 15, 15, 15))
    check_split(61, (15, 16, 15, 15))


def test_CON_13_a_known_bad_combination_is_legal_but_risky() -> None:
    candidate = Candidate(
        pipeline_parallel=2,
        schedule="Interleaved1F1B",
        virtual_stages=2,
        data_parallel_shard=2,
        tensor_parallel=2,
        expert_parallel=4,
        compile=True,
        activation_checkpoint="selective",
    )
    assert "pipeline_compile_checkpoint_experts" in risks(candidate)
    assert "pipeline_compile_checkpoint_experts" not in risks(replace(candidate, compile=False))


def test_CON_14_full_checkpointing_around_compile_is_risky() -> None:
    assert "full_checkpoint_around_compile" in risks(Candidate(compile=True, activation_checkpoint="full"))


def test_CON_15_only_the_three_together_are_risky() -> None:
    three = Candidate(float8=True, async_tp=True, activation_checkpoint="full", tensor_parallel=8, compile=True)
    code = "float8_async_tp_full_checkpoint"
    assert code in risks(three)
    for change in ({"float8": False}, {"async_tp": False}, {"activation_checkpoint": "none"}):
        assert code not in risks(replace(three, **change))  # type: ignore[arg-type]


def test_CON_16_float8_needs_multiples_of_sixteen_after_tensor_parallelism() -> None:
    odd = setting(shape=replace(LLAMA, ffn=4128), nodes=1)
    found = reason(Candidate(tensor_parallel=4, data_parallel_shard=2, float8=True), "float8_needs_sixteens", odd)
    assert found.available == 1032 and found.required == 16
    assert "float8_needs_sixteens" not in codes(Candidate(data_parallel_shard=8, float8=True), odd)


def test_CON_17_float8_experts_under_expert_and_tensor_parallelism_are_risky() -> None:
    candidate = Candidate(float8=True, expert_parallel=2, tensor_parallel=2, data_parallel_shard=2)
    assert "float8_experts_tensor_parallel" in risks(candidate)
    assert "float8_experts_tensor_parallel" not in risks(replace(candidate, tensor_parallel=1))


def test_CON_20_the_vocabulary_must_divide() -> None:
    odd = setting(shape=replace(LLAMA, vocab=50257))
    found = reason(Candidate(tensor_parallel=2, data_parallel_shard=8), "tp_divides_vocab", odd)
    assert (found.required, found.available) == (2, 50257) and "50257" in found.text


def test_CON_22_tied_embeddings_cannot_be_cut() -> None:
    tied = setting(shape=replace(LLAMA, tied_embeddings=True))
    assert "tied_embeddings_with_pipeline" in codes(Candidate(pipeline_parallel=2, data_parallel_shard=8), tied)
    assert codes(Candidate(data_parallel_shard=16), tied) == set()


def test_CON_23_expert_parallel_has_two_ways_to_be_wrong() -> None:
    moe = replace(LLAMA, experts=60, experts_active=4, expert_ffn=1024)
    where = setting(shape=moe, nodes=1, devices_per_node=4)
    found = codes(Candidate(data_parallel_shard=2, tensor_parallel=2, expert_parallel=8), where)
    assert {"ep_divides_experts", "ep_divides_ranks"} <= found
    assert Candidate(data_parallel_shard=2, tensor_parallel=2, expert_parallel=4).num_devices == 4


def test_CON_24_degrees_must_multiply_to_the_devices() -> None:
    with pytest.raises(UserError, match="= 64, the job has 8 devices") as caught:
        candidate_from("dp=8,cp=8,tp=1,pp=1", "torchtitan", 8)
    assert "dp=8,cp=1" in str(caught.value) and "dp=1,cp=8" in str(caught.value)


def test_CON_25_expert_parallel_without_tensor_parallel_stays_legal() -> None:
    moe = replace(LLAMA, experts=16, experts_active=1, expert_ffn=1024)
    where = setting(shape=moe, nodes=1, devices_per_node=4)
    assert codes(Candidate(data_parallel_shard=4, expert_parallel=4), where) == set()


def test_CON_26_legal_degrees_are_listed() -> None:
    assert "tp_divides_heads" in codes(Candidate(tensor_parallel=3), setting(shape=replace(LLAMA, heads=40)))
    assert legal_by_heads(28) == [1, 2, 4, 7, 14, 28]
    shape = replace(LLAMA, heads=28, kv_heads=4, head_dim=128, hidden=3584, ffn=18944, vocab=152064)
    assert legal_tensor_parallel(setting(shape=shape)) == [1, 2, 4]
    assert crosses_domain(setting(), 16) and not crosses_domain(setting(), 8)


def test_CON_27_micro_batches_must_fill_the_batch() -> None:
    where = setting(nodes=1, devices_per_node=2, global_batch_seqs=2)
    assert "batch_divides" not in codes(Candidate(pipeline_parallel=2, micro_batch=1), where)
    odd = setting(nodes=1, devices_per_node=2, global_batch_seqs=3)
    found = reason(Candidate(pipeline_parallel=2, micro_batch=2), "batch_divides", odd)
    assert (found.required, found.available) == (2, 3)


def test_CON_29_odd_sequences_are_refused_under_sequence_parallelism() -> None:
    for seq_len, tp in ((3, 2), (4097, 8)):
        where = setting(seq_len=seq_len, nodes=1)
        assert "tp_divides_sequence" in codes(Candidate(tensor_parallel=tp, data_parallel_shard=8 // tp), where)


def test_CON_30_two_interleaved_ranks_are_legal() -> None:
    where = setting(nodes=1, devices_per_node=4)
    candidate = Candidate(pipeline_parallel=2, schedule="Interleaved1F1B", virtual_stages=2, data_parallel_shard=2)
    assert codes(candidate, where) == set()


def test_everything_enumerated_is_judged_with_numbers() -> None:
    where = setting()
    pool = enumerate_pool(where)
    assessment = assess(pool, where)
    for i in np.flatnonzero(~assessment.judgement.legal)[::97]:
        for found in assessment.reasons(int(i)):
            assert found.text and np.isfinite(found.required) and np.isfinite(found.available)
