"""Activations: the tensors that one block keeps for its backward pass, itemised by framework and checkpointing.

Everything is counted in elements per token, so a table of a few numbers prices a whole pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pruning.accounts.account import Account
from pruning.ledger.layout import Layout
from search_space.candidate import ACTIVATION_CHECKPOINT
from search_space.candidate import SPLIT_BACKWARD
from search_space.model import ModelShape


KEPT_FOR_WEIGHTS = 0.4
"""Share of a block's activations that must stay until its weight gradients are done: inputs of its products."""


@dataclass(frozen=True)
class Kept:
    """One kept tensor of a block."""

    name: str
    """What it is."""

    elements: float
    """Elements per token of the micro-batch, of the whole tensor."""

    split: str
    """How tensor parallelism divides it: ``heads`` (/ tp always), ``tokens`` (/ tp with sequence parallelism),
    ``gathered`` (whole on every rank), ``exchanged`` (/ tp, there with expert parallelism only), ``single`` (there
    without tensor parallelism only), ``parallel`` (whole, there with tensor parallelism only) or ``parallel_tokens``
    (/ tp with sequence parallelism, there with tensor parallelism only) or ``dispatched`` (/ tp with expert
    parallelism, whole without: there each tensor-parallel rank has a slice of every expert and sees all tokens)."""

    width: float = 1.0
    """Bytes per element over the bytes of the compute precision."""

    routed: bool = False
    """Whether it grows with the tokens that the fullest expert-parallel rank gets."""


def kept_tensors(shape: ModelShape, account: Account, kind: str, compiled: bool) -> list[Kept]:
    """The tensors that an average block keeps per micro-batch.

    Without checkpointing, eager torchtitan 0.3.0 keeps (read off autograd's saved tensors of one 70B block, with
    the saved sets of CUDA's fused RMSNorm and fused attention): both norm inputs; the inputs of the two
    column-parallel products, gathered over the tensor-parallel ranks, so they do not shrink; query, key, value,
    attention output; gate, its SiLU, up, and their product; the rotary table. A
    compiled block recomputes SiLU and the norms' insides, but keeps their outputs (saved set of the ahead-of-time
    partitioner for one 8B block).
    Megatron keeps the inputs of products as their own sequence shard and gathers them again backward
    (Korthikanti et al. 2022), and fuses SiLU with the product.
    Selective (torchtitan's per-operator list): outputs of attention, of every second product, of reduce-scatters
    and of exchanges between experts (both compiled); grouped products are not on its list. Selective in Megatron:
    everything but the score matrices. Full: the block's input.

    Args:
        shape: the model.
        account: the framework's habits.
        kind: kind of activation checkpointing; ``memory_budget`` and ``first_n`` are mixed from others elsewhere.
        compiled: whether the block is compiled.
    """
    hidden, query, out = shape.hidden, shape.query_width, shape.value_width
    kv = shape.kept_kv_width
    boundary = Kept("block input", hidden, "tokens")
    if kind == "full":
        return [boundary]
    moe, dense = shape.moe_share, 1 - shape.moe_share
    active = moe * shape.experts_active
    routed = active * shape.expert_ffn
    width = dense * shape.ffn + moe * shape.shared_experts * shape.expert_ffn
    up = 2.0 if shape.gated_mlp else 1.0
    scores = [Kept("log-sum-exp", 2.0 * shape.heads, "heads")]
    if account.attention == "unfused":
        scores = [] if kind == "selective" else [Kept("score matrices", -1.0, "heads")]
    if account.attention == "fused_softmax":
        scores = [] if kind == "selective" else [Kept("score matrices", -2.0, "heads")]
    # As they come in, and as they go out in fp32 for their scores.
    copies_sent = 3.0 if account.gathers_inputs else 2.0
    apart = "dispatched" if account.gathers_inputs else "heads"
    sent = [Kept("dispatched tokens", copies_sent * active * hidden, apart, routed=True)] if moe else []
    if kind == "selective" and account.selective_by_operator:
        tensors = [
            boundary,
            Kept("query, key, value products", query + kv, "heads"),
            Kept("attention output", out, "heads"),
            *scores,
            Kept("reduce-scattered outputs", hidden if compiled else 0.0, "parallel_tokens"),
            Kept("gate product", width * (1 if shape.gated_mlp else 0.5), "heads"),
            # An eager program's exchange between experts is another operator than the list's.
            Kept("exchanged tokens", 2 * active * hidden if compiled else 0.0, "exchanged", routed=True),
        ]
        if not compiled:
            tensors.append(Kept("down product", hidden, "gathered"))
        return tensors
    inputs = "gathered" if account.gathers_inputs else "tokens"
    tensors = [
        Kept("norm inputs", 2.0 * hidden, "tokens"),
        Kept("query, key, value", query + kv, "heads"),
        Kept("attention output", out, "heads"),
        *scores,
        *sent,
    ]
    if not account.fused_norm:
        tensors.append(Kept("norm internals", 2.0 * hidden, "tokens", 5.0))
    if compiled:
        tensors += [
            Kept(
                "inputs of column-parallel products", 2.0 * hidden, "gathered" if account.gathers_inputs else "parallel"
            ),
            Kept("gate, up and their product", (up + 1) * width, "heads"),
            Kept("routed gate, up and their product", (up + 1) * routed, "heads", routed=True),
        ]
        return tensors
    if account.gathers_inputs:
        tensors.append(Kept("rotary table", 2.0 * shape.head_dim, "gathered"))
    copies = up + 1 if account.fused_activation else up + 2 if shape.gated_mlp else up + 1
    # The router's input is that of shared experts, and of nothing else where there are none.
    columns = 1 + dense if moe and account.gathers_inputs else 2.0
    tensors += [
        Kept("inputs of column-parallel products", columns * hidden, inputs),
        Kept("feed-forward activations", copies * width, "heads"),
        Kept("routed feed-forward activations", copies * routed, "heads", routed=True),
    ]
    if shape.qk_norm:
        tensors.append(Kept("query and key before their norms", query + kv / 2, "heads"))
    if account.copies_attention_output:
        tensors.append(Kept("attention output, product layout", out, "heads"))
    if account.token_extra:
        tensors.append(Kept("further copies", account.token_extra * hidden, "tokens"))
    if account.parallel_extra:
        tensors.append(Kept("copies around collectives", account.parallel_extra * hidden, "parallel_tokens"))
    if account.gathered_extra:
        tensors.append(Kept("gathered copies", account.gathered_extra * hidden, "parallel"))
    if moe and account.gathers_inputs:
        tensors.append(Kept("router input", moe * hidden, "dispatched"))
    return tensors


def tensor_bytes(layout: Layout, account: Account, tensor: Kept) -> np.ndarray:
    """Bytes of one kept tensor on one rank, shape (n,).

    Unfused score matrices keep 5·a·s² bytes per sequence at two bytes an element (softmax output, dropout mask and
    output; Korthikanti et al. 2022), fused softmax 3·a·s².
    """
    setting = layout.setting
    width = (2.0 if setting.precision == "bf16" else 4.0) * tensor.width
    tp = layout.tp
    elements: float | np.ndarray = tensor.elements
    if tensor.elements < 0:
        per_score = 2.5 if tensor.elements == -1.0 else 1.5
        elements = per_score * setting.shape.heads * setting.seq_len
    whole = width * layout.tokens * elements
    if tensor.routed:
        # Without expert parallelism every rank holds all experts, and none gets more than another.
        whole = whole * np.where(layout.ep > 1, account.expert_imbalance, 1.0)
    tokens = tp if account.sequence_parallel else np.ones_like(tp)
    if tensor.split == "heads":
        return np.asarray(whole / tp)
    if tensor.split == "tokens":
        return np.asarray(whole / tokens)
    if tensor.split == "dispatched":
        return np.asarray(np.where(layout.ep > 1, whole / tokens, whole))
    if tensor.split == "exchanged":
        return np.asarray(np.where(layout.ep > 1, whole / tp, 0.0))
    if tensor.split == "single":
        return np.asarray(np.where(tp == 1, whole, 0.0))
    if tensor.split == "parallel":
        return np.asarray(np.where(tp > 1, whole, 0.0))
    if tensor.split == "parallel_tokens":
        return np.asarray(np.where(tp > 1, whole / tokens, 0.0))
    return np.asarray(whole)


def set_bytes(layout: Layout, account: Account, kind: str, compiled: bool) -> np.ndarray:
    """Bytes of all kept tensors of an average block, shape (n,)."""
    tensors = kept_tensors(layout.setting.shape, account, kind, compiled)
    return np.asarray(sum((tensor_bytes(layout, account, t) for t in tensors), np.zeros(len(layout))))


@dataclass(frozen=True)
class BlockMemory:
    """Activation memory of one average block and micro-batch; bytes, arrays of shape (n,)."""

    kept: np.ndarray
    """Kept from forward to backward under the candidate's checkpointing."""

    again: np.ndarray
    """What recomputation holds on top while one block runs backward."""

    transient: np.ndarray
    """Gradients of the block's inner tensors that live at once."""

    waiting: np.ndarray
    """Held until weight gradients are done, with schedules that split the backward pass."""

    after_experts: np.ndarray
    """Recomputed set and inner gradients, less what was kept and is gone, once the gradients of the experts' weights
    (nearly all of a mixture-of-experts block's) are there."""


def block_memory(layout: Layout, account: Account) -> BlockMemory:
    """Activation memory of an average block.

    A compiled block's recomputation may hold two blocks' sets at once (pytorch/pytorch#193193). Schedules that split
    the backward pass are priced as if nothing were checkpointed: PyTorch 2.14 recomputes a block several times there
    and keeps what it recomputed until weight gradients are done.
    """
    shape, setting = layout.setting.shape, layout.setting
    compiled = layout.pool["compile"]
    kind = layout.pool["activation_checkpoint"]
    sets = {}
    for name in ("none", "selective", "full"):
        code = ACTIVATION_CHECKPOINT.index(name)
        needed = (kind == code) | (kind >= 3) | (name == "none")
        if not needed.any():
            sets[name] = np.zeros(len(layout))
            continue
        eager = set_bytes(layout, account, name, False)
        sets[name] = np.where(compiled, set_bytes(layout, account, name, True), eager) if compiled.any() else eager
    none, full = sets["none"], sets["full"]
    per_stage = np.maximum(1.0, shape.layers / (layout.pp * layout.vp))
    first = np.minimum(1.0, layout.flag("first_n") / per_stage)
    kept = np.where(kind == 1, sets["selective"], none)
    kept = np.where(kind == 2, full, kept)
    kept = np.where(kind == 3, full + layout.flag("memory_budget") * (none - full), kept)
    kept = np.where(kind == 4, first * full + (1 - first) * none, kept)
    again = np.where(kind == 0, 0.0, np.maximum(0.0, none - np.where(kind == 4, full, kept))) * (1 + compiled)
    element = 2.0 if setting.precision == "bf16" else 4.0
    width = shape.feed_forward_width
    transient = element * layout.tokens * (2.0 * width + 2.0 * shape.hidden) / layout.tp
    after = np.zeros(len(layout))
    if shape.is_moe and account.gathers_inputs:
        # Before the experts run backward: gradients of routed tokens times their scores, and of both, in fp32.
        split = np.where(layout.ep > 1, layout.tp, 1.0)
        routed = layout.tokens * shape.moe_share * shape.experts_active * shape.hidden / split
        transient = np.maximum(transient, 12.0 * routed + element * layout.tokens * shape.hidden / layout.tp)
        # After: gradients of their inputs by gate and up and of the SiLU; outputs in fp32 and the inner ones are gone.
        inside = element * layout.tokens * shape.moe_share * shape.experts_active * shape.expert_ffn / layout.tp
        after = np.maximum(0.0, again + (2 * element - 4.0) * routed - 3.0 * inside)
    if account.keeps_boundaries:
        # The gradient of the down product's matrix is there while its inner gradients are.
        transient = transient + element * shape.hidden * (1 - shape.moe_share) * shape.ffn / layout.tp
    if account.attention != "fused":
        # fp32 scores and their gradient while the softmax runs backward
        transient = transient + 8.0 * layout.tokens * setting.seq_len * shape.heads / layout.tp
    split = layout.pool.is_schedule(*SPLIT_BACKWARD) & (layout.pp > 1)
    waiting = np.zeros(len(layout))
    if split.any():
        # Gradients of what the block's products give back, kept with everything else until weight gradients are done.
        given = 2.0 * width + shape.query_width + 2.0 * shape.kv_heads * shape.head_dim + 2.0 * shape.hidden
        gathered = 2.0 * shape.hidden * (layout.tp > 1)
        apart = np.where(layout.ep > 1, layout.tp, 1.0)
        experts = shape.moe_share * shape.experts_active * shape.hidden / apart
        whole = none + element * layout.tokens * (given / layout.tp + gathered + experts)
        waiting = np.where(split, whole if account.keeps_boundaries else KEPT_FOR_WEIGHTS * none, 0.0)
        kept = np.where(split, np.maximum(kept, none), kept)
        again = np.where(split, 0.0, again)
        if not account.keeps_boundaries:
            transient = np.where(split, per_stage * transient, transient)
    return BlockMemory(kept, again, transient, waiting, after)


def logits_bytes(layout: Layout, account: Account) -> np.ndarray:
    """Bytes of the logits and their gradient that live at once on a rank with the head, shape (n,).

    Per element: logits in the compute precision and three fp32 tensors of their size (log-softmax, gradient of the
    loss, gradient of the softmax), 14 bytes in bf16 (dry run of torchtitan 0.3.0); in as many pieces as the loss is
    chunked. Vocabulary-parallel cross-entropy without chunks holds 10.
    """
    shape = layout.setting.shape
    chunks = np.maximum(1.0, layout.flag("loss_chunks"))
    split = layout.tp if account.parallel_logits else np.ones_like(layout.tp)
    return np.asarray(account.logit_bytes * layout.tokens * shape.vocab / split / chunks)
