"""What torchtitan 0.3.0 really executes on each pipeline rank of a step: FLOP and every collective, counted exactly.

Times are priced from means over ranks (:mod:`pruning.ledger.communication`); this is the count behind them, rank by
rank, that the dry run of the real program is held against. It covers eager programs without context parallelism;
tokens are routed evenly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pruning.accounts.account import Account
from pruning.ledger.layout import Layout
from pruning.ledger.layout import Ranks
from pruning.ledger.parameters import block_parameters
from pruning.ledger.parameters import expert_share
from search_space.candidate import ACTIVATION_CHECKPOINT
from search_space.candidate import SCHEDULES
from search_space.candidate import SPLIT_BACKWARD
from search_space.candidate import V_SCHEDULES


LOSS_REDUCTIONS = 3
"""All-reduces of vocabulary-parallel cross-entropy for each piece of the loss: maximum, sum, target's logit."""


@dataclass(frozen=True)
class Executed:
    """One kind of collective on every pipeline rank; arrays of shape (n, ranks)."""

    dimension: str
    """``tensor``, ``data``, ``expert_data``, ``replicate``, ``pipeline`` or ``expert``."""

    primitive: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``send`` or ``all_to_all``."""

    count: np.ndarray
    """Calls in a step."""

    bytes: np.ndarray
    """Payload of all of them: the whole buffer that is gathered, reduced or sent."""


def _kind(layout: Layout, *names: str) -> np.ndarray:
    kinds = layout.pool["activation_checkpoint"]
    return np.isin(kinds, [ACTIVATION_CHECKPOINT.index(name) for name in names])


def executed_flop(layout: Layout, ranks: Ranks) -> np.ndarray:
    """FLOP of matrix products and attention on each pipeline rank in a step, shape (n, ranks).

    Per block and micro-batch: three times its products (forward, gradients of inputs and of weights) and attention's
    two score products forward and five backward over the whole score matrix (what PyTorch's own FLOP formulas count;
    a causal kernel computes about half). Full checkpointing adds one forward pass; torchtitan's selective list adds
    the output product, one of the two up products, the router and grouped expert products. The head three times.
    Expert parallelism lets each tensor-parallel rank score its own tokens; without it all of them score all.
    Schedules that split the backward pass recompute a checkpointed block several times: not counted.
    """
    shape, seq = layout.setting.shape, layout.setting.seq_len
    tokens, tp = layout.tokens, layout.tp
    unit = 2.0 * tokens * shape.hidden / tp
    key_value = 2.0 * shape.kv_heads * shape.head_dim
    moe, dense = shape.moe_share, 1 - shape.moe_share
    up = 2.0 if shape.gated_mlp else 1.0
    routed = moe * shape.experts_active * shape.expert_ffn
    shared = moe * shape.shared_experts * shape.expert_ffn
    router = 2.0 * tokens * shape.hidden * shape.experts * moe / np.where(layout.ep > 1, tp, 1.0)
    wide = dense * shape.ffn + shared
    attention_products = unit * (shape.query_width + key_value + shape.value_width)
    forward = attention_products + unit * (up + 1) * (wide + routed) + router
    scores = 4.0 * tokens * seq * shape.score_width / tp
    full = _kind(layout, "full") * (forward + scores)
    half = wide if shape.gated_mlp else 0.0
    selective = _kind(layout, "selective") * (unit * (shape.value_width + half + (up + 1) * routed) + router)
    block = 3.0 * forward + 3.5 * scores + full + selective
    head = 3.0 * 2.0 * tokens * shape.hidden * shape.vocab / tp
    return np.asarray(layout.micro_batches[:, None] * (ranks.layers * block[:, None] + ranks.last * head[:, None]))


def executed_collectives(layout: Layout, ranks: Ranks, account: Account) -> list[Executed]:
    """Every collective of a step on each pipeline rank."""
    found = [*_tensor(layout, ranks), *_data(layout, ranks, account), _pipeline(layout, ranks)]
    return [*found, _expert(layout, ranks)] if layout.setting.shape.is_moe else found


def _tensor(layout: Layout, ranks: Ranks) -> list[Executed]:
    """Around each block two gathers and two scatters forward and as many backward, two of each again where the block is
    recomputed; one of each for embedding and head. Half of that for a block whose experts are spread: they take the
    tokens as sequence parallelism has split them (not so its shared experts). Gradients of norm and router weights are
    summed over the tensor-parallel ranks: at every micro-batch in the compute precision, or once a step in fp32 with a
    pipeline; counts of tokens by expert once a step, for the bias that balances them."""
    shape = layout.setting.shape
    spread = (shape.moe_share * (layout.ep > 1))[:, None]
    element = 2.0 if layout.setting.precision == "bf16" else 4.0
    on = (layout.tp > 1)[:, None]
    m, pipelined = layout.micro_batches[:, None], (layout.pp > 1)[:, None]
    again = 2.0 * _kind(layout, "full", "selective")[:, None]
    halves = 1.0 if shape.shared_experts else 1.0 - 0.5 * spread
    calls = on * m * ((4.0 + again) * halves * ranks.layers + ranks.first + ranks.last)
    payload = (element * layout.tokens * shape.hidden)[:, None]
    gathers = [Executed("tensor", name, calls, calls * payload) for name in ("all_gather", "reduce_scatter")]
    times = np.where(pipelined, 1.0, m)
    width = np.where(pipelined, 4.0, element)
    qk = 2.0 * shape.qk_norm
    pieces = np.maximum(1.0, layout.flag("loss_chunks"))[:, None]
    losses = LOSS_REDUCTIONS * pieces * m * ranks.last
    norms = times * (2.0 + qk + shape.moe_share) * ranks.layers
    counts = np.where(spread > 0, np.minimum(1.0, ranks.layers), 0.0)
    count = on * (norms + m * ranks.last + losses + counts)
    weights = 2.0 * shape.hidden + qk * shape.head_dim + shape.moe_share * shape.hidden * shape.experts
    size = width * (times * ranks.layers * weights + m * ranks.last * shape.hidden)
    counted = 4.0 * counts * shape.moe_share * ranks.layers * shape.experts
    size = on * (size + losses * 4.0 * layout.tokens[:, None] / pieces + counted)
    return [*gathers, Executed("tensor", "all_reduce", count, size)]


def _data(layout: Layout, ranks: Ranks, account: Account) -> list[Executed]:
    """FSDP's gathers in the compute precision and reductions in fp32.

    Without a pipeline every micro-batch gathers blocks twice (once where they are kept), the embedding likewise, and
    the group of last norm and head three times: in forward, in the loss's own forward and in its backward. With a
    pipeline blocks and embedding are gathered and reduced once a step, the head's loss still at every micro-batch.
    Under expert parallelism a block's experts are gathered and reduced over a group of their own, where that has more
    than one rank.
    """
    shape, setting = layout.setting.shape, layout.setting
    element = 2.0 if setting.precision == "bf16" else 4.0
    m, pipelined = layout.micro_batches[:, None], (layout.pp > 1)[:, None]
    experts = np.where(layout.ep > 1, expert_share(layout), 0.0)[:, None]
    # Norms and the router are whole on every tensor-parallel rank.
    whole = 2.0 * shape.hidden + 2.0 * shape.qk_norm * shape.head_dim + shape.moe_share * shape.hidden * shape.experts
    block = (block_parameters(layout) + whole * (1 - 1 / layout.tp))[:, None] - experts
    embedding = (shape.embedding_params / layout.tp)[:, None]
    head = (shape.head_params / layout.tp)[:, None]
    norm = float(shape.norm_params)
    reshard = layout.pool["reshard_after_forward"][:, None]
    keeps = np.where(reshard == 0, pipelined, reshard == 2)
    rounds = np.where(pipelined, 1.0, m)
    twice = np.where(keeps, 1.0, 2.0)
    tail_gathers = np.where(pipelined, 1 + 2 * m, 3 * m) * ranks.last
    on = (layout.shard > 1)[:, None]
    calls = rounds * twice * (ranks.layers + ranks.first) + tail_gathers
    payload = rounds * twice * (ranks.layers * block + ranks.first * embedding) + tail_gathers * (head + norm)
    split = (layout.pool.is_schedule(*SPLIT_BACKWARD) & (layout.pp > 1))[:, None]
    norms = np.where(split, 0.0, rounds) * ranks.last
    reductions = rounds * (ranks.layers + ranks.first) + m * ranks.last + norms
    reduced = rounds * (ranks.layers * block + ranks.first * embedding) + m * ranks.last * head + norms * norm
    shard, copies = layout.shard[:, None], (layout.replicate > 1)[:, None]
    own = np.maximum(1.0, np.floor(layout.shard * layout.tp / layout.ep))[:, None]
    groups = rounds * ranks.layers * shape.moe_share * (layout.ep > 1)[:, None]
    shared, spread = own > 1, account.reduce_bytes * rounds * ranks.layers * experts
    found = [
        Executed("data", "all_gather", on * calls, on * element * payload),
        Executed("data", "reduce_scatter", on * reductions, on * account.reduce_bytes * reduced),
        Executed(
            "replicate",
            "all_reduce",
            copies * (reductions + groups),
            copies * (account.reduce_bytes * reduced / shard + spread / own),
        ),
    ]
    if shape.is_moe:
        gathered = element * rounds * twice * ranks.layers * experts
        found.append(Executed("expert_data", "all_gather", shared * twice * groups, shared * gathered))
        found.append(Executed("expert_data", "reduce_scatter", shared * groups, shared * spread))
    return found


def _expert(layout: Layout, ranks: Ranks) -> Executed:
    """Tokens to their experts and back, forward and backward, and the counts of them before: five exchanges for each
    mixture-of-experts block and micro-batch; the three of the forward pass again where it is recomputed.

    torchtitan's list of operators whose outputs selective checkpointing keeps has another all-to-all than eager
    programs call, so selective checkpointing exchanges again, too.
    """
    shape = layout.setting.shape
    element = 2.0 if layout.setting.precision == "bf16" else 4.0
    on = (layout.ep > 1)[:, None] * layout.micro_batches[:, None] * ranks.layers * shape.moe_share
    again = 1.0 * _kind(layout, "full", "selective")[:, None]
    routed = (element * layout.tokens / layout.tp * shape.experts_active * shape.hidden)[:, None]
    size = (4.0 + 2.0 * again) * routed + (1.0 + again) * 8.0 * shape.experts
    return Executed("expert", "all_to_all", on * (5.0 + 3.0 * again), on * size)


def _pipeline(layout: Layout, ranks: Ranks) -> Executed:
    """Activations to the next stage and gradients to the one before, where those are on another rank."""
    element = 2.0 if layout.setting.precision == "bf16" else 4.0
    stages, m = layout.vp[:, None], layout.micro_batches[:, None]
    neighbours = 2.0 * stages - ranks.first - ranks.last
    folded = np.isin(layout.pool["schedule"], [SCHEDULES.index(name) for name in V_SCHEDULES])[:, None]
    deepest = np.arange(ranks.layers.shape[1])[None, :] == layout.pp[:, None] - 1
    # The fold of a V lies on the deepest rank: its two stages hand over without sending.
    neighbours = neighbours - 2.0 * (folded & deepest)
    count = np.where(ranks.exists & (layout.pp[:, None] > 1), m * neighbours, 0.0)
    unit = (element * layout.tokens * layout.setting.shape.hidden / layout.tp)[:, None]
    return Executed("pipeline", "send", count, count * unit)
