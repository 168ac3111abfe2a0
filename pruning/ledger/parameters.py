"""Parameters by rank: what tensor, pipeline and expert parallelism leave on one device before data sharding."""

from __future__ import annotations

import numpy as np

from pruning.ledger.layout import Layout
from pruning.ledger.layout import Ranks
from search_space.model import ModelShape


def expert_parameters(shape: ModelShape) -> int:
    """Routed-expert parameters of one mixture-of-experts block."""
    return shape.experts * shape.mlp_params(shape.expert_ffn) if shape.is_moe else 0


def block_parameters(layout: Layout) -> np.ndarray:
    """Parameters of one average block on one tensor- and expert-parallel rank, shape (n,)."""
    shape = layout.setting.shape
    experts = (shape.layers - shape.dense_layers) * expert_parameters(shape) / shape.layers if shape.is_moe else 0.0
    ends = shape.embedding_params + shape.head_params + shape.norm_params
    rest = (shape.num_params - ends) / shape.layers - experts
    split = np.where(layout.ep > 1, layout.ep, layout.tp)
    return np.asarray(rest / layout.tp + experts / split)


def local_parameters(layout: Layout) -> np.ndarray:
    """Parameters on one rank, mean over pipeline ranks, shape (n,)."""
    shape = layout.setting.shape
    ends = shape.embedding_params + shape.head_params + shape.norm_params
    return np.asarray((shape.layers * block_parameters(layout) + ends / layout.tp) / layout.pp)


def rank_parameters(layout: Layout, ranks: Ranks) -> np.ndarray:
    """Parameters on each pipeline rank, shape (n, ranks)."""
    shape = layout.setting.shape
    first = ranks.first * shape.embedding_params
    last = ranks.last * (shape.head_params + shape.norm_params)
    return np.asarray(ranks.layers * block_parameters(layout)[:, None] + (first + last) / layout.tp[:, None])
