"""Memory of every pipeline rank, term by term, at the moment of its peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pruning.accounts.account import Account
from pruning.coefficients import Coefficients
from pruning.ledger.activations import block_memory
from pruning.ledger.activations import logits_bytes
from pruning.ledger.layout import Layout
from pruning.ledger.layout import Ranks
from pruning.ledger.layout import total
from pruning.ledger.parameters import block_parameters
from pruning.ledger.parameters import rank_parameters
from pruning.ledger.pipeline import Flow


COMMUNICATOR_BYTES = 0.3e9
"""Device memory outside the allocator per process group of more than one rank (NVIDIA/nccl#964: 0.5-0.7 GB for
the first ones on A100 with default channels; later groups share buffers)."""


@dataclass(frozen=True)
class Memory:
    """Bytes by pipeline rank, arrays of shape (n, ranks)."""

    terms: dict[str, np.ndarray]
    """Allocated bytes by term at the peak, and what lies outside."""

    allocated: np.ndarray
    """Live tensors at the peak."""

    reserved: np.ndarray
    """What the caching allocator holds."""

    device: np.ndarray
    """All of the device's memory that is taken: reserved, context, libraries, communicators."""


def state_bytes(layout: Layout, ranks: Ranks, account: Account) -> dict[str, np.ndarray]:
    """Bytes of stored parameters, complete gradients and optimizer on each pipeline rank, shape (n, ranks).

    Fully sharded (FSDP2, HSDP): each over the shard ranks. Otherwise by ZeRO stage: 0 nothing sharded, 1 the
    optimizer, 2 gradients too, 3 parameters too (Rajbhandari et al. 2020).
    """
    local = rank_parameters(layout, ranks)
    if account.sharded:
        shard = layout.shard[:, None]
        shards = (shard, shard, shard)
    else:
        zero = layout.flag("zero_stage")[:, None]
        dp = (layout.dp * layout.cp)[:, None]
        shards = (np.where(zero >= 3, dp, 1.0), np.where(zero >= 2, dp, 1.0), np.where(zero >= 1, dp, 1.0))
    return {
        "parameters": account.parameter_bytes * local / shards[0],
        "gradients": account.gradient_bytes * local / shards[1],
        "optimizer": account.optimizer_bytes * local / shards[2],
    }


def memory_of(layout: Layout, ranks: Ranks, flow: Flow, account: Account, coefficients: Coefficients) -> Memory:
    """Peak memory of each pipeline rank.

    Two moments compete. (1) Most activations are held: state, gradients so far, activations in flight, and the
    larger of the loss (logits, gathered head and its gradient) and one block's backward pass (recomputed set, inner
    gradients, gathered parameters). (2) Gradients are complete: state, all gradients, one block's backward pass and
    what the optimizer's step adds.

    Terms: parameters, gradients, optimizer, unsharded_parameters, unsharded_gradients, activations, recompute,
    logits; outside the tensors: allocator, communicators, fixed.
    """
    local = rank_parameters(layout, ranks)
    block = block_parameters(layout)[:, None]
    shape = layout.setting.shape
    head = ranks.last * (shape.vocab * shape.hidden) / layout.tp[:, None]
    pipelined = (layout.pp > 1)[:, None]
    accumulating = (layout.micro_batches > 1)[:, None]
    memory = block_memory(layout, account)
    factor = coefficients.value("activation_factor")
    has = ranks.layers > 0
    state = state_bytes(layout, ranks, account)
    gradients = state.pop("gradients")
    if account.sharded:
        reshard = layout.pool["reshard_after_forward"][:, None]
        keeps = np.where(reshard == 0, pipelined, reshard == 2)
        whole_gradients = pipelined | (layout.flag("accumulate_without_sync") > 0)[:, None] & accumulating
        bucket = layout.flag("fsdp_bucket")[:, None]
        ahead = 2 + layout.flag("forward_prefetch")[:, None]
        window = np.minimum(local, ahead * bucket * block)
        one = np.minimum(local, bucket * block)
        # bf16 gradients of one group, and its fp32 input to the reduce-scatter
        reducing = np.where(whole_gradients, 0.0, (2.0 + account.reduce_bytes) * one)
        gathered_block = np.where(keeps, 2.0 * local, 2.0 * window)
        gathered_head = np.where(keeps, 2.0 * local, 2.0 * (head + one)) * has
        unsharded = np.where(whole_gradients, account.gradient_bytes * local, 0.0)
        early = np.where(pipelined | accumulating, gradients, 0.0)
        early = np.where(whole_gradients, 0.0, early)
        early_unsharded = unsharded
    else:
        zero = layout.flag("zero_stage")[:, None]
        gathered_block = gathered_head = np.where(zero >= 3, 4.0 * block, 0.0) + 0.0 * local
        reducing = 0.0 * local
        unsharded = early_unsharded = 0.0 * local
        early = gradients
    kept = factor * memory.kept[:, None] * flow.inflight
    again = factor * np.where(has, memory.again[:, None], 0.0)
    inner = factor * np.where(has, memory.transient[:, None], 0.0)
    logits = logits_bytes(layout, account)[:, None] * ranks.last + 2.0 * head
    loss_side = logits + gathered_head
    block_side = again + inner + gathered_block + reducing
    at_loss = loss_side > block_side
    base = total(state.values())
    first = base + early + early_unsharded + kept + np.where(at_loss, loss_side, block_side)
    # At the end gradients are complete and sharded ones lie beside what is left of the unsharded ones.
    step = base + gradients + unsharded + block_side + account.step_bytes * local
    late = step > first
    terms = dict(state)
    terms["gradients"] = np.where(late, gradients, early)
    terms["unsharded_parameters"] = np.where(~late & at_loss, gathered_head, gathered_block)
    terms["unsharded_gradients"] = np.where(late, unsharded + account.step_bytes * local, early_unsharded)
    terms["unsharded_gradients"] = terms["unsharded_gradients"] + np.where(late | ~at_loss, reducing, 0.0)
    terms["activations"] = np.where(late, 0.0, kept)
    terms["recompute"] = np.where(late | ~at_loss, again + inner, 0.0)
    terms["logits"] = np.where(~late & at_loss, logits, 0.0)
    allocated = np.maximum(first, step)
    reserved = allocated * coefficients.value("reserved_factor")
    dims = (layout.tp, layout.pp, layout.cp, layout.ep, layout.replicate, layout.shard)
    per_group = 0.0 if layout.setting.on_cpu else COMMUNICATOR_BYTES
    groups = per_group * total((size > 1).astype(np.float64) for size in dims)[:, None]
    terms["allocator"] = reserved - allocated
    terms["communicators"] = groups + 0.0 * local
    terms["fixed"] = coefficients.value("fixed_bytes") + 0.0 * local
    device = reserved + terms["communicators"] + terms["fixed"]
    exists = ranks.exists
    if layout.setting.on_cpu:
        reserved = device
    return Memory(
        {name: np.where(exists, term, 0.0) for name, term in terms.items()},
        np.where(exists, allocated, np.nan),
        np.where(exists, reserved, np.nan),
        np.where(exists, device, np.nan),
    )
