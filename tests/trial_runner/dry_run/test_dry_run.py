"""Dry runs of the real program: what fits, what the framework refuses, and known memory figures."""

from __future__ import annotations

import pytest

from search_space.candidate import Candidate
from trial_runner.dry_run import dry_run
from trial_runner.dry_run import DryRun
from trial_runner.recipe.base import describe
from trial_runner.recipe.config_file import Recipe


def debug(candidate: Candidate, batch: int = 8) -> DryRun:
    recipe = Recipe(seq_len=256, global_batch_seqs=batch, precision="bf16")
    return dry_run(candidate, describe("llama3:llama3_debugmodel"), recipe, parallel=2)


def test_the_frameworks_own_rule_is_the_reason() -> None:
    found = debug(Candidate(pipeline_parallel=2, micro_batch=8))
    assert not found.valid and not found.ranks
    assert found.error is not None and "microbatch" in found.error.lower()


def test_pipeline_and_checkpointing_on_the_debug_model() -> None:
    layout = Candidate(pipeline_parallel=2, schedule="Interleaved1F1B", virtual_stages=2, micro_batch=2)
    plain = debug(layout)
    full = debug(Candidate(**layout.to_json() | {"activation_checkpoint": "full"}))
    assert plain.valid and full.valid and [rank.pp_rank for rank in plain.ranks] == [0, 1]
    for eager, recomputed in zip(plain.ranks, full.ranks):
        assert recomputed.by_kind_bytes["activations"] < eager.by_kind_bytes["activations"]
        assert recomputed.flop > 1.15 * eager.flop
        assert sum(eager.by_kind_bytes.values()) == eager.peak_allocated_bytes
        sent = [row for row in eager.collectives if row["operation"] == "send"]
        # 4 micro-batches of 2 × 256 × 256 bf16: rank 0 sends stages 0 and 2 forward and stage 2's gradient back.
        assert sum(row["bytes"] for row in sent) == 3 * 4 * 2 * 256 * 256 * 2


def test_llama3_8b_without_checkpointing() -> None:
    """Llama-3 8B, FSDP 8, sequence 8,192: the figure that the ledger is held to, too."""
    recipe = Recipe(seq_len=8192, global_batch_seqs=8, precision="bf16")
    found = dry_run(Candidate(data_parallel_shard=8), describe("llama3:llama3_8b"), recipe)
    assert found.valid
    assert found.ranks[0].peak_allocated_bytes / 2**30 == pytest.approx(58.1, abs=0.1)
