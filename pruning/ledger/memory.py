"""Memory of every pipeline rank, term by term, at the moment of its peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pruning.accounts.account import Account
from pruning.coefficients import Coefficients
from pruning.ledger.activations import block_memory
from pruning.ledger.activations import logits_bytes
from pruning.ledger.habits import habits_of
from pruning.ledger.habits import shards_of
from pruning.ledger.layout import Layout
from pruning.ledger.layout import Ranks
from pruning.ledger.layout import total
from pruning.ledger.parameters import block_parameters
from pruning.ledger.parameters import rank_parameters
from pruning.ledger.pipeline import Flow
from search_space.candidate import SPLIT_BACKWARD


PAIR_BYTES = 0.544e9
"""Device memory outside the allocator of a communicator of two ranks (NVIDIA/nccl#964, A100, default channels)."""

GROUP_BYTES = 0.688e9
"""The same of a communicator of more ranks."""


ACTIVE_STAGES = 3
"""Stages of one rank that looped and V schedules gather ahead (``max_active_stages`` of torch 2.14)."""


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
    params, grads, moments = (shard[:, None] for shard in shards_of(layout, account))
    return {
        "parameters": account.parameter_bytes * np.where(params > 1, stored / params, local),
        "gradients": account.gradient_bytes * np.where(grads > 1, stored / grads, local),
        "optimizer": account.optimizer_bytes * np.where(moments > 1, stored / moments, local),
    }


@dataclass(frozen=True)
class RankParts:
    """What a candidate's peak is made of, whatever its sharding habits; bytes or parameters.

    Single precision where arrays have a rank axis: seven digits are more than any account of memory is good for.
    """

    ranks: Ranks
    """What each pipeline rank holds; one row when all candidates are cut alike."""

    held: np.ndarray
    """Activations in flight and what lies between stages, shape (n, ranks)."""

    tail_tensors: np.ndarray
    """Tensors around the head while the loss is computed, shape (n,)."""

    block: np.ndarray
    """Parameters of one block, shape (n,)."""

    spared: np.ndarray
    """Of those, what expert parallelism's overlay spares once state is sharded, shape (n,); 0 when dense."""

    embedding: np.ndarray
    """Parameters of the input embedding, shape (n,)."""

    tail: np.ndarray
    """Parameters of the last norm and of a head of its own, shape (n,)."""

    head: np.ndarray
    """Parameters that the head multiplies with, its own or the embedding's, shape (n,)."""

    kept: np.ndarray
    """Activations of one block and micro-batch, shape (n,)."""

    gathered: np.ndarray
    """Share of the rank's stages whose parameters are gathered at once, where they are kept, shape (n,)."""

    delayed: np.ndarray
    """Bytes per local parameter of weight gradients that wait for the end of their stage, shape (n,)."""

    inner: np.ndarray
    """Recomputed set and inner gradients of one block running backward, shape (n,)."""

    after_experts: np.ndarray
    """What is left of them once the gradients of its experts' weights are there, shape (n,)."""

    outside: np.ndarray
    """Context and communicators, shape (n,)."""

    activations: np.ndarray
    """Activations in flight on the rank that holds most, shape (n,)."""

    def take(self, index: np.ndarray) -> RankParts:
        """The rows at ``index``."""
        arrays = {
            name: np.take(getattr(self, name), index, axis=0) for name in self.__dataclass_fields__ if name != "ranks"
        }
        return RankParts(ranks=self.ranks.take(index), **arrays)


def rank_parts(layout: Layout, ranks: Ranks, flow: Flow, account: Account, coefficients: Coefficients) -> RankParts:
    """The parts that do not depend on resharding, buckets, accumulation and loss pieces."""
    kept_set = block_memory(layout, account)
    factor = coefficients.value("activation_factor")
    kept = factor * kept_set.kept
    dims = (layout.tp, layout.pp, layout.cp, layout.ep, layout.replicate, layout.shard)
    scale = 0.0 if layout.setting.on_cpu else 1.0
    groups = scale * total(np.where(size > 2, GROUP_BYTES, np.where(size > 1, PAIR_BYTES, 0.0)) for size in dims)
    shape, block = layout.setting.shape, block_parameters(layout)
    spared = block - block_parameters(layout, stored=True) if shape.is_moe else np.zeros(len(layout))
    held = kept.astype(np.float32)[:, None] * flow.inflight.astype(np.float32)
    if flow.waiting is not None:
        waiting = (factor * kept_set.waiting).astype(np.float32)[:, None]
        now, late_inflight, late = flow.waiting
        held = np.maximum(held + waiting * now, kept[:, None] * late_inflight + waiting * late).astype(np.float32)
    if account.keeps_boundaries:
        held = held + factor * boundary_bytes(layout, ranks, flow).astype(np.float32)
    # Split backward passes compute a whole stage's weight gradients before they are accumulated.
    split = layout.pool.is_schedule(*SPLIT_BACKWARD) & (layout.pp > 1) & account.keeps_boundaries
    delayed = np.where(split, (2.0 if layout.setting.precision == "bf16" else 4.0) / layout.vp, 0.0)
    return RankParts(
        ranks=ranks.single(),
        held=held,
        tail_tensors=(factor * tail_bytes(layout) * account.keeps_boundaries).astype(np.float32),
        block=block.astype(np.float32),
        spared=spared.astype(np.float32),
        embedding=(shape.embedding_params / layout.tp).astype(np.float32),
        tail=((shape.head_params + shape.norm_params) / layout.tp).astype(np.float32),
        head=(shape.vocab * shape.hidden / layout.tp).astype(np.float32),
        kept=kept.astype(np.float32),
        gathered=np.minimum(1.0, ACTIVE_STAGES / layout.vp).astype(np.float32)
        if account.keeps_boundaries
        else np.ones(len(layout), dtype=np.float32),
        delayed=delayed.astype(np.float32),
        inner=(factor * (kept_set.again + kept_set.transient)).astype(np.float32),
        after_experts=(factor * kept_set.after_experts).astype(np.float32),
        outside=coefficients.value("fixed_bytes") + groups,
        activations=kept * flow.inflight.max(axis=1, initial=0.0),
    )


def boundary_bytes(layout: Layout, ranks: Ranks, flow: Flow) -> np.ndarray:
    """Bytes that lie between pipeline stages on top of activations in flight, shape (n, ranks).

    torch.distributed.pipelining 2.14 makes a receive buffer for every micro-batch of the step and neighbour; those
    of inputs are the inputs that are held anyway. A stage's output is held with its activations; looped and V
    schedules let go of what they sent only when the step ends, so at the last forward all outputs and most input
    gradients are there. One boundary: tokens × hidden / tp.
    """
    setting = layout.setting
    element = 2.0 if setting.precision == "bf16" else 4.0
    unit = (element * layout.tokens * setting.shape.hidden / layout.tp)[:, None]
    stages, m = layout.vp[:, None], layout.micro_batches[:, None]
    inputs, outputs = stages - ranks.first, stages - ranks.last
    received = m * (inputs + outputs) - flow.chunks * inputs / stages
    single = layout.pool.is_schedule("1F1B", "GPipe")[:, None]
    sent = np.where(single, flow.chunks * outputs, m * outputs + (m - flow.chunks / stages).clip(0) * inputs)
    return np.asarray(np.where(layout.pp[:, None] > 1, unit * (received + sent), 0.0))


def tail_bytes(layout: Layout) -> np.ndarray:
    """Bytes around the head during the loss, shape (n,): the last norm's input, its output gathered over the
    tensor-parallel ranks, and the output's gradient in fp32, collected over the loss's pieces."""
    element = 2.0 if layout.setting.precision == "bf16" else 4.0
    return np.asarray(layout.tokens * layout.setting.shape.hidden * (element / layout.tp + element + 4.0))


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
    habits = habits_of(layout, account).single()
    ranks, held = parts.ranks, parts.held
    keeps, block = habits.keeps[:, None], parts.block[:, None]
    one = np.minimum(ranks.layers, habits.bucket[:, None]) * block
    window = np.minimum(ranks.layers, habits.ahead[:, None]) * block
    last_head = ranks.last * parts.head[:, None]
    local = ranks.layers * block + ranks.first * parts.embedding[:, None] + ranks.last * parts.tail[:, None]
    # Looped and V schedules keep at most three stages gathered (torch.distributed.pipelining 2.14).
    double = 2 * local * parts.gathered[:, None]
    gathered_block = np.where(keeps, double, 2 * window)
    gathered_head = np.where(keeps, double, 2 * last_head)
    before, own = habits.before[:, None], habits.own[:, None]
    # The loss of one piece, the gradient of the head's matrix from one piece, or the reduction of all of them.
    pieces, per_logit = logits_bytes(layout, account).astype(np.float32), np.float32(1.0 / account.logit_bytes)
    in_loss = habits.repeated * parts.head + np.maximum(pieces, habits.own_head * parts.head + 4 * per_logit * pieces)
    in_reduction = habits.reduced * parts.head + 2 * per_logit * pieces
    tail = np.maximum(in_loss, in_reduction) + habits.head_gradient * parts.head + parts.tail_tensors
    logits = ranks.last * tail[:, None]
    # Without a pipeline the last norm's backward pass, before any block's, ends the reduction of the head's gradient.
    reduced = ranks.last * (habits.reduced * parts.head * (layout.pp > 1).astype(np.float32))[:, None]
    loss_side = logits + gathered_head
    # Inner gradients while products run backward, or all gradients of the block at its end.
    complete = own * one
    if layout.setting.shape.is_moe:
        complete = complete + parts.after_experts[:, None] * (own > 0)
    working = np.maximum(parts.inner[:, None], complete)
    # By then the block that ran before has given its activations back.
    reducing_first = np.maximum(before * one - parts.kept[:, None], reduced)
    block_side = gathered_block + working + reducing_first + ranks.layers * (parts.delayed * parts.block)[:, None]
    result = ranks.last * (habits.result * parts.head)[:, None]
    first = habits.early[:, None] * local + held + result + np.maximum(loss_side, block_side)
    embedding = ranks.first * parts.embedding[:, None]
    # The embedding is gathered beside the first block; a framework that keeps parameters whole gathers nothing.
    last_gather = np.where(keeps, double, 2 * (one + (habits.ahead > 0)[:, None] * embedding))
    stored, mine = local, one
    if layout.setting.shape.is_moe:
        stored = local - ranks.layers * parts.spared[:, None]
        mine = one - np.minimum(ranks.layers, habits.bucket[:, None]) * parts.spared[:, None]
    running, embedded = working + before * one - habits.missing[:, None] * stored, (before + own) * embedding
    # Without a pipeline, so on the first rank alone, gradients of that block and the embedding are not there yet; and
    # the last block but one has a block gathered beside it rather than the embedding.
    unreduced, more = habits.own_missing * (mine[:, 0] + embedding[:, 0]), habits.own_missing * mine[:, 0]
    beside = np.maximum(gathered_block[:, 0] - last_gather[:, 0] + parts.kept - more, 0.0)
    beside = np.where(habits.last_but_one & (ranks.layers[:, 0] > 1), beside, np.float32(0.0))
    running[:, 0] += beside - unreduced
    ending = np.maximum(running, embedded)
    late = habits.late[:, None] * local + last_gather + ending
    if layout.setting.shape.is_moe:
        spared = ranks.layers * parts.spared[:, None]
        first = first - habits.early_sharded_bytes[:, None] * spared
        late = late - habits.late_sharded_bytes[:, None] * spared
    allocated = np.maximum(first, late) * ranks.exists
    reserved = allocated * np.float32(coefficients.value("reserved_factor"))
    device = reserved + parts.outside.astype(np.float32)[:, None] * ranks.exists
    terms: dict[str, np.ndarray] = {}
    if itemise:
        ends = late > first
        at_loss = ~ends & (loss_side > block_side)
        gathered = np.where(ends, last_gather, np.where(at_loss, gathered_head, gathered_block))
        # While a block still runs at the end, some gradients are not there yet.
        runs, only = ends & (running > embedded), np.arange(ends.shape[1]) == 0
        before_last = runs & only & (beside > 0)[:, None]
        gathered = np.where(before_last, gathered_block, gathered)
        gone = np.where(runs, habits.missing[:, None] * stored + unreduced[:, None] * only, 0.0)
        gone = gone + np.where(before_last, more[:, None], 0.0)
        at_end = np.where(runs, before * one, embedded)
        reducing = np.where(ends, at_end, block_side - gathered_block - working)
        params, grads, moments = (shard[:, None] for shard in shards_of(layout, account))
        sharded = account.gradient_bytes * np.where(grads > 1, stored / grads, local)
        terms = {
            "parameters": account.parameter_bytes * np.where(params > 1, stored / params, local),
            "optimizer": account.optimizer_bytes * np.where(moments > 1, stored / moments, local),
            "gradients": np.where(ends | habits.early_sharded[:, None], sharded - gone, 0.0)
            + np.where(ends, 0.0, result),
            "unsharded_parameters": gathered,
            "unsharded_gradients": habits.whole_gradients[:, None] * account.gradient_bytes * local
            + np.where(at_loss, 0.0, reducing),
            "optimizer_step": np.where(ends, account.step_bytes * local / moments, 0.0),
            "activations": np.where(ends, np.where(before_last, parts.kept[:, None], 0.0), held),
            "recompute": np.where(at_loss | (ends & ~runs), 0.0, working + 0.0 * local),
            "logits": np.where(at_loss, logits, 0.0),
            "allocator": reserved - allocated,
            "communicators": parts.outside[:, None] - coefficients.value("fixed_bytes") + 0.0 * local,
            "fixed": coefficients.value("fixed_bytes") + 0.0 * local,
        }
        terms = {name: np.where(ranks.exists, term, 0.0) for name, term in terms.items()}
    if layout.setting.on_cpu:
        reserved = device
    return Memory(terms, allocated, reserved, device, parts.activations)
