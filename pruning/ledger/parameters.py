"""Parameters by rank: what tensor, pipeline and expert parallelism leave on one device before data sharding."""

from __future__ import annotations

import numpy as np

from pruning.ledger.layout import Layout
from pruning.ledger.layout import Ranks
from search_space.model import ModelShape


def expert_parameters(shape: ModelShape) -> int:
    """Routed-expert parameters of one mixture-of-experts block."""
    return shape.experts * shape.mlp_params(shape.expert_ffn) if shape.is_moe else 0


def block_parameters(layout: Layout, stored: bool = False) -> np.ndarray:
    """Parameters of one average block on one tensor- and expert-parallel rank, shape (n,).

    Args:
        layout: the candidates.
        stored: count experts as sharding stores them. Expert parallelism overlays the data- and tensor-parallel
            ranks, so all of them together hold each expert once: a share of 1 / tp before data sharding.
    """
    shape = layout.setting.shape
    experts = (shape.layers - shape.dense_layers) * expert_parameters(shape) / shape.layers if shape.is_moe else 0.0
    ends = shape.embedding_params + shape.head_params + shape.norm_params
    rest = (shape.num_params - ends) / shape.layers - experts
    split = layout.tp if stored else np.where(layout.ep > 1, layout.ep, layout.tp)
    return np.asarray(rest / layout.tp + experts / split)


def local_parameters(layout: Layout) -> np.ndarray:
    """Parameters on one rank, mean over pipeline ranks, shape (n,)."""
    shape = layout.setting.shape
    ends = shape.embedding_params + shape.head_params + shape.norm_params
    return np.asarray((shape.layers * block_parameters(layout) + ends / layout.tp) / layout.pp)


def expert_share(layout: Layout) -> np.ndarray:
    """Parameters of the routed experts of an average block on one expert-parallel rank, shape (n,)."""
    shape = layout.setting.shape
    whole = shape.moe_share * expert_parameters(shape)
    return np.asarray(whole / np.where(layout.ep > 1, layout.ep, layout.tp))


def rank_parameters(layout: Layout, ranks: Ranks, stored: bool = False) -> np.ndarray:
    """Parameters on each pipeline rank, shape (n, ranks); ``stored`` as in :func:`block_parameters`."""
    shape = layout.setting.shape
    first = ranks.first * shape.embedding_params
    last = ranks.last * (shape.head_params + shape.norm_params)
    return np.asarray(ranks.layers * block_parameters(layout, stored)[:, None] + (first + last) / layout.tp[:, None])
