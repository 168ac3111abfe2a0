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


PAIR_BYTES = 0.544e9
"""Device memory outside the allocator of a communicator of two ranks (NVIDIA/nccl#964, A100, default channels)."""

GROUP_BYTES = 0.688e9
"""The same of a communicator of more ranks."""


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
    local, stored = rank_parameters(layout, ranks), rank_parameters(layout, ranks, stored=True)
    params, grads, moments = (shard[:, None] for shard in _shards(layout, account))
    return {
        "parameters": account.parameter_bytes * np.where(params > 1, stored / params, local),
        "gradients": account.gradient_bytes * np.where(grads > 1, stored / grads, local),
        "optimizer": account.optimizer_bytes * np.where(moments > 1, stored / moments, local),
    }


def _shards(layout: Layout, account: Account) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranks over which parameters, gradients and optimizer are divided, shape (n,) each."""
    if account.sharded:
        return layout.shard, layout.shard, layout.shard
    zero, dp = layout.flag("zero_stage"), layout.dp * layout.cp
    return np.where(zero >= 3, dp, 1.0), np.where(zero >= 2, dp, 1.0), np.where(zero >= 1, dp, 1.0)


@dataclass(frozen=True)
class RankParts:
    """What a candidate's peak is made of, whatever its sharding habits; bytes or parameters.

    Single precision where arrays have a rank axis: seven digits are more than any account of memory is good for.
    """

    exists: np.ndarray
    """Whether there is such a pipeline rank, shape (n, ranks)."""

    layers: np.ndarray
    """Blocks of the rank, shape (n, ranks)."""

    last: np.ndarray
    """1 on the rank with the head, shape (n, ranks)."""

    local: np.ndarray
    """Parameters of the rank, shape (n, ranks)."""

    spared: np.ndarray
    """Of those, what expert parallelism's overlay spares once state is sharded, shape (n, ranks); 0 when dense."""

    held: np.ndarray
    """Activations in flight, shape (n, ranks)."""

    block: np.ndarray
    """Parameters of one block, shape (n,)."""

    head: np.ndarray
    """Parameters of the head, shape (n,)."""

    inner: np.ndarray
    """Recomputed set and inner gradients of one block running backward, shape (n,)."""

    outside: np.ndarray
    """Context and communicators, shape (n,)."""

    activations: np.ndarray
    """Activations in flight on the rank that holds most, shape (n,)."""

    def take(self, index: np.ndarray) -> RankParts:
        """The rows at ``index``."""
        return RankParts(**{name: np.take(getattr(self, name), index, axis=0) for name in self.__dataclass_fields__})


def rank_parts(layout: Layout, ranks: Ranks, flow: Flow, account: Account, coefficients: Coefficients) -> RankParts:
    """The parts that do not depend on resharding, buckets, accumulation and loss pieces."""
    kept_set = block_memory(layout, account)
    factor = coefficients.value("activation_factor")
    kept = factor * kept_set.kept
    dims = (layout.tp, layout.pp, layout.cp, layout.ep, layout.replicate, layout.shard)
    scale = 0.0 if layout.setting.on_cpu else 1.0
    groups = scale * total(np.where(size > 2, GROUP_BYTES, np.where(size > 1, PAIR_BYTES, 0.0)) for size in dims)
    shape = layout.setting.shape
    return RankParts(
        exists=ranks.exists,
        layers=ranks.layers.astype(np.float32),
        last=ranks.last.astype(np.float32),
        local=rank_parameters(layout, ranks).astype(np.float32),
        spared=_spared(layout, ranks).astype(np.float32),
        held=(kept[:, None] * flow.inflight).astype(np.float32),
        block=block_parameters(layout).astype(np.float32),
        head=(shape.vocab * shape.hidden / layout.tp).astype(np.float32),
        inner=(factor * (kept_set.again + kept_set.transient)).astype(np.float32),
        outside=coefficients.value("fixed_bytes") + groups,
        activations=kept * flow.inflight.max(axis=1, initial=0.0),
    )


def _spared(layout: Layout, ranks: Ranks) -> np.ndarray:
    if not layout.setting.shape.is_moe:
        return np.zeros((len(layout), 1))
    return rank_parameters(layout, ranks) - rank_parameters(layout, ranks, stored=True)


def memory_of(
    layout: Layout,
    ranks: Ranks,
    flow: Flow,
    account: Account,
    coefficients: Coefficients,
    itemise: bool = False,
) -> Memory:
    """Peak memory of each pipeline rank; see :func:`peak_memory`."""
    parts = rank_parts(layout, ranks, flow, account, coefficients)
    return peak_memory(parts, layout, account, coefficients, itemise)


def peak_memory(
    parts: RankParts, layout: Layout, account: Account, coefficients: Coefficients, itemise: bool = False
) -> Memory:
    """Peak memory of each pipeline rank.

    Two moments compete. (1) Most activations are held: state, gradients so far, activations in flight, and the
    larger of the loss (logits, gathered head and its gradient) and one block's backward pass (recomputed set, inner
    gradients, gathered parameters, the group whose gradients are being reduced). (2) Gradients are complete: state,
    all gradients, one block's backward pass, and what the optimizer's step adds.

    Terms: parameters, gradients, optimizer, unsharded_parameters, unsharded_gradients, activations, recompute,
    logits; outside the tensors: allocator, communicators, fixed.

    Args:
        parts: what the peak is made of, for the same candidates as ``layout``.
        layout: the candidates.
        account: the framework's habits.
        coefficients: ``reserved_factor`` and ``fixed_bytes``.
        itemise: whether to fill ``terms``.
    """
    habits = _habits(layout, account).single()
    local, held = parts.local, parts.held
    keeps, block = habits.keeps[:, None], parts.block[:, None]
    one = np.minimum(parts.layers, habits.bucket[:, None]) * block
    window = np.minimum(parts.layers, habits.ahead[:, None]) * block
    last_head = parts.last * parts.head[:, None]
    double = 2 * local
    gathered_block = np.where(keeps, double, 2 * window)
    gathered_head = np.where(keeps, double, 2 * (last_head + one))
    reducing = habits.reducing[:, None] * one
    logits = parts.last * logits_bytes(layout, account).astype(np.float32)[:, None] + 2 * last_head
    loss_side = logits + gathered_head
    block_side = parts.inner[:, None] + gathered_block + reducing
    first = habits.early[:, None] * local + held + np.maximum(loss_side, block_side)
    late = habits.late[:, None] * local + block_side
    if layout.setting.shape.is_moe:
        first = first - habits.early_sharded_bytes[:, None] * parts.spared
        late = late - habits.late_sharded_bytes[:, None] * parts.spared
    allocated = np.maximum(first, late) * parts.exists
    reserved = allocated * np.float32(coefficients.value("reserved_factor"))
    device = reserved + parts.outside.astype(np.float32)[:, None] * parts.exists
    terms: dict[str, np.ndarray] = {}
    if itemise:
        ends = late > first
        at_loss = ~ends & (loss_side > block_side)
        params, grads, moments = (shard[:, None] for shard in _shards(layout, account))
        stored = local - parts.spared
        complete = account.gradient_bytes * np.where(grads > 1, stored / grads, local)
        terms = {
            "parameters": account.parameter_bytes * np.where(params > 1, stored / params, local),
            "optimizer": account.optimizer_bytes * np.where(moments > 1, stored / moments, local),
            "gradients": np.where(ends | habits.early_sharded[:, None], complete, 0.0),
            "unsharded_parameters": np.where(at_loss, gathered_head, gathered_block),
            "unsharded_gradients": habits.whole_gradients[:, None] * account.gradient_bytes * local
            + np.where(at_loss, 0.0, reducing),
            "optimizer_step": np.where(ends, account.step_bytes * local / moments, 0.0),
            "activations": np.where(ends, 0.0, held),
            "recompute": np.where(at_loss, 0.0, parts.inner[:, None] + 0.0 * local),
            "logits": np.where(at_loss, logits, 0.0),
            "allocator": reserved - allocated,
            "communicators": parts.outside[:, None] - coefficients.value("fixed_bytes") + 0.0 * local,
            "fixed": coefficients.value("fixed_bytes") + 0.0 * local,
        }
        terms = {name: np.where(parts.exists, term, 0.0) for name, term in terms.items()}
    if layout.setting.on_cpu:
        reserved = device
    return Memory(terms, allocated, reserved, device, parts.activations)


@dataclass(frozen=True)
class _Habits:
    """What sharding keeps, per candidate; arrays of shape (n,). Bytes per local parameter where not said else."""

    early: np.ndarray
    """State and gradients while activations are at their peak."""

    late: np.ndarray
    """State, all gradients and the optimizer's step at the end."""

    early_sharded_bytes: np.ndarray
    """The part of ``early`` that is sharded."""

    late_sharded_bytes: np.ndarray
    """The part of ``late`` that is sharded."""

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

    def single(self) -> _Habits:
        """The same in single precision."""
        arrays = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return _Habits(**{k: v if v.dtype == bool else v.astype(np.float32) for k, v in arrays.items()})


def _habits(layout: Layout, account: Account) -> _Habits:
    n = len(layout)
    no = np.zeros(n, dtype=bool)
    shards = _shards(layout, account)
    sizes = (account.parameter_bytes, account.gradient_bytes, account.optimizer_bytes)
    base = sizes[0] / shards[0] + sizes[2] / shards[2]
    gradients = sizes[1] / shards[1]
    split = [np.where(shard > 1, size / shard, 0.0) for size, shard in zip(sizes, shards)]
    if not account.sharded:
        three = layout.flag("zero_stage") >= 3
        ahead = np.where(three, 2.0, 0.0)
        late = base + gradients + account.step_bytes / shards[2]
        return _Habits(
            base + gradients,
            late,
            total(split),
            total(split),
            ~no,
            no,
            no,
            np.where(three, 1.0, 0.0),
            ahead,
            np.zeros(n),
        )
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
    early_split = split[0] + split[2] + split[1] * early_sharded
    return _Habits(early, late, early_split, total(split), early_sharded, whole, keeps, bucket, ahead, reducing)
