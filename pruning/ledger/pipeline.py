"""Pipeline: idle share and activations in flight of every candidate, looked up from simulated schedules."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pruning.ledger.layout import distinct
from pruning.ledger.layout import head_in_blocks
from pruning.ledger.layout import Layout
from pruning.ledger.layout import Ranks
from pruning.ledger.schedule import simulate
from pruning.ledger.schedule import Simulated
from search_space.candidate import LOOPED_SCHEDULES
from search_space.candidate import SCHEDULES
from search_space.candidate import V_SCHEDULES


STEADY_ROUNDS = 3
"""A schedule repeats itself after so many micro-batches per rank; longer steps are extended, not simulated."""


@dataclass(frozen=True)
class Flow:
    """How a schedule fills the pipeline."""

    bubble: np.ndarray
    """Idle over mean busy time: waiting for the pipeline and for the slowest rank, shape (n,)."""

    inflight: np.ndarray
    """Block-micro-batches that wait for their backward pass when a rank holds most, shape (n, ranks)."""

    waiting: tuple[np.ndarray, np.ndarray, np.ndarray] | None
    """With schedules that split the backward pass, shape (n, ranks) each: block-micro-batches that wait for their
    weight gradients at that moment; those that wait for backward, and for weight gradients, when most wait for the
    latter. None when no candidate has such a schedule."""

    chunks: np.ndarray
    """Most stage-micro-batches that a rank holds at once, shape (n, ranks); 0 without a pipeline."""


def short_step(schedule: str, pp: int, micro_batches: int) -> int:
    """Micro-batches that are enough to simulate: the rest of the step repeats the steady state."""
    looped = schedule in LOOPED_SCHEDULES
    if schedule == "GPipe" or (looped and micro_batches % pp):
        return micro_batches
    return min(micro_batches, STEADY_ROUNDS * pp)


def simulated(
    schedule: str, pp: int, vp: int, micro_batches: int, held: tuple[int, ...], head: float
) -> tuple[float, Simulated] | None:
    """Idle over mean busy time, and the simulated step; None for a combination that no schedule runs."""
    rounds = max(1, micro_batches // pp)
    if (schedule in V_SCHEDULES and vp != 2) or (schedule in LOOPED_SCHEDULES and micro_batches % rounds):
        return None
    if schedule == "DualPipeV" and micro_batches < 2 * pp:
        return None
    enough = short_step(schedule, pp, micro_batches)
    step = simulate(schedule, pp, vp, enough, held, round(head, 2))
    span = step.span + (micro_batches - enough) * max(step.work) / enough
    return span / (sum(step.work) / pp * micro_batches / enough) - 1, step


def flow_of(layout: Layout, ranks: Ranks) -> Flow:
    """Bubble and activations in flight by simulating each distinct (schedule, ranks, stages, micro-batches).

    Stages are uneven: blocks as :func:`search_space.stages.split_layers` deals them out, and the head on the last
    stage. Combinations that no schedule runs get the even closed form (they are refused by the rules anyway).
    """
    pool, shape = layout.pool, layout.setting.shape
    schedule, pp, vp = pool["schedule"], pool["pipeline_parallel"], pool["virtual_stages"]
    micro_batches = layout.micro_batches.astype(np.int64)
    piped = pp > 1
    head = head_in_blocks(shape, layout.setting.seq_len)
    alone = np.where(piped, micro_batches, 1)
    positions, inverse = distinct(schedule, pp, vp, alone)
    bubble = np.zeros(len(positions) or 1)
    inflight = np.zeros((len(positions) or 1, ranks.layers.shape[1]))
    chunks = np.zeros_like(inflight)
    waits: list[np.ndarray] = [np.zeros_like(inflight) for _ in range(3)]
    for row, i in enumerate(positions):
        p, v, m = int(pp[i]), int(vp[i]), int(micro_batches[i])
        if p == 1:
            inflight[row, 0] = shape.layers
            continue
        held = ranks.held.get(p * v)
        found = simulated(SCHEDULES[int(schedule[i])], p, v, m, held, head) if held else None
        if found is None:
            bubble[row] = (p - 1) / (m * v)
            inflight[row, :p] = np.minimum(m, p) * shape.layers / p
            chunks[row, :p] = np.minimum(m, p) * v
        else:
            bubble[row] = found[0]
            inflight[row, :p] = found[1].inflight
            chunks[row, :p] = found[1].chunks
            for array, value in zip(waits, (found[1].waiting, found[1].late_inflight, found[1].late_waiting)):
                array[row, :p] = value
    some = (waits[0][inverse], waits[1][inverse], waits[2][inverse]) if waits[2].any() else None
    return Flow(bubble[inverse], inflight[inverse], some, chunks[inverse])
