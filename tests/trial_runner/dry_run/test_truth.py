"""Dry run against truth: the same two steps trained for real on CPU ranks, counted by the same tracker."""

from __future__ import annotations

from typing import Any

import pytest

from search_space.candidate import Candidate
from search_space.pool import canonical
from trial_runner.dry_run import dry_run
from trial_runner.dry_run import truth
from trial_runner.dry_run import with_layers
from trial_runner.recipe.base import BaseFunction
from trial_runner.recipe.base import describe
from trial_runner.recipe.config_file import Recipe


pytestmark = pytest.mark.e2e
SLOW = pytest.mark.slow
INTERLEAVED = {"pipeline_parallel": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2, "micro_batch": 2}


def agree(knobs: dict[str, Any], base: BaseFunction) -> None:
    """Assert that real training and the dry run of it hold, compute and send the same on every rank."""
    candidate = canonical(Candidate(**knobs))
    recipe = Recipe(seq_len=256, global_batch_seqs=8, precision="bf16")
    real = truth(candidate, base, recipe)
    dry = dry_run(candidate, base, recipe, gpu_kernels=False)
    assert real.valid and dry.valid, real.error or dry.error
    for trained, computed in zip(real.ranks, dry.ranks, strict=True):
        assert computed.peak_allocated_bytes == pytest.approx(trained.peak_allocated_bytes, rel=0.005)
        assert computed.flop == trained.flop
        assert computed.collectives == trained.collectives


@pytest.mark.parametrize(
    "knobs",
    [
        {"data_parallel_shard": 2, "micro_batch": 4},
        {"tensor_parallel": 2, "micro_batch": 4, "activation_checkpoint": "full"},
        {**INTERLEAVED, "activation_checkpoint": "selective"},
        pytest.param({"data_parallel_replicate": 2, "micro_batch": 4}, marks=SLOW),
        pytest.param({"data_parallel_shard": 2, "micro_batch": 2, "activation_checkpoint": "selective"}, marks=SLOW),
        pytest.param({"pipeline_parallel": 2, "micro_batch": 2}, marks=SLOW),
        pytest.param({**INTERLEAVED, "schedule": "ZBVZeroBubble"}, marks=SLOW),
        pytest.param({"tensor_parallel": 2, "data_parallel_shard": 2, "micro_batch": 4}, marks=SLOW),
        pytest.param({"data_parallel_replicate": 2, "data_parallel_shard": 2, "micro_batch": 2}, marks=SLOW),
    ],
    ids=lambda knobs: canonical(Candidate(**knobs)).label(),
)
def test_dry_run_counts_what_training_holds(knobs: dict[str, Any]) -> None:
    agree(knobs, describe("llama3:llama3_debugmodel"))


SPREAD = {"data_parallel_shard": 2, "expert_parallel": 2}


@pytest.mark.parametrize(
    ("model", "knobs"),
    [
        ("qwen3:qwen3_moe_debug", {**SPREAD, "micro_batch": 4}),
        pytest.param("qwen3:qwen3_moe_debug", {**SPREAD, "activation_checkpoint": "selective"}, marks=SLOW),
        pytest.param("deepseek_v3:deepseek_v3_debugmodel", {**SPREAD, "micro_batch": 4}, marks=SLOW),
        pytest.param("deepseek_v3:deepseek_v3_debugmodel", {**SPREAD, "activation_checkpoint": "full"}, marks=SLOW),
        pytest.param("qwen3:qwen3_moe_debug", {"tensor_parallel": 2, "expert_parallel": 2}, marks=SLOW),
        pytest.param("qwen3:qwen3_moe_debug", {**SPREAD, "tensor_parallel": 2, "expert_parallel": 4}, marks=SLOW),
        pytest.param("qwen3:qwen3_moe_debug", {**SPREAD, "pipeline_parallel": 2}, marks=SLOW),
    ],
)
def test_dry_run_counts_what_training_with_experts_spread_holds(model: str, knobs: dict[str, Any]) -> None:
    """Real routers deal tokens out in turn here (torchtitan's own switch for it), as the dry run assumes."""
    agree(knobs, with_layers(describe(model), 3))
