"""The saved-tensor rules of CUDA kernels, for a program that runs on CPU fake tensors.

A CPU kernel may keep other tensors for backward than the CUDA kernel of the same name. Where it does, what CUDA keeps
is substituted, since it is the GPU's memory that is asked for.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as functional


class FusedRMSNorm(torch.autograd.Function):
    """CUDA's fused RMSNorm keeps its input, its weight and one fp32 number per row (``_fused_rms_norm``).

    The CPU decomposition keeps three fp32 tensors of the input's size instead.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Normalise the last dimension."""
        scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Gradients of input and weight."""
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(
    x: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    return FusedRMSNorm.apply(x, weight, eps or 0.0)


@torch.library.custom_op("dry_run::fused_attention", mutates_args=())
def fused_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention whose values are narrower than queries (latent attention), by shapes [batch, heads, tokens, width].

    CUDA's fused kernels take such heads; the CPU's does not and would hold all scores. Returns the output, laid out as
    fused kernels do (heads beside width), and one fp32 number per row.
    """
    raise NotImplementedError("this stands for a CUDA kernel on fake tensors; it computes nothing")


@fused_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, tokens, _ = query.shape
    out = query.new_empty((batch, tokens, heads, value.shape[-1])).transpose(1, 2)
    return out, query.new_empty((batch, heads, tokens), dtype=torch.float32)


@torch.library.custom_op("dry_run::fused_attention_backward", mutates_args=())
def fused_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; scores are computed again."""
    raise NotImplementedError("this stands for a CUDA kernel on fake tensors; it computes nothing")


@fused_attention_backward.register_fake
def _(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.set_materialize_grads(False)


def _attention_gradients(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    return fused_attention_backward(grad, *ctx.saved_tensors)


fused_attention.register_autograd(_attention_gradients, setup_context=_keep)


def _attention(original: Any) -> Any:
    @functools.wraps(original)
    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if value.shape[-1] == query.shape[-1]:
            return original(query, key, value, *args, **kwargs)
        return fused_attention(query, key, value)[0]

    return attention


def substitute() -> None:
    """Make PyTorch's RMSNorm and attention keep what the CUDA kernels keep."""
    modules: list[Any] = [functional, torch]
    for module in modules:
        module.rms_norm = _rms_norm
    substitute_attention()


def substitute_attention() -> None:
    """Attention alone, which compiled blocks do not decompose either."""
    functional.scaled_dot_product_attention = _attention(functional.scaled_dot_product_attention)
