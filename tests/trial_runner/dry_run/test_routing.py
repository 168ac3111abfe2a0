"""Expert-parallel programs on fake tensors: tokens are dealt out evenly, and everything else is the framework's."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
import pytest

from search_space.candidate import Candidate
from trial_runner.dry_run import dry_run
from trial_runner.dry_run import Session
from trial_runner.dry_run import with_layers
from trial_runner.dry_run.routing import balanced_splits
from trial_runner.recipe.base import describe
from trial_runner.recipe.config_file import Recipe


RECIPE = Recipe(seq_len=256, global_batch_seqs=4, precision="bf16")
LAYERS = 2


@given(rows=st.integers(0, 5000), held=st.integers(1, 16), ranks=st.integers(1, 16), data=st.data())
def test_rows_are_dealt_out_in_turn(rows: int, held: int, ranks: int, data: st.DataObject) -> None:
    experts, rank = held * ranks, data.draw(st.integers(0, ranks - 1))
    dealt = Counter(row % experts // held for row in range(rows))
    sent, received = balanced_splits(rows, experts, ranks, rank)
    assert sent == [dealt[to] for to in range(ranks)]
    # What a rank receives from each is what each sends it.
    assert received == [balanced_splits(rows, experts, ranks, other)[0][rank] for other in range(ranks)]


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_bytes_exchanged_are_those_of_the_formula(kind: str) -> None:
    """tokens × experts of each × width × 2 bytes, four times forward and backward, two more where it is recomputed; and
    one count (8 bytes) an expert before each forward pass."""
    base = with_layers(describe("qwen3:qwen3_moe_debug"), LAYERS)
    layout = Candidate(data_parallel_shard=4, expert_parallel=2, activation_checkpoint=kind)
    found = dry_run(layout, base, RECIPE)
    assert found.valid, found.error
    assert found.routing is not None and "balanced" in found.routing
    again = kind != "none"
    routed = RECIPE.seq_len * base.shape.experts_active * base.shape.hidden * 2
    exchanged = [row for row in found.ranks[0].collectives if "all" in row["operation"] and row["group"] == "ep"]
    assert [row["operation"] for row in exchanged] == ["alltoall"]
    assert exchanged[0]["count"] == LAYERS * (5 + 3 * again) and exchanged[0]["ranks"] == 2
    # What goes in and what comes out.
    assert exchanged[0]["bytes"] == 2 * LAYERS * ((4 + 2 * again) * routed + (1 + again) * 8 * base.shape.experts)


def test_the_framework_still_refuses_and_dense_models_have_no_routing() -> None:
    base = with_layers(describe("qwen3:qwen3_moe_debug"), LAYERS)
    dense = with_layers(describe("llama3:llama3_debugmodel"), LAYERS)
    with Session() as session:
        refused = dry_run(Candidate(data_parallel_shard=4, expert_parallel=3), base, RECIPE, session=session)
        found = dry_run(Candidate(data_parallel_shard=4), dense, RECIPE, session=session)
    assert not refused.valid and not refused.unknown and refused.error is not None
    assert "mesh_sizes" in refused.error and refused.routing is None
    assert found.valid and found.routing is None


def test_exchanges_by_cuda_kernels_are_not_known_rather_than_refused() -> None:
    base = describe("deepseek_v3:deepseek_v3_debugmodel_hybridep")
    found = dry_run(Candidate(data_parallel_shard=2, expert_parallel=2), base, RECIPE)
    assert not found.valid and found.unknown
    assert found.error is not None and "HybridEP" in found.error and "moe_comm_backend" in found.error
