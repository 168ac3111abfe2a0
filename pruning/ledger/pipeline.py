"""Pipeline: idle share and micro-batches in flight by rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pruning.ledger.layout import Layout
from pruning.ledger.layout import Ranks
from search_space.candidate import SCHEDULES


@dataclass(frozen=True)
class Flow:
    """How a schedule fills the pipeline."""

    bubble: np.ndarray
    """Idle over useful time of the slowest rank, shape (n,)."""

    inflight: np.ndarray
    """Block-micro-batches whose activations are held at the peak, shape (n, ranks)."""


def flow_of(layout: Layout, ranks: Ranks) -> Flow:
    """Closed forms by schedule.

    1F1B holds min(m, p - r) micro-batches on rank r and idles (p-1)/m; interleaving holds 2(p-r-1) + (v-1)p + 1
    chunks and idles (p-1)/(m·v) (Narayanan et al. 2021); GPipe holds all m; the zero-bubble family idles about a
    third, V schedules hold about 2p chunks on every rank.
    """
    schedule = layout.pool["schedule"][:, None]
    p, v, m = layout.pp[:, None], layout.vp[:, None], layout.micro_batches[:, None]
    rank = np.arange(ranks.layers.shape[1])[None, :]
    one = np.minimum(m, p - rank)
    looped = np.minimum(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1) / v
    folded = np.minimum(m, p) + 0.0 * rank
    code = {name: i for i, name in enumerate(SCHEDULES)}
    held = np.select(
        [
            schedule == code["GPipe"],
            (schedule == code["Interleaved1F1B"]) | (schedule == code["InterleavedZeroBubble"]),
            (schedule == code["ZBVZeroBubble"]) | (schedule == code["DualPipeV"]),
        ],
        [np.broadcast_to(m, one.shape), looped, folded],
        default=one,
    )
    held = np.where(p == 1, 1.0, held)
    idle = (p - 1) / (m * v)
    zero = np.isin(schedule, [code[name] for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")])
    bubble = np.where(zero, idle / 3, idle)[:, 0]
    return Flow(bubble, np.where(ranks.exists, held * ranks.layers, 0.0))
