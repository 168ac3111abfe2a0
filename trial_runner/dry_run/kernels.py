"""The saved-tensor rules of CUDA kernels, for a program that runs on CPU fake tensors.

A CPU kernel may keep other tensors for backward than the CUDA kernel of the same name. Where it does, what CUDA keeps
is substituted, since it is the GPU's memory that is asked for.
"""

from __future__ import annotations

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


def substitute() -> None:
    """Make PyTorch's RMSNorm keep what the CUDA kernel keeps."""
    modules: list[Any] = [functional, torch]
    for module in modules:
        module.rms_norm = _rms_norm
