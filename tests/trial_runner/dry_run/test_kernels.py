"""The saved-tensor rules of CUDA kernels: what is substituted on CPU keeps what PyTorch's own CUDA formulas keep.

Autograd formulas of fake CUDA tensors need no GPU; they say which tensors the real kernels keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._higher_order_ops.flex_attention import flex_attention
from torch._subclasses.fake_tensor import FakeTensorMode
import torch.nn.attention.flex_attention as flex
import torch.nn.functional as functional

from search_space.candidate import Candidate
from trial_runner.dry_run import dry_run
from trial_runner.dry_run import Session
from trial_runner.dry_run import with_layers
from trial_runner.dry_run.kernels import fused_attention
from trial_runner.dry_run.kernels import FusedRMSNorm
from trial_runner.recipe.base import describe
from trial_runner.recipe.config_file import Recipe


Saved = list[tuple[tuple[int, ...], torch.dtype]]


def saved_by(forward: Callable[[], Any]) -> Saved:
    """Shapes and types of what a forward pass keeps for backward."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sorted(((tuple(tensor.shape), tensor.dtype) for tensor in kept), key=str)


def heads(device: str) -> list[torch.Tensor]:
    return [torch.empty((2, 4, 256, 64), dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(3)]


def test_rms_norm_keeps_what_the_cuda_kernel_keeps() -> None:
    def tensors(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.empty((64, 128), dtype=torch.bfloat16, device=device, requires_grad=True)
        return x, torch.empty(128, dtype=torch.bfloat16, device=device, requires_grad=True)

    with FakeTensorMode():
        x, weight = tensors("cuda")
        real = saved_by(lambda: functional.rms_norm(x, (128,), weight, 1e-5))
        x, weight = tensors("cpu")
        ours = saved_by(lambda: FusedRMSNorm.apply(x, weight, 1e-5))
    assert ours == real


def test_attention_on_cpu_keeps_what_flash_attention_keeps() -> None:
    """Query, key, value, output and one fp32 per row and head; the CUDA kernel's random seeds are three numbers."""
    with FakeTensorMode():
        q, k, v = heads("cuda")
        real = saved_by(lambda: torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True))
        q, k, v = heads("cpu")
        ours = saved_by(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert ours == [entry for entry in real if entry[1] != torch.uint64]


def test_flex_attention_keeps_one_number_a_row_more_than_flash_attention() -> None:
    """So substituting one for the other is right to 4 bytes per row and head, and a mask of blocks."""
    with FakeTensorMode():
        q, k, v = heads("meta")
        mask = flex._create_empty_block_mask(q, k).as_tuple()
        real = saved_by(lambda: flex_attention(q, k, v, flex._identity, mask, 0.125, {}, (), ()))
        q, k, v = heads("cpu")
        ours = saved_by(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True))
    more = [entry for entry in real if entry[1] != torch.int32]
    for entry in ours:
        more.remove(entry)
    assert more == [((2, 4, 256), torch.float32)]


def test_latent_attention_keeps_what_flex_attention_keeps_but_one_number_a_row() -> None:
    """Values narrower than queries: no CPU kernel but the one that holds all scores would take them."""

    def narrow(device: str) -> list[torch.Tensor]:
        widths = (192, 192, 128)
        return [torch.empty((2, 4, 256, w), dtype=torch.bfloat16, device=device, requires_grad=True) for w in widths]

    with FakeTensorMode():
        q, k, v = narrow("meta")
        mask = flex._create_empty_block_mask(q, k).as_tuple()
        real = saved_by(lambda: flex_attention(q, k, v, flex._identity, mask, 0.125, {}, (), ()))
        q, k, v = narrow("cpu")
        ours = saved_by(lambda: fused_attention(q, k, v))
    more = [entry for entry in real if entry[1] != torch.int32]
    for entry in ours:
        more.remove(entry)
    assert more == [((2, 4, 256), torch.float32)]


def test_latent_attention_holds_no_scores() -> None:
    """DeepSeek's debug model: less than the scores of one block is held, and FLOP are those of the two widths: one
    product by each of them forward, three by queries' and two by values' backward."""
    base = with_layers(describe("deepseek_v3:deepseek_v3_debugmodel"), 2)
    shape = base.shape
    flop = []
    with Session() as session:
        for seq_len in (2048, 4096):
            recipe = Recipe(seq_len=seq_len, global_batch_seqs=1, precision="bf16")
            found = dry_run(Candidate(), base, recipe, session=session)
            assert found.valid, found.error
            flop.append(found.ranks[0].flop)
    scores = shape.heads * 4096**2 * 2
    assert found.ranks[0].by_kind_bytes["activations"] < scores
    # Products grow with tokens, attention with their square: f(4096) - 2·f(2048) is half of attention's at 4096.
    queries, values = shape.query_width, shape.value_width
    assert flop[1] - 2 * flop[0] == pytest.approx(0.5 * 2 * 2 * 4096**2 * (4 * queries + 3 * values))


def test_selective_checkpointing_keeps_attention_and_recomputes_every_second_product() -> None:
    """FLOP say it: the output product and one of the two up products run again, attention does not."""
    base = describe("llama3:llama3_debugmodel")
    recipe = Recipe(seq_len=256, global_batch_seqs=2, precision="bf16")
    with Session() as session:
        none, selective = (
            dry_run(Candidate(micro_batch=2, activation_checkpoint=kind), base, recipe, session=session).ranks[0]
            for kind in ("none", "selective")
        )
    shape, tokens = base.shape, 2 * 256
    again = 2 * tokens * shape.hidden * (shape.hidden + shape.ffn) * shape.layers
    assert selective.flop - none.flop == pytest.approx(again)


def test_a_compiled_block_keeps_less_than_an_eager_one() -> None:
    """The partitioner recomputes SiLU and the norms' insides: a llama block of width h and feed-forward f keeps one
    f-wide tensor less."""
    base = describe("llama3:llama3_debugmodel")
    recipe = Recipe(seq_len=256, global_batch_seqs=2, precision="bf16")
    with Session() as session:
        eager = dry_run(Candidate(micro_batch=2), base, recipe, session=session)
        compiled = dry_run(Candidate(micro_batch=2, compile=True), base, recipe, session=session)
        split = dry_run(Candidate(micro_batch=2, compile=True, tensor_parallel=2), base, recipe, session=session)
    assert eager.compiled is None and compiled.compiled is not None and "partitioner" in compiled.compiled
    saves = eager.ranks[0].peak_allocated_bytes - compiled.ranks[0].peak_allocated_bytes
    assert saves == compiled.ranks[0].compiled_saves_bytes > 0.8 * base.shape.layers * 2 * 256 * base.shape.ffn * 2
    assert split.compiled is not None and split.compiled.startswith("eager figures")
