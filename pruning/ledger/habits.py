"""What sharding keeps and when: bytes per parameter of state, gradients, gathered parameters and reductions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pruning.accounts.account import Account
from pruning.ledger.layout import Layout
from pruning.ledger.layout import total


def shards_of(layout: Layout, account: Account) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ranks over which parameters, gradients and optimizer are divided, shape (n,) each."""
    if account.sharded:
        return layout.shard, layout.shard, layout.shard
    zero, dp = layout.flag("zero_stage"), layout.dp * layout.cp
    return np.where(zero >= 3, dp, 1.0), np.where(zero >= 2, dp, 1.0), np.where(zero >= 1, dp, 1.0)


@dataclass(frozen=True)
class Habits:
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

    before: np.ndarray
    """Bytes per parameter of the group that ran backward before, whose gradients are being reduced."""

    own: np.ndarray
    """Bytes per parameter of the gradients of the group that runs backward."""

    reduced: np.ndarray
    """Bytes per head parameter of the input of its gradient's reduction."""

    result: np.ndarray
    """Bytes per head parameter of what comes out of it."""

    repeated: np.ndarray
    """Bytes per head parameter that the reduction of an earlier micro-batch still holds during the loss."""

    own_head: np.ndarray
    """Bytes per head parameter of its gradient from one of the loss's pieces."""

    head_gradient: np.ndarray
    """Bytes per head parameter of its gradient, collected in fp32 over the loss's pieces."""

    missing: np.ndarray
    """The part of ``late`` that is not there while the last block runs backward: sharded gradients of a pipeline."""

    own_missing: np.ndarray
    """The same per parameter of that block and the embedding, whose gradients are only being made."""

    last_but_one: np.ndarray
    """Whether the peak may be at the last block but one, since every block's gradients are reduced by themselves."""

    def single(self) -> Habits:
        """The same in single precision."""
        arrays = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return Habits(**{k: v if v.dtype == bool else v.astype(np.float32) for k, v in arrays.items()})


def habits_of(layout: Layout, account: Account) -> Habits:
    """The habits of every candidate under an account."""
    n = len(layout)
    no = np.zeros(n, dtype=bool)
    shards = shards_of(layout, account)
    sizes = (account.parameter_bytes, account.gradient_bytes, account.optimizer_bytes)
    base = sizes[0] / shards[0] + sizes[2] / shards[2]
    gradients = sizes[1] / shards[1]
    split = [np.where(shard > 1, size / shard, 0.0) for size, shard in zip(sizes, shards)]
    if not account.sharded:
        three = layout.flag("zero_stage") >= 3
        ahead = np.where(three, 2.0, 0.0)
        late = base + gradients + account.step_bytes / shards[2]
        return Habits(
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
            np.zeros(n),
            np.zeros(n),
            np.zeros(n),
            np.zeros(n),
            np.zeros(n),
            np.full(n, 2.0),
            np.zeros(n),
            np.zeros(n),
            no,
        )
    pipelined, accumulating = layout.pp > 1, layout.micro_batches > 1
    reshard = layout.pool["reshard_after_forward"]
    keeps = (reshard == 2) | ((reshard == 0) & pipelined)
    whole = pipelined | ((layout.flag("accumulate_without_sync") > 0) & accumulating)
    bucket = layout.flag("fsdp_bucket")
    ahead = bucket * (2 + layout.flag("forward_prefetch"))
    # the input of the last group's reduction, and the next group's gradients in bf16
    before = np.where(whole, 0.0, account.reduce_bytes)
    own = np.where(whole, 0.0, 2.0)
    early_sharded = accumulating & ~whole
    unsharded = account.gradient_bytes * whole
    early = base + gradients * early_sharded + unsharded
    late = base + gradients + unsharded + account.step_bytes / shards[2]
    early_split = split[0] + split[2] + split[1] * early_sharded
    if account.keeps_boundaries:
        # The head is a group of its own: its gradient is collected in fp32 over the loss's pieces and reduced at every
        # micro-batch, in a pipeline too.
        reduced, own_head = np.full(n, account.reduce_bytes), np.full(n, 2.0)
        repeated = np.where(pipelined & accumulating, account.reduce_bytes, 0.0)
        result = account.gradient_bytes / shards[1]
        head_gradient = np.where(pipelined, 0.0, account.gradient_bytes)
        missing = np.where(whole, gradients, 0.0)
        own_missing = np.where(accumulating, 0.0, gradients) * ~whole
    else:
        missing = own_missing = np.zeros(n)
        reduced = repeated = result = own_head = np.zeros(n)
        head_gradient = np.full(n, 2.0)
    return Habits(
        early,
        late,
        early_split,
        total(split),
        early_sharded,
        whole,
        keeps,
        bucket,
        ahead,
        before,
        own,
        reduced,
        result,
        repeated,
        own_head,
        head_gradient,
        missing,
        own_missing,
        ~whole & ~keeps & account.keeps_boundaries,
    )
