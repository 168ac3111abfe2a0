"""Compute of one transformer block, the embedding and the head: FLOP, bytes touched and kernels per micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pruning.accounts.account import Account
from pruning.coefficients import Coefficients
from pruning.ledger.layout import Layout
from search_space.model import ModelShape


FLOAT8_SAVING = 0.35
"""Share of a matrix product's time that float8 saves: half the arithmetic, less casts and scales."""


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


def block_work(layout: Layout, account: Account, coefficients: Coefficients) -> Work:
    """Forward work of one average block per micro-batch.

    Products: query/key/value, output, gate and up, down; a mixture-of-experts block counts the active experts.
    Attention multiplies half of the score matrix (causal). Elementwise bytes: norms, residuals and rotary on
    tokens/tp (sequence parallelism), the feed-forward activation on ffn/tp; a compiled block fuses about half of
    the traffic and of the kernels.
    """
    setting, shape, hardware = layout.setting, layout.setting.shape, layout.setting.hardware
    peak = hardware.peak(setting.precision)
    tp, tokens = layout.tp, layout.tokens
    query, kv = shape.query_width, shape.kv_heads * shape.head_dim
    hidden = np.full_like(tp, shape.hidden)
    moe, dense = shape.moe_share, 1 - shape.moe_share
    up = 2.0 if shape.gated_mlp else 1.0
    products: list[tuple[float | np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = [
        *_attention_products(shape, tokens, tp, hidden),
        (dense, tokens, up * shape.ffn / tp, hidden),
        (dense, tokens, hidden, shape.ffn / tp),
    ]
    width = shape.feed_forward_width
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
    flop, gemm = np.zeros_like(tp), np.zeros_like(tp)
    for count, rows, columns, depth in products:
        f, seconds = gemm_seconds(rows, columns, depth, peak, coefficients)
        flop, gemm = flop + count * f, gemm + count * seconds
    score = 2.0 * tokens * shape.context(setting.seq_len) * shape.score_width / tp
    attention = attention_seconds(layout, account, score, coefficients)
    compiled = layout.flag("compile")
    element = 2.0 if setting.precision == "bf16" else 4.0
    spread = tp if account.sequence_parallel else np.ones_like(tp)
    norms = 14.0 if account.fused_norm else 30.0
    traffic = element * tokens * (norms * shape.hidden / spread + (4 * (query + 2 * kv) + 5 * width) / tp)
    traffic = traffic * (1 - 0.5 * compiled)
    elementwise = traffic / (hardware.memory_bandwidth * coefficients.value("memory_efficiency"))
    kernels = (account.kernels_per_block + 14 * moe + 6 * (tp > 1)) * (1 - 0.5 * compiled)
    float8 = (1 - FLOAT8_SAVING * layout.flag("float8")) / account.product_speed
    return Work(flop, gemm * float8, attention, elementwise, kernels)


def _attention_products(
    shape: ModelShape, tokens: np.ndarray, tp: np.ndarray, hidden: np.ndarray
) -> list[tuple[float | np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Products around attention as (count, rows, width, depth); latent attention goes through its low ranks."""
    one = np.ones_like(tp)
    out: tuple[float | np.ndarray, np.ndarray, np.ndarray, np.ndarray] = (1.0, tokens, hidden, shape.value_width / tp)
    if not shape.is_latent:
        return [(1.0, tokens, (shape.query_width + 2 * shape.kv_heads * shape.head_dim) / tp, hidden), out]
    down = shape.q_lora_rank + shape.kv_lora_rank + shape.qk_rope_head_dim
    up = shape.heads * (shape.qk_nope_head_dim + shape.v_head_dim)
    query_depth = shape.q_lora_rank or shape.hidden
    return [
        (1.0, tokens, down * one, hidden),
        (1.0, tokens, shape.query_width / tp, query_depth * one),
        (1.0, tokens, up / tp, shape.kv_lora_rank * one),
        out,
    ]


def attention_seconds(layout: Layout, account: Account, flop: np.ndarray, coefficients: Coefficients) -> np.ndarray:
    """Seconds of one block's attention kernel, forward, shape (n,).

    A fused kernel computes ``flop`` (half of the score matrix) at ``attention_efficiency`` of the peak. Otherwise
    the score matrix goes through memory: 12 bytes read and written per score when unfused (product, scale, mask,
    softmax, dropout), 6 with a fused softmax, and the products compute all of it.
    """
    setting, shape, hardware = layout.setting, layout.setting.shape, layout.setting.hardware
    peak = hardware.peak(setting.precision) * coefficients.value("attention_efficiency")
    if account.attention == "fused":
        return np.asarray(flop / (peak * account.attention_speed))
    passes = 24.0 if account.attention == "unfused" else 12.0
    scores = layout.tokens * setting.seq_len * shape.heads / layout.tp
    bandwidth = hardware.memory_bandwidth * coefficients.value("memory_efficiency")
    return np.asarray(2 * flop / peak + passes * scores / bandwidth)


def head_work(layout: Layout, coefficients: Coefficients) -> Work:
    """Forward work of the final norm, the output head and the loss per micro-batch."""
    setting, shape, hardware = layout.setting, layout.setting.shape, layout.setting.hardware
    peak = hardware.peak(setting.precision)
    hidden = np.full_like(layout.tp, shape.hidden)
    flop, gemm = gemm_seconds(layout.tokens, shape.vocab / layout.tp, hidden, peak, coefficients)
    traffic = 14.0 * layout.tokens * shape.vocab / layout.tp
    elementwise = traffic / (hardware.memory_bandwidth * coefficients.value("memory_efficiency"))
    return Work(flop, gemm, np.zeros_like(gemm), elementwise, np.full_like(gemm, 30.0))


@dataclass(frozen=True)
class Recompute:
    """What activation checkpointing runs again; arrays of shape (n,), per block and micro-batch."""

    seconds: np.ndarray
    """Kernel time."""

    gemm_s: np.ndarray
    """The part of it that matrix products take."""

    kernels: np.ndarray
    """Share of a block's forward kernels that are launched again."""

    collectives: np.ndarray
    """Tensor-parallel collectives of a block that run again (a forward pass has 4)."""

    exchanges: np.ndarray
    """Share of a forward pass's exchanges between experts that run again."""


def recomputed(layout: Layout, account: Account, block: Work) -> Recompute:
    """What the backward pass computes a second time.

    Full: the whole forward pass. Selective by operator (torchtitan): the second and fourth product of a block
    (output and up) and everything between products. Selective in Megatron: attention. A memory budget: pointwise
    work first, then products, so the cost grows with the square of the share given up. First n: those blocks whole.
    """
    shape = layout.setting.shape
    kind = layout.pool["activation_checkpoint"]
    per_stage = np.maximum(1.0, shape.layers / (layout.pp * layout.vp))
    first = np.minimum(1.0, layout.flag("first_n") / per_stage)
    given_up = np.clip(1 - layout.flag("memory_budget"), 0, 1)
    whole = np.where(kind == 2, 1.0, 0.0) + np.where(kind == 4, first, 0.0) + np.where(kind == 3, given_up**2, 0.0)
    selective = np.where(kind == 1, 1.0, 0.0)
    width = shape.feed_forward_width
    attention = shape.query_width + 2 * shape.kv_heads * shape.head_dim + shape.value_width
    products = attention + (3 if shape.gated_mlp else 2) * width
    again = (shape.value_width + width) / products
    if account.selective_by_operator:
        gemm = (whole + selective * again) * block.gemm_s
        seconds = gemm + whole * block.attention_s + (whole + selective) * block.elementwise_s
        # What eager programs exchange tokens by is not on the list of what selective checkpointing keeps.
        exchanges = whole + selective * (1 - layout.flag("compile"))
        return Recompute(seconds, gemm, whole + 0.6 * selective, 4 * whole + 2 * selective, exchanges)
    gemm = whole * block.gemm_s
    seconds = gemm + (whole + selective) * block.attention_s + whole * block.elementwise_s
    # Megatron's runs name the modules that run again, and its dispatcher is rarely among them.
    return Recompute(seconds, gemm, whole + 0.2 * selective, 4 * whole, np.zeros_like(whole))
