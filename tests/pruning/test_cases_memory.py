"""Reports about memory from people who train large models; each test is named after its case."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
import json
from typing import Any

import numpy as np
import pytest

from pruning.accounts.account import Account
from pruning.accounts.account import find_account
from pruning.accounts.account import FOREACH_STEP_BYTES
from pruning.accounts.account import MEGATRON
from pruning.accounts.account import TORCHTITAN
from pruning.assess import assess
from pruning.calibration import load_coefficients
from pruning.coefficients import prior
from pruning.explain import explain
from pruning.ledger.layout import layout_of
from pruning.ledger.layout import ranks_of
from pruning.ledger.memory import Memory
from pruning.ledger.memory import memory_of
from pruning.ledger.pipeline import flow_of
from pruning.ledger.prices import price
from pruning.ledger.schedule import inflight_chunks
from pruning.limits import max_expert_imbalance
from pruning.limits import max_seq_len
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.hardware import find_hardware
from search_space.hardware import GIB
from search_space.knobs import parse_assignment
from search_space.model import ModelShape
from search_space.model_torchtitan import preset_shape
from search_space.pool import Pool
from search_space.setting import Setting


def shape(name: str) -> ModelShape:
    found = preset_shape(name)
    assert found is not None
    return found


def setting(name: str = "llama3:llama3_8b", **changes: Any) -> Setting:
    values: dict[str, Any] = {
        "shape": shape(name),
        "hardware": find_hardware("H100-SXM"),
        "devices_per_node": 8,
        "nodes": 1,
        "seq_len": 8192,
        "global_batch_seqs": 8,
    }
    return Setting(**(values | changes))


def memory(candidate: Candidate, where: Setting, account: Account | None = None) -> Memory:
    layout = layout_of(Pool.from_candidates([candidate]), where)
    ranks = ranks_of(layout)
    habits = account or find_account(where.framework)
    return memory_of(layout, ranks, flow_of(layout, ranks), habits, prior(where), itemise=True)


def gib(found: Memory, term: str) -> float:
    return float(found.terms[term].max()) / GIB


def test_dry_run_figures() -> None:
    """Allocated memory of the simulated real program, GiB: 57.3 and 74.0 (70B), 58.1 (8B)."""
    big = setting("llama3:llama3_70b", nodes=128, global_batch_seqs=512)
    plain = Candidate(tensor_parallel=8, pipeline_parallel=4, data_parallel_shard=32)
    looped = replace(plain, schedule="Interleaved1F1B", virtual_stages=2)
    assert memory(plain, big).allocated.max() / GIB == pytest.approx(57.3, rel=0.02)
    assert memory(looped, big).allocated.max() / GIB == pytest.approx(74.0, rel=0.02)
    assert memory(Candidate(data_parallel_shard=8), setting()).allocated.max() / GIB == pytest.approx(58.1, rel=0.02)


FOLDED = {"schedule": "ZBVZeroBubble", "virtual_stages": 2}
DRY_RUNS: tuple[tuple[dict[str, Any], int, tuple[float, ...], float], ...] = (
    ({"data_parallel_shard": 8, "activation_checkpoint": "selective"}, 8, (33.01,), 0.02),
    ({"data_parallel_shard": 8, "activation_checkpoint": "full"}, 8, (18.98,), 0.02),
    ({"tensor_parallel": 8, "activation_checkpoint": "selective", "micro_batch": 2}, 4, (24.04,), 0.02),
    ({"tensor_parallel": 8, "activation_checkpoint": "full", "micro_batch": 4}, 8, (18.59,), 0.03),
    ({"tensor_parallel": 2, "data_parallel_shard": 4}, 8, (40.76,), 0.02),
    (
        {"data_parallel_shard": 4, "data_parallel_replicate": 2, "activation_checkpoint": "selective"},
        8,
        (44.48,),
        0.02,
    ),
    (
        {"pipeline_parallel": 2, "data_parallel_shard": 4, "activation_checkpoint": "selective"},
        16,
        (51.46, 46.88),
        0.02,
    ),
    ({"pipeline_parallel": 2, "data_parallel_shard": 4, **FOLDED}, 16, (87.69, 81.46), 0.05),
    (
        {"pipeline_parallel": 2, "data_parallel_shard": 4, "activation_checkpoint": "full", **FOLDED},
        16,
        (89.74, 92.57),
        0.13,
    ),
)


@pytest.mark.parametrize(
    ("knobs", "sequences", "allocated", "tolerance"), DRY_RUNS, ids=[Candidate(**run[0]).label() for run in DRY_RUNS]
)
def test_dry_run_of_the_8b_model(
    knobs: dict[str, Any], sequences: int, allocated: tuple[float, ...], tolerance: float
) -> None:
    """Allocated GiB by pipeline rank of torchtitan 0.3.0's real program on 8 simulated ranks, sequences of 8,192."""
    found = memory(Candidate(**knobs), setting(global_batch_seqs=sequences)).allocated[0] / GIB
    assert found == pytest.approx(allocated, rel=tolerance)


def test_MEM_01_the_optimizer_has_a_line_of_its_own() -> None:
    found = memory(Candidate(data_parallel_shard=8, activation_checkpoint="full"), setting())
    assert gib(found, "optimizer") == pytest.approx(7.48, abs=0.01)


def test_MEM_02_the_optimizer_step_has_a_peak_of_its_own() -> None:
    candidate = Candidate(data_parallel_shard=8, activation_checkpoint="full")
    short = setting(seq_len=1024)
    fused, foreach = (
        memory(candidate, short),
        memory(candidate, short, replace(TORCHTITAN, step_bytes=FOREACH_STEP_BYTES)),
    )
    assert gib(fused, "optimizer_step") == 0
    assert gib(foreach, "optimizer_step") == pytest.approx(gib(foreach, "optimizer") / 2)
    assert foreach.allocated.max() > fused.allocated.max()


def test_MEM_05_schedules_trade_memory_for_time() -> None:
    small = ModelShape(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=16384, vocab=50304, gated_mlp=False)
    where = setting(shape=small, framework="megatron", seq_len=4096, global_batch_seqs=64)
    base = Candidate(pipeline_parallel=8, zero_stage=0, loss_chunks=1, micro_batch=1)
    peaks = {}
    for name, stages in (("1F1B", 1), ("ZBVZeroBubble", 2), ("Interleaved1F1B", 2)):
        found = memory(replace(base, schedule=name, virtual_stages=stages), where, MEGATRON)
        peaks[name] = float(found.device.max())
    assert peaks["1F1B"] < peaks["ZBVZeroBubble"] < peaks["Interleaved1F1B"]
    assert peaks["ZBVZeroBubble"] / peaks["1F1B"] == pytest.approx(1.10, rel=0.15)
    assert peaks["Interleaved1F1B"] / peaks["1F1B"] == pytest.approx(1.19, rel=0.15)


def test_MEM_06_interleaved_warm_up() -> None:
    for ranks, stages, expected in ((4, 2, 5.5), (8, 2, 11.5), (8, 4, 9.75)):
        assert inflight_chunks("Interleaved1F1B", ranks, stages, 4 * ranks)[0] / stages == expected


def test_MEM_07_every_answer_states_its_parts() -> None:
    terms = explain(Candidate(data_parallel_shard=8), setting())["memory_terms_gib"]
    for name in ("parameters", "gradients", "optimizer", "activations", "logits", "unsharded_parameters", "fixed"):
        assert name in terms
    assert {"communicators", "allocator"} <= set(terms)
    states = sum(terms[name][0] for name in ("parameters", "gradients", "optimizer"))
    assert sum(values[0] for values in terms.values()) > 2 * states


def test_MEM_08_only_sharded_terms_shrink_with_data_parallel_ranks() -> None:
    two = memory(Candidate(data_parallel_shard=2), setting(devices_per_node=2, global_batch_seqs=2))
    four = memory(Candidate(data_parallel_shard=4), setting(devices_per_node=4, global_batch_seqs=4))
    for name in ("parameters", "optimizer"):
        assert gib(four, name) == pytest.approx(gib(two, name) / 2)
    for name in ("activations", "logits", "unsharded_parameters", "fixed"):
        assert gib(four, name) == pytest.approx(gib(two, name))


def test_MEM_13_each_communicator_takes_memory_outside_the_allocator() -> None:
    where = setting("llama3:llama3_70b", nodes=32, global_batch_seqs=64, seq_len=65536)
    five = Candidate(
        tensor_parallel=4,
        pipeline_parallel=4,
        context_parallel=4,
        data_parallel_replicate=2,
        data_parallel_shard=2,
    )
    assert float(memory(five, where).terms["communicators"].max()) > 2.5e9
    alone = memory(Candidate(data_parallel_shard=8), setting())
    assert 0 < float(alone.terms["communicators"].max()) < 1e9


def test_MEM_14_no_communicator_is_charged_for_a_dimension_of_one_rank() -> None:
    # torchtitan 0.3.0 builds such dimensions on a fake backend (ParallelDims.build_mesh).
    alone = memory(Candidate(data_parallel_shard=8), setting()).terms["communicators"][0, 0]
    pair = memory(Candidate(data_parallel_shard=4, tensor_parallel=2), setting()).terms["communicators"][0, 0]
    assert alone == pytest.approx(0.688e9, rel=1e-6) and pair == pytest.approx(0.688e9 + 0.544e9, rel=1e-6)


def test_MEM_15_a_pipeline_keeps_unsharded_parameters_by_default() -> None:
    where = setting("llama3:llama3_70b", nodes=4, global_batch_seqs=64)
    by_default = Candidate(pipeline_parallel=4, data_parallel_shard=8)
    found = memory(by_default, where).terms["unsharded_parameters"][0]
    assert found[1] == pytest.approx(34.2e9, rel=0.01)
    resharded = memory(replace(by_default, reshard_after_forward="always"), where).terms["unsharded_parameters"][0]
    assert resharded[1] < found[1] / 5


def test_MEM_17_selective_takes_about_twice_what_full_takes() -> None:
    llama = ModelShape(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000)
    where = setting(shape=llama, hardware=find_hardware("A100-80GB"), seq_len=2048, global_batch_seqs=64)
    candidate = Candidate(data_parallel_shard=8, micro_batch=8, loss_chunks=1)
    kinds = {
        kind: float(memory(replace(candidate, activation_checkpoint=kind), where).allocated.max())
        for kind in ("full", "selective", "none")
    }
    assert kinds["full"] < kinds["selective"] < kinds["none"]
    assert 1.8 <= kinds["selective"] / kinds["full"] <= 2.6


def test_MEM_18_calibration_belongs_to_one_version_and_unknown_options_are_refused() -> None:
    old = setting(versions={"torchtitan": "0.2.0"})
    text = json.dumps(prior(old).to_json())
    assert load_coefficients(text, old).framework == "torchtitan 0.2.0"
    with pytest.raises(UserError, match=r"torchtitan 0\.3\.0"):
        load_coefficients(text, setting(versions={"torchtitan": "0.3.0"}))
    with pytest.raises(UserError, match="activation_checkpoint"):
        parse_assignment("ac=selective-2")


def test_MEM_21_compiled_recomputation_has_its_own_estimate() -> None:
    eager = memory(Candidate(data_parallel_shard=8, activation_checkpoint="full"), setting())
    compiled = memory(Candidate(data_parallel_shard=8, activation_checkpoint="full", compile=True), setting())
    assert gib(compiled, "recompute") > gib(eager, "recompute")


def test_MEM_22_expert_imbalance_is_assumed_and_reported() -> None:
    where = setting("qwen3:qwen3_30b_a3b", nodes=2, seq_len=4096, global_batch_seqs=32)
    candidate = Candidate(data_parallel_shard=16, expert_parallel=8, micro_batch=2, activation_checkpoint="full")
    even, uneven = (
        float(
            price(
                Pool.from_candidates([candidate]), where, account=replace(TORCHTITAN, expert_imbalance=x)
            ).memory_bytes[0]
        )
        for x in (1.0, 3.0)
    )
    assert uneven > even
    told = explain(candidate, where)["expert_imbalance"]
    assert told["assumed"] == TORCHTITAN.expert_imbalance
    assert told["feasible_up_to"] == max_expert_imbalance(candidate, where)
    assert max_expert_imbalance(Candidate(data_parallel_shard=8), setting()) is None


def test_MEM_25_the_longest_sequence_doubles_with_context_parallel_ranks() -> None:
    lengths = []
    for cp in (1, 2, 4, 8):
        where = setting(nodes=cp, global_batch_seqs=8, seq_len=32768)
        candidate = Candidate(data_parallel_shard=8, context_parallel=cp, activation_checkpoint="full")
        lengths.append(max_seq_len(candidate, where))
    for shorter, longer in pairwise(lengths):
        assert longer / shorter == pytest.approx(2, rel=0.15)
    split = memory(Candidate(data_parallel_shard=8, context_parallel=2), setting(nodes=2, seq_len=32768))
    whole = memory(Candidate(data_parallel_shard=8), setting(seq_len=32768))
    assert gib(split, "logits") < gib(whole, "logits")


def test_the_verdict_says_required_and_available() -> None:
    where = setting("llama3:llama3_70b", nodes=128, global_batch_seqs=512, framework="megatron", memory_margin=0.1)
    candidate = Candidate(tensor_parallel=8, data_parallel_replicate=128, zero_stage=1, loss_chunks=1)
    assessment = assess(Pool.from_candidates([candidate]), where)
    (reason,) = assessment.reasons(0)
    assert reason.code == "memory" and reason.unit == "GiB"
    assert reason.required > reason.available == pytest.approx(79.1 * 0.9)
    assert not assessment.feasible.any() and np.isfinite(reason.required)
