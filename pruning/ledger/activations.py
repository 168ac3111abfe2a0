"""Activations: bytes that one block keeps for its backward pass, and the transient ones of recomputation."""

from __future__ import annotations

import numpy as np

from pruning.accounts.account import Account
from pruning.ledger.compute import mean_layer
from pruning.ledger.layout import Layout


def block_bytes(layout: Layout, account: Account) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that one average block keeps per micro-batch, and its whole set when nothing is checkpointed.

    Kept tensors, in elements per token: two norm inputs and residual (sequence-parallel, / tp); the two inputs of
    the column-parallel products (gathered over tp when the account says so); query, key, value, attention output
    (/ tp); gate, up and their product (/ tp).

    Returns:
        ``(kept, whole)`` by the candidate's checkpointing, shape (n,) each.
    """
    shape, setting = layout.setting.shape, layout.setting
    element = 2.0 if setting.precision == "bf16" else 4.0
    tp, tokens = layout.tp, layout.tokens
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    moe, dense = mean_layer(shape)
    width = dense * shape.ffn
    if shape.is_moe:
        width += moe * (shape.experts_active + shape.shared_experts) * shape.expert_ffn
    copies = 3.0 if shape.gated_mlp else 2.0
    inputs = 2.0 * shape.hidden / np.where(account.gathers_inputs, 1.0, tp)
    sharded = 2.0 * shape.hidden + 2 * query + 2 * kv + copies * width
    whole = element * tokens * (inputs + sharded / tp)
    boundary = element * tokens * shape.hidden / tp
    compiled = 1 - 0.2 * layout.flag("compile")
    whole = whole * compiled
    kind = layout.pool["activation_checkpoint"]
    per_stage = np.maximum(1.0, shape.layers / (layout.pp * layout.vp))
    first = np.minimum(1.0, layout.flag("first_n") / per_stage)
    kept = np.select(
        [kind == 1, kind == 2, kind == 3, kind == 4],
        [
            0.6 * whole,
            boundary,
            boundary + layout.flag("memory_budget") * (whole - boundary),
            first * boundary + (1 - first) * whole,
        ],
        default=whole,
    )
    return np.asarray(kept, dtype=np.float64), whole


def logits_bytes(layout: Layout) -> np.ndarray:
    """Bytes of the logits and their gradient that live at once on a rank with the head, shape (n,).

    fp32 logits and their gradient, in as many pieces as the loss is chunked.
    """
    shape = layout.setting.shape
    chunks = np.maximum(1.0, layout.flag("loss_chunks"))
    return np.asarray(10.0 * layout.tokens * shape.vocab / layout.tp / chunks)
