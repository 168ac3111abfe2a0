"""Compute of one transformer block, the embedding and the head: FLOP, bytes touched and kernels per micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pruning.coefficients import Coefficients
from pruning.ledger.layout import Layout
from search_space.model import ModelShape


@dataclass(frozen=True)
class Work:
    """Forward work of one micro-batch on one rank; arrays of shape (n,)."""

    gemm_flop: np.ndarray
    """FLOP of the matrix products."""

    gemm_s: np.ndarray
    """Their time, seconds."""

    attention_s: np.ndarray
    """Time of the attention kernel, seconds."""

    elementwise_s: np.ndarray
    """Time of the kernels that memory bandwidth bounds, seconds."""

    kernels: np.ndarray
    """Kernels launched."""

    @property
    def gpu_s(self) -> np.ndarray:
        """Time of all kernels, seconds."""
        return self.gemm_s + self.attention_s + self.elementwise_s


def gemm_seconds(
    rows: np.ndarray, width: np.ndarray, depth: np.ndarray, peak: float, coefficients: Coefficients
) -> tuple[np.ndarray, np.ndarray]:
    """FLOP and seconds of products [rows, depth] × [depth, width] on one device.

    time = 2·rows·width·depth / (peak × efficiency), efficiency = e / ((1 + a/rows)(1 + a/width)(1 + a/depth)):
    each dimension pays for a filled pipeline and partly filled tiles. It ignores wave quantisation.

    Args:
        rows, width, depth: sizes in elements, shape (n,).
        peak: FLOP/s at the compute precision.
        coefficients: ``gemm_efficiency`` e and ``gemm_half_size`` a.
    """
    half = coefficients.value("gemm_half_size")
    flop = 2.0 * rows * width * depth
    slow = (1 + half / rows) * (1 + half / width) * (1 + half / depth)
    return flop, flop * slow / (peak * coefficients.value("gemm_efficiency"))


def mean_layer(shape: ModelShape) -> tuple[float, float]:
    """Share of blocks that are mixture-of-experts, and of those that are dense."""
    moe = (shape.layers - shape.dense_layers) / shape.layers if shape.is_moe else 0.0
    return moe, 1.0 - moe


def block_work(layout: Layout, coefficients: Coefficients) -> Work:
    """Forward work of one average block per micro-batch.

    Products: query/key/value, output, gate and up, down; a mixture-of-experts block counts the active experts.
    Attention multiplies half of the score matrix (causal). Elementwise bytes: norms, residuals and rotary on
    tokens/tp (sequence parallelism), the feed-forward activation on ffn/tp; a compiled block fuses about half of
    the traffic and of the kernels.
    """
    setting, shape, hardware = layout.setting, layout.setting.shape, layout.setting.hardware
    peak = hardware.peak(setting.precision)
    tp, tokens = layout.tp, layout.tokens
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    hidden = np.full_like(tp, shape.hidden)
    moe, dense = mean_layer(shape)
    up = 2.0 if shape.gated_mlp else 1.0
    products: list[tuple[float | np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = [
        (1.0, tokens, (query + 2 * kv) / tp, hidden),
        (1.0, tokens, hidden, query / tp),
        (dense, tokens, up * shape.ffn / tp, hidden),
        (dense, tokens, hidden, shape.ffn / tp),
    ]
    width = dense * shape.ffn
    if shape.is_moe:
        routed = tokens * shape.experts_active / shape.experts
        experts = moe * shape.experts
        products += [
            (experts / tp, routed, np.full_like(tp, up * shape.expert_ffn), hidden),
            (experts / tp, routed, hidden, np.full_like(tp, shape.expert_ffn)),
        ]
        if shape.shared_experts:
            shared = shape.shared_experts * shape.expert_ffn
            products += [(moe, tokens, up * shared / tp, hidden), (moe, tokens, hidden, shared / tp)]
        width += moe * (shape.experts_active + shape.shared_experts) * shape.expert_ffn
    flop, gemm = np.zeros_like(tp), np.zeros_like(tp)
    for count, rows, columns, depth in products:
        f, seconds = gemm_seconds(rows, columns, depth, peak, coefficients)
        flop, gemm = flop + count * f, gemm + count * seconds
    score = 2.0 * tokens * setting.seq_len * query / tp
    attention = score / (peak * coefficients.value("attention_efficiency"))
    compiled = layout.flag("compile")
    element = 2.0 if setting.precision == "bf16" else 4.0
    traffic = element * tokens * (14 * shape.hidden / tp + (4 * (query + 2 * kv) + 5 * width) / tp)
    traffic = traffic * (1 - 0.5 * compiled)
    elementwise = traffic / (hardware.memory_bandwidth * coefficients.value("memory_efficiency"))
    kernels = (26 + 14 * moe + 6 * (tp > 1)) * (1 - 0.5 * compiled)
    float8 = 1 - 0.35 * layout.flag("float8")
    return Work(flop, gemm * float8, attention, elementwise, kernels)


def head_work(layout: Layout, coefficients: Coefficients) -> Work:
    """Forward work of the final norm, the output head and the loss per micro-batch."""
    setting, shape, hardware = layout.setting, layout.setting.shape, layout.setting.hardware
    peak = hardware.peak(setting.precision)
    hidden = np.full_like(layout.tp, shape.hidden)
    flop, gemm = gemm_seconds(layout.tokens, shape.vocab / layout.tp, hidden, peak, coefficients)
    traffic = 14.0 * layout.tokens * shape.vocab / layout.tp
    elementwise = traffic / (hardware.memory_bandwidth * coefficients.value("memory_efficiency"))
    return Work(flop, gemm, np.zeros_like(gemm), elementwise, 12.0 + 6 * layout.flag("loss_chunks"))


def recompute_share(layout: Layout) -> np.ndarray:
    """Share of a block's forward pass that activation checkpointing runs again, shape (n,).

    Full: all of it. Selective (torchtitan's per-operator list) keeps products and attention: about a fifth of
    the time. A memory budget interpolates. The first n blocks of each stage: n / blocks of the stage.
    """
    kind = layout.pool["activation_checkpoint"]
    per_stage = np.maximum(1.0, layout.setting.shape.layers / (layout.pp * layout.vp))
    share = np.select(
        [kind == 1, kind == 2, kind == 3, kind == 4],
        [
            0.2,
            1.0,
            np.clip(1 - layout.flag("memory_budget"), 0, 1) * 0.8,
            np.minimum(1.0, layout.flag("first_n") / per_stage),
        ],
        default=0.0,
    )
    return np.asarray(share, dtype=np.float64)
