"""Memory of every pipeline rank, term by term."""

from __future__ import annotations

import numpy as np

from pruning.accounts.account import Account
from pruning.coefficients import Coefficients
from pruning.ledger.activations import block_bytes
from pruning.ledger.activations import logits_bytes
from pruning.ledger.layout import Layout
from pruning.ledger.layout import Ranks
from pruning.ledger.layout import total
from pruning.ledger.parameters import block_parameters
from pruning.ledger.parameters import rank_parameters
from pruning.ledger.pipeline import Flow


def memory_terms(
    layout: Layout, ranks: Ranks, flow: Flow, account: Account, coefficients: Coefficients
) -> dict[str, np.ndarray]:
    """Bytes by term, each of shape (n, ranks); the terms add up to reserved memory.

    Terms: parameters, gradients, optimizer, unsharded_parameters, unsharded_gradients, activations, recompute,
    logits, fixed (device context, workspaces), communicators, allocator.
    """
    local = rank_parameters(layout, ranks)
    block = block_parameters(layout)[:, None]
    exists = ranks.exists
    pipelined = (layout.pp > 1)[:, None]
    shard = layout.shard[:, None]
    kept, whole = block_bytes(layout, account)
    activation = coefficients.value("activation_factor")
    terms: dict[str, np.ndarray] = {}
    if account.sharded:
        reshard = layout.pool["reshard_after_forward"][:, None]
        keeps = np.where(reshard == 0, pipelined, reshard == 2)
        accumulates = pipelined | (layout.flag("accumulate_without_sync") > 0)[:, None]
        bucket = layout.flag("fsdp_bucket")[:, None]
        terms["parameters"] = account.parameter_bytes * local / shard
        terms["gradients"] = account.gradient_bytes * local / shard
        terms["optimizer"] = account.optimizer_bytes * local / shard
        window = np.minimum(local, 2 * bucket * block)
        terms["unsharded_parameters"] = 2.0 * np.where(keeps, local, window)
        terms["unsharded_gradients"] = np.where(accumulates, account.gradient_bytes * local, 3.0 * window)
    else:
        zero = layout.flag("zero_stage")[:, None]
        dp = (layout.dp * layout.cp)[:, None]
        terms["parameters"] = account.parameter_bytes * local / np.where(zero >= 3, dp, 1)
        terms["gradients"] = account.gradient_bytes * local / np.where(zero >= 2, dp, 1)
        terms["optimizer"] = account.optimizer_bytes * local / np.where(zero >= 1, dp, 1)
        terms["unsharded_parameters"] = np.where(zero >= 3, 4.0 * block, 0.0) + 0.0 * local
        terms["unsharded_gradients"] = 0.0 * local
    terms["activations"] = activation * kept[:, None] * flow.inflight
    recomputes = np.maximum(0.0, whole - kept)[:, None]
    terms["recompute"] = activation * np.where(ranks.layers > 0, recomputes, 0.0)
    terms["logits"] = logits_bytes(layout)[:, None] * ranks.last
    dims = (layout.tp, layout.pp, layout.cp, layout.ep, layout.replicate, layout.shard)
    per_group = 0.0 if layout.setting.on_cpu else 0.3e9
    groups = per_group * total((size > 1).astype(np.float64) for size in dims)[:, None]
    allocated = total(terms.values())
    terms["communicators"] = groups + 0.0 * local
    terms["allocator"] = (coefficients.value("reserved_factor") - 1) * allocated
    terms["fixed"] = coefficients.value("fixed_bytes") + 0.0 * local
    return {name: np.where(exists, term, 0.0) for name, term in terms.items()}
