"""Numbers of the two documents that the product grew from, restated with inputs in tests/data/golden.json.

Every entry is checked against ``right``: where a document slipped, its own figure is in ``seed`` and the note says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pruning import decisions
from pruning.accounts import simple
from pruning.accounts.account import Account
from pruning.accounts.account import MEGATRON
from pruning.accounts.account import TORCHTITAN
from pruning.coefficients import prior
from pruning.ledger import communication
from pruning.ledger.layout import Layout
from pruning.ledger.layout import layout_of
from pruning.ledger.layout import Ranks
from pruning.ledger.layout import ranks_of
from pruning.ledger.memory import state_bytes
from pruning.ledger.schedule import bubble_over_useful
from pruning.ledger.schedule import bubble_share_of_total
from pruning.ledger.schedule import simulate
from search_space.candidate import Candidate
from search_space.flop import flop_per_token
from search_space.flop import logits_bytes
from search_space.flop import recompute_flop_per_token
from search_space.hardware import find_hardware
from search_space.model import ModelShape
from search_space.model_torchtitan import preset_shape
from search_space.pool import Pool
from search_space.setting import Setting
from search_space.stages import split_layers


ENTRIES = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text(encoding="utf-8"))
SHAPE = preset_shape("llama3:llama3_70b") or ModelShape(layers=1, hidden=1, heads=1, kv_heads=1, ffn=1, vocab=1)
SETTING = Setting(
    shape=SHAPE,
    hardware=find_hardware("H100-SXM"),
    devices_per_node=8,
    nodes=128,
    seq_len=8192,
    global_batch_seqs=512,
)
PARAMS = SHAPE.num_params
LAYER = simple.layer_activation_bytes(8192, 1, 8192, 8)
ADAM = {"A": (4, 32), "B": (2, 64), "C": (1, 128)}


def layout(**knobs: Any) -> Layout:
    return layout_of(Pool.from_candidates([Candidate(**({"tensor_parallel": 8} | knobs))]), SETTING)


def ranks(**knobs: Any) -> Ranks:
    return ranks_of(layout(**knobs))


def data_bytes(account: Account, **knobs: Any) -> float:
    found = communication.data_traffic(layout(**knobs), account, prior(SETTING))
    return float(sum(traffic.bytes[0] for traffic in found))


def memory(name: str) -> simple.SimpleMemory:
    pp, dp = ADAM[name]
    return simple.simple_memory(PARAMS, 8, pp, dp, LAYER, 80)


def pipeline_bytes(pp: int, dp: int) -> float:
    cut = layout(pipeline_parallel=pp, virtual_stages=4, schedule="Interleaved1F1B", data_parallel_shard=dp)
    return float(communication.pipeline_traffic(cut, prior(SETTING)).bytes[0])


def tensor_wire_bytes() -> float:
    cut = layout(pipeline_parallel=4, data_parallel_shard=32)
    return float(communication.block_tensor_traffic(cut, prior(SETTING)).wire_bytes[0])


def state_fsdp_1024() -> float:
    cut = layout(tensor_parallel=1, data_parallel_shard=1024)
    return float(sum(term[0, 0] for term in state_bytes(cut, ranks_of(cut), TORCHTITAN).values()))


LLAMA2_13B = ModelShape(layers=40, hidden=5120, heads=40, kv_heads=40, ffn=13824, vocab=32000)
TPU = find_hardware("TPU-v5p")
INTENSITY = decisions.arithmetic_intensity(4.6e14, 2 * TPU.domain_bandwidth)
ROUNDED = 2550.0
BF16_REDUCE = replace(MEGATRON, reduce_bytes=2.0)

COMPUTED: dict[str, Callable[[], Any]] = {
    "params_70b": lambda: PARAMS,
    "params_70b_embedding": lambda: SHAPE.embedding_params,
    "flop_per_token_70b": lambda: flop_per_token(SHAPE, 8192),
    "flop_per_step_70b": lambda: SETTING.flop_per_step,
    "ideal_step_s_70b_1024": lambda: SETTING.ideal_s,
    "step_s_at_mfu_42": lambda: SETTING.ideal_s / 0.42,
    "tokens_per_s_at_mfu_42": lambda: SETTING.tokens_per_step / (SETTING.ideal_s / 0.42),
    "static_bytes_megatron_70b": lambda: MEGATRON.state_bytes * PARAMS,
    "static_bytes_fsdp2_70b_1024": state_fsdp_1024,
    "act_bytes_per_layer_tp8": lambda: LAYER,
    "memory_total_candidate_C": lambda: memory("C").total,
    "memory_static_candidate_C": lambda: memory("C").static,
    "memory_total_candidate_B": lambda: memory("B").total,
    "memory_static_candidate_B": lambda: memory("B").static,
    "memory_total_candidate_A": lambda: memory("A").total,
    "memory_static_candidate_A": lambda: memory("A").static,
    "inflight_interleaved_A": lambda: simple.interleaved_inflight_layers(4, 4, 5),
    "inflight_interleaved_B": lambda: simple.interleaved_inflight_layers(2, 4, 10),
    "tp_bytes_per_layer_microbatch": lambda: tensor_wire_bytes() / (20 * 16),
    "tp_bytes_per_step_A": tensor_wire_bytes,
    "tp_seconds_per_step_A": lambda: communication.nominal_seconds(tensor_wire_bytes(), 450e9),
    "dp_bytes_per_step_A": lambda: data_bytes(BF16_REDUCE, pipeline_parallel=4, data_parallel_shard=32, zero_stage=1),
    "dp_seconds_per_step_A": lambda: communication.nominal_seconds(
        data_bytes(BF16_REDUCE, pipeline_parallel=4, data_parallel_shard=32, zero_stage=1), 50e9
    ),
    "dp_bytes_per_step_B": lambda: data_bytes(BF16_REDUCE, pipeline_parallel=2, data_parallel_shard=64, zero_stage=1),
    "pp_bytes_per_step_A": lambda: pipeline_bytes(4, 32),
    "pp_bytes_per_step_B": lambda: pipeline_bytes(2, 64),
    "bubble_over_useful_A": lambda: bubble_over_useful(4, 16),
    "bubble_over_useful_A_v4": lambda: bubble_over_useful(4, 16, 4),
    "bubble_over_useful_B_v4": lambda: bubble_over_useful(2, 8, 4),
    "bubble_share_of_total_v": lambda: bubble_share_of_total(4, 16, 4),
    "fsdp128_bytes_per_step": lambda: data_bytes(TORCHTITAN, data_parallel_shard=128, accumulate_without_sync=True),
    "fsdp128_seconds_per_step": lambda: communication.nominal_seconds(
        data_bytes(TORCHTITAN, data_parallel_shard=128, accumulate_without_sync=True), 50e9
    ),
    "fsdp128_no_reshard_bytes": lambda: data_bytes(
        TORCHTITAN, data_parallel_shard=128, accumulate_without_sync=True, reshard_after_forward="never"
    ),
    "microbatch_sweep_A": lambda: simple.micro_batch_sweep(PARAMS, 8, 4, 32, 512, LAYER, 80, 4, [1, 2, 4]),
    "full_recompute_act_bytes": lambda: simple.full_recompute_bytes(80, simple.layer_input_bytes(8192, 1, 8192, 8)),
    "full_recompute_extra_flop": lambda: recompute_flop_per_token(SHAPE, 8192) / flop_per_token(SHAPE, 8192),
    "block_recompute_6_of_20": lambda: simple.block_recompute(6, 20, 4, LAYER),
    "logits_fp32_bytes": lambda: logits_bytes(SHAPE, 8192, 4),
    "offload_round_trip_s": lambda: decisions.offload_round_trip_s(LAYER, find_hardware("H100-SXM").pcie_bandwidth),
    "loss_table_32_to_42": lambda: simple.overruns([0.08, 0.4, 0.13, 0.05, 0.2, 0.25, 0.35], 10)[0],
    "tpu_v5p_intensity": lambda: INTENSITY,
    "dp_state_bytes_70b": lambda: simple.data_parallel_state_bytes(70e9),
    "fsdp_state_bytes_70b_128": lambda: simple.data_parallel_state_bytes(70e9, 128),
    "tp_limit_llama7b": lambda: decisions.tensor_parallel_limit(11008, ROUNDED),
    "tp_limit_llama70b": lambda: decisions.tensor_parallel_limit(28672, ROUNDED),
    "tp_limit_gemma7b": lambda: decisions.tensor_parallel_limit(49152, ROUNDED),
    "mixed_X_opt_64": lambda: decisions.mixed_optimum(48000, 32768, 64).data,
    "mixed_critical_tokens_13b": lambda: decisions.mixed_critical_tokens(13824, ROUNDED, 2),
    "mixed_X_opt_13b": lambda: decisions.mixed_optimum(3e6, 13824, 4096, 2, 1).data,
    "cross_pod_tokens": lambda: decisions.cross_pod_critical_tokens(4.6e14, TPU.pod_bandwidth),
    "bubble_zm": lambda: bubble_share_of_total(4, 16),
    "params_llama2_13b": lambda: LLAMA2_13B.num_params,
    "adam_state_13b": lambda: simple.parameters_and_moments_bytes(13e9),
    "ckpt_act_13b": lambda: simple.checkpointed_activation_bytes(40, 16e6, 5120, 13824),
    "step_s_13b_v5p": lambda: decisions.step_seconds(13e9, 3e6, 4096, 4.6e14, 0.4),
    "tokens_per_s_70b_128": lambda: decisions.tokens_per_second(70e9, 128, 5e14),
    "optimizer_bytes_70b_tp8_pp4_dp4": lambda: simple.optimizer_bytes(70e9, 8, 4, 4),
    "tp_limit_2axes_llama7b": lambda: decisions.tensor_parallel_limit(11008, ROUNDED, 2),
    "tp_limit_2axes_llama70b": lambda: decisions.tensor_parallel_limit(28672, ROUNDED, 2),
    "tp_limit_2axes_gemma7b": lambda: decisions.tensor_parallel_limit(49152, ROUNDED, 2),
    "fsdp_critical_tokens_3axes": lambda: decisions.data_parallel_critical_tokens(ROUNDED, 3),
    "mixed_critical_tokens_F30000": lambda: decisions.mixed_critical_tokens(30000, ROUNDED, 2),
    "h100_298": lambda: decisions.arithmetic_intensity(1.0e15, find_hardware("H100-SXM").memory_bandwidth),
    "zero1_bytes": lambda: simple.zero1_bytes(1, 8),
    "zero2_bytes": lambda: simple.zero2_bytes(1, 8),
    "step_s_70b_128": lambda: 4194304 / decisions.tokens_per_second(70e9, 128, 5e14),
    "budget_table_A": lambda: [
        simple.budget_seconds(2.0 / 0.62, 3 / 64, seconds, launch_s=0.2, straggler_s=0.1) for seconds in (0.3, 0.5)
    ],
    "fp8_step": lambda: [simple.fp8_saving(0.7, saving) for saving in (0.3, 0.4)],
    "fsdp_sync_every_microbatch_bytes": lambda: data_bytes(TORCHTITAN, data_parallel_shard=128),
}


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["id"])
def test_golden(entry: dict[str, Any]) -> None:
    got = np.array(COMPUTED[entry["id"]](), dtype=float)
    np.testing.assert_allclose(got, np.array(entry["right"], dtype=float), rtol=max(entry["rel_tol"], 1e-12))


def test_every_entry_is_computed() -> None:
    assert {entry["id"] for entry in ENTRIES} == set(COMPUTED)


def test_simulated_pipelines_agree_with_the_closed_forms() -> None:
    for name, pp, m, per_chunk in (("A", 4, 16, 5), ("B", 2, 8, 10)):
        step = simulate("Interleaved1F1B", pp, 4, m, split_layers(80, 4 * pp))
        assert step.inflight[0] == simple.interleaved_inflight_layers(pp, 4, per_chunk), name
        assert step.span / step.work[0] - 1 == pytest.approx(bubble_over_useful(pp, m, 4))
    plain = simulate("1F1B", 4, 1, 16, split_layers(80, 4))
    assert plain.inflight == (80, 60, 40, 20)
