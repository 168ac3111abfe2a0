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
    """Bytes by pipeline rank, arrays of shape (n, ranks); 0 where there is no such rank."""

    terms: dict[str, np.ndarray]
    """Bytes by term at the peak; empty unless itemised."""

    allocated: np.ndarray
    """Live tensors at the peak."""

    reserved: np.ndarray
    """What the caching allocator holds."""

    device: np.ndarray
    """All of the device's memory that is taken: reserved, context, libraries, communicators."""

    activations: np.ndarray
    """Activation share of the largest rank's peak, bytes, shape (n,)."""


def state_bytes(layout: Layout, ranks: Ranks, account: Account) -> dict[str, np.ndarray]:
    """Bytes of stored parameters, complete gradients and optimizer on each pipeline rank, shape (n, ranks).

    Fully sharded (FSDP2, HSDP): each over the shard ranks. Otherwise by ZeRO stage: 0 nothing sharded, 1 the
    optimizer, 2 gradients too, 3 parameters too (Rajbhandari et al. 2020).
    """
    local = rank_parameters(layout, ranks)
    shards = [shard[:, None] for shard in _shards(layout, account)]
    return {
        "parameters": account.parameter_bytes * local / shards[0],
        "gradients": account.gradient_bytes * local / shards[1],
        "optimizer": account.optimizer_bytes * local / shards[2],
    }


def _shards(layout: Layout, account: Account) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranks over which parameters, gradients and optimizer are divided, shape (n,) each."""
    if account.sharded:
        return layout.shard, layout.shard, layout.shard
    zero, dp = layout.flag("zero_stage"), layout.dp * layout.cp
    return np.where(zero >= 3, dp, 1.0), np.where(zero >= 2, dp, 1.0), np.where(zero >= 1, dp, 1.0)


def memory_of(
    layout: Layout,
    ranks: Ranks,
    flow: Flow,
    account: Account,
    coefficients: Coefficients,
    itemise: bool = False,
) -> Memory:
    """Peak memory of each pipeline rank.

    Two moments compete. (1) Most activations are held: state, gradients so far, activations in flight, and the
    larger of the loss (logits, gathered head and its gradient) and one block's backward pass (recomputed set, inner
    gradients, gathered parameters, the group whose gradients are being reduced). (2) Gradients are complete: state,
    all gradients, one block's backward pass, and what the optimizer's step adds.

    Terms: parameters, gradients, optimizer, unsharded_parameters, unsharded_gradients, activations, recompute,
    logits; outside the tensors: allocator, communicators, fixed.

    Args:
        layout: the candidates.
        ranks: what each pipeline rank holds.
        flow: activations in flight.
        account: the framework's habits.
        coefficients: ``activation_factor``, ``reserved_factor`` and ``fixed_bytes``.
        itemise: whether to fill ``terms``.
    """
    shape = layout.setting.shape
    block = block_parameters(layout)
    local = rank_parameters(layout, ranks)
    head = shape.vocab * shape.hidden / layout.tp
    kept_set = block_memory(layout, account)
    factor = coefficients.value("activation_factor")
    habits = _habits(layout, account)

    held = (factor * kept_set.kept)[:, None] * flow.inflight
    inner = (factor * (kept_set.again + kept_set.transient))[:, None]
    one = np.minimum(ranks.layers, habits.bucket[:, None]) * block[:, None]
    window = np.minimum(ranks.layers, habits.ahead[:, None]) * block[:, None]
    last_head = ranks.last * head[:, None]
    whole = habits.keeps[:, None] * local
    freed = (2.0 * ~habits.keeps)[:, None]
    gathered_block = 2.0 * whole + freed * window
    gathered_head = 2.0 * whole + freed * (last_head + one)
    reducing = habits.reducing[:, None] * one
    logits = ranks.last * logits_bytes(layout, account)[:, None] + 2.0 * last_head
    loss_side = logits + gathered_head
    block_side = inner + gathered_block + reducing
    first = habits.early[:, None] * local + held + np.maximum(loss_side, block_side)
    late = habits.late[:, None] * local + block_side
    allocated = np.maximum(first, late) * ranks.exists
    reserved = allocated * coefficients.value("reserved_factor")
    dims = (layout.tp, layout.pp, layout.cp, layout.ep, layout.replicate, layout.shard)
    per_group = 0.0 if layout.setting.on_cpu else COMMUNICATOR_BYTES
    groups = per_group * total((size > 1).astype(np.float64) for size in dims)
    outside = coefficients.value("fixed_bytes") + groups
    device = reserved + outside[:, None] * ranks.exists
    terms: dict[str, np.ndarray] = {}
    if itemise:
        ends = late > first
        at_loss = ~ends & (loss_side > block_side)
        state = state_bytes(layout, ranks, account)
        complete = state.pop("gradients")
        unsharded = habits.whole_gradients[:, None] * account.gradient_bytes * local
        early = np.where(habits.early_sharded[:, None], complete, 0.0)
        terms = state
        terms["gradients"] = np.where(ends, complete, early)
        terms["unsharded_parameters"] = np.where(at_loss, gathered_head, gathered_block)
        terms["unsharded_gradients"] = unsharded + np.where(at_loss, 0.0, reducing)
        terms["optimizer_step"] = np.where(ends, account.step_bytes * local, 0.0)
        terms["activations"] = np.where(ends, 0.0, held)
        terms["recompute"] = np.where(at_loss, 0.0, inner)
        terms["logits"] = np.where(at_loss, logits, 0.0)
        terms["allocator"] = reserved - allocated
        terms["communicators"] = groups[:, None] + 0.0 * local
        terms["fixed"] = coefficients.value("fixed_bytes") + 0.0 * local
        terms = {name: np.where(ranks.exists, term, 0.0) for name, term in terms.items()}
    if layout.setting.on_cpu:
        reserved = device
    activations = factor * kept_set.kept * flow.inflight.max(axis=1, initial=0.0)
    return Memory(terms, allocated, reserved, device, activations)


@dataclass(frozen=True)
class _Habits:
    """What sharding keeps, per candidate; arrays of shape (n,). Bytes per local parameter where not said else."""

    early: np.ndarray
    """State and gradients while activations are at their peak."""

    late: np.ndarray
    """State, all gradients and the optimizer's step at the end."""

    early_sharded: np.ndarray
    """Whether the (sharded) gradients are there at the first moment."""

    whole_gradients: np.ndarray
    """Whether gradients accumulate unsharded."""

    keeps: np.ndarray
    """Whether gathered parameters stay until the step ends."""

    bucket: np.ndarray
    """Blocks gathered and reduced together."""

    ahead: np.ndarray
    """Blocks whose gathered parameters live at once."""

    reducing: np.ndarray
    """Bytes per parameter of the group whose gradients are being reduced."""


def _habits(layout: Layout, account: Account) -> _Habits:
    n = len(layout)
    no = np.zeros(n, dtype=bool)
    shards = _shards(layout, account)
    base = account.parameter_bytes / shards[0] + account.optimizer_bytes / shards[2]
    gradients = account.gradient_bytes / shards[1]
    if not account.sharded:
        three = layout.flag("zero_stage") >= 3
        ahead = np.where(three, 2.0, 0.0)
        late = base + gradients + account.step_bytes / shards[2]
        return _Habits(base + gradients, late, ~no, no, no, np.where(three, 1.0, 0.0), ahead, np.zeros(n))
    pipelined, accumulating = layout.pp > 1, layout.micro_batches > 1
    reshard = layout.pool["reshard_after_forward"]
    keeps = (reshard == 2) | ((reshard == 0) & pipelined)
    whole = pipelined | ((layout.flag("accumulate_without_sync") > 0) & accumulating)
    bucket = layout.flag("fsdp_bucket")
    ahead = bucket * (2 + layout.flag("forward_prefetch"))
    # bf16 gradients of one group and the input of its reduction
    reducing = np.where(whole, 0.0, 2.0 + account.reduce_bytes)
    early_sharded = accumulating & ~whole
    unsharded = account.gradient_bytes * whole
    early = base + gradients * early_sharded + unsharded
    late = base + gradients + unsharded + account.step_bytes / shards[2]
    return _Habits(early, late, early_sharded, whole, keeps, bucket, ahead, reducing)
