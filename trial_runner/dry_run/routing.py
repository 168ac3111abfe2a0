"""Tokens to experts on fake tensors: the counts that an expert-parallel program reads are those of balanced routing.

The rest of torchtitan's token dispatcher runs as it is: the exchange of counts, both all-to-alls, the reordering.
"""

from __future__ import annotations

from typing import Any
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    import torch


BALANCED = "balanced: fake tensors hold no router scores, so every expert is assumed to get the same number of tokens"
"""What is said about routing wherever figures of an expert-parallel program are shown."""

GPU_ONLY = ("DeepEPTokenDispatcher", "HybridEPTokenDispatcher", "MinimalAsyncEPTokenDispatcher")
"""Dispatchers of torchtitan 0.3.0 whose exchanges are CUDA kernels of their own."""


class CannotRoute(RuntimeError):
    """The program's way of sending tokens to experts does not go through fake tensors on a CPU."""


def balanced_splits(rows: int, experts: int, ranks: int, rank: int) -> tuple[list[int], list[int]]:
    """Rows that a rank sends to each rank of its expert-parallel group, and receives from each.

    Rows are dealt out to the experts in turn, as torchtitan's ``_debug_force_load_balance`` does, and every rank deals
    alike; so what is left over when they do not divide goes to the first experts.

    Args:
        rows: routed tokens of one rank: tokens × experts that each token uses.
        experts: routed experts of the layer; the ranks hold equally many, in order.
        ranks: ranks of the group.
        rank: this rank among them.
    """
    each, over = divmod(rows, experts)
    held = experts // ranks
    sent = [held * each + min(max(over - first * held, 0), held) for first in range(ranks)]
    return sent, [sent[rank]] * ranks


def balance() -> None:
    """Give torchtitan's all-to-all dispatcher concrete counts, and refuse the dispatchers that need a GPU."""
    import torch
    from torchtitan.models.common import token_dispatcher

    dispatcher: Any = token_dispatcher.AllToAllTokenDispatcher
    dispatch = dispatcher.dispatch

    def noting(self: Any, x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor) -> Any:
        self.routed_rows = ids.numel()
        return dispatch(self, x, scores, ids, counts)

    def counted(self: Any, local: torch.Tensor, exchanged: torch.Tensor, ranks: int) -> Any:
        waited = torch.ops._c10d_functional.wait_tensor(exchanged).reshape(-1)
        rank = torch.distributed.get_rank(self.ep_mesh.get_group())
        return waited, *balanced_splits(self.routed_rows, self.num_experts, ranks, rank)

    dispatcher.dispatch = noting
    dispatcher._sync_token_count_exchange = counted
    for name in GPU_ONLY:
        getattr(token_dispatcher, name).__init__ = _refusal(name)


def _refusal(name: str) -> Any:
    def refuse(self: Any, config: Any) -> None:
        raise CannotRoute(
            f"this model sends tokens by {name}, whose exchanges are CUDA kernels without a form for fake tensors; "
            'the model built with moe_comm_backend="standard" can be run, but its exchange has other buffers'
        )

    return refuse
