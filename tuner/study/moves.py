"""Diagnosis-led moves: which neighbours of a measured candidate its breakdown speaks for, and why; a table of data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from search_space.candidate import ACTIVATION_CHECKPOINT
from search_space.candidate import Candidate
from search_space.pool import NAMES
from search_space.pool import Pool


RAISE = 1.5
"""Factor on the merit of a candidate that a diagnosis speaks for."""

NEAR_BEST = 1.15
"""Only trials within this ratio of the best are worth mending."""

AC_MEMORY = {"none": 3, "selective": 2, "memory_budget": 2, "first_n": 1, "full": 0}
"""Kinds of checkpointing by how much they keep."""

Neighbours = Callable[[Pool, Candidate], np.ndarray]
"""Mask of the pool's candidates that a move leads to, before the knobs that must stay are compared."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """One row of the table: a part that is large, and the knobs that make it smaller."""

    part: str
    """Part of the breakdown."""

    share: float
    """Share of the step from which the part calls for the move."""

    name: str
    """The move in words."""

    reason: str
    """Why it helps."""

    may_change: frozenset[str]
    """Knobs that may differ from the measured candidate's; all others stay."""

    leads_to: Neighbours
    """Which of those candidates the move means."""

    spare_memory: bool = False
    """Whether it needs device memory that the measured trial left free."""


_CUT = frozenset({"tensor_parallel", "data_parallel_shard", "data_parallel_replicate", "async_tp", "micro_batch"})
_STAGES = frozenset({"virtual_stages", "schedule"})


def _more(knob: str) -> Neighbours:
    return lambda pool, candidate: pool[knob] > getattr(candidate, knob)


def _fewer(knob: str) -> Neighbours:
    return lambda pool, candidate: pool[knob] < getattr(candidate, knob)


def _on(knob: str) -> Neighbours:
    return lambda pool, candidate: pool[knob].astype(bool) & (not getattr(candidate, knob))


def _keeps_more(pool: Pool, candidate: Candidate) -> np.ndarray:
    rank = np.array([AC_MEMORY[kind] for kind in ACTIVATION_CHECKPOINT])
    return np.asarray(rank[pool["activation_checkpoint"]] > AC_MEMORY[candidate.activation_checkpoint])


def _only_tensor_parallel(found: Neighbours) -> Neighbours:
    return lambda pool, candidate: found(pool, candidate) & (candidate.tensor_parallel > 1)


def _only_pipelines(found: Neighbours) -> Neighbours:
    return lambda pool, candidate: found(pool, candidate) & (candidate.pipeline_parallel > 1)


TABLE = (
    Move(
        part="exposed_communication",
        share=0.08,
        name="async tensor parallelism",
        reason="tensor-parallel collectives sit on the critical path; pipelined with their products they hide",
        may_change=frozenset({"async_tp", "compile"}),
        leads_to=_only_tensor_parallel(_on("async_tp")),
    ),
    Move(
        part="exposed_communication",
        share=0.08,
        name="smaller tensor parallelism",
        reason="fewer ranks share each product, so fewer bytes are on the critical path",
        may_change=_CUT,
        leads_to=_only_tensor_parallel(_fewer("tensor_parallel")),
    ),
    Move(
        part="exposed_communication",
        share=0.08,
        name="larger micro-batch",
        reason="parameters are gathered less often a step, with more compute beside each gather",
        may_change=frozenset({"micro_batch"}),
        leads_to=_more("micro_batch"),
        spare_memory=True,
    ),
    Move(
        part="exposed_communication",
        share=0.08,
        name="symmetric memory",
        reason="NCCL gathers and scatters with fewer SMs, or by copy engines, over symmetric memory",
        may_change=frozenset({"symm_mem"}),
        leads_to=_on("symm_mem"),
    ),
    Move(
        part="recompute",
        share=0.05,
        name="weaker activation checkpointing",
        reason="memory is left over, so less needs to be computed twice",
        may_change=frozenset({"activation_checkpoint", "memory_budget", "first_n"}),
        leads_to=_keeps_more,
        spare_memory=True,
    ),
    Move(
        part="cpu_launch",
        share=0.05,
        name="compile",
        reason="fused kernels are fewer launches",
        may_change=frozenset({"compile", "async_tp"}),
        leads_to=_on("compile"),
    ),
    Move(
        part="cpu_launch",
        share=0.05,
        name="larger micro-batch",
        reason="each launched kernel does more",
        may_change=frozenset({"micro_batch"}),
        leads_to=_more("micro_batch"),
        spare_memory=True,
    ),
    Move(
        part="bubble",
        share=0.08,
        name="more virtual stages or another schedule",
        reason="shorter stages fill and drain the pipeline faster",
        may_change=_STAGES,
        leads_to=_only_pipelines(
            lambda pool, candidate: (
                (pool["virtual_stages"] > candidate.virtual_stages)
                | pool.is_schedule("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
            )
        ),
    ),
    Move(
        part="bubble",
        share=0.08,
        name="smaller micro-batch",
        reason="more micro-batches make the same bubble a smaller share",
        may_change=frozenset({"micro_batch"}),
        leads_to=_only_pipelines(_fewer("micro_batch")),
    ),
    Move(
        part="kernel_efficiency",
        share=0.35,
        name="compile",
        reason="fused element-wise kernels move fewer bytes",
        may_change=frozenset({"compile", "async_tp"}),
        leads_to=_on("compile"),
    ),
    Move(
        part="kernel_efficiency",
        share=0.35,
        name="larger micro-batch",
        reason="larger products run nearer to the peak",
        may_change=frozenset({"micro_batch"}),
        leads_to=_more("micro_batch"),
        spare_memory=True,
    ),
)
"""The rule table. ``data_wait`` and ``straggler`` have no move: no knob of the pool feeds data or mends a node."""

NO_MOVE = {
    "data_wait": "the step waits for data: no layout helps until the loader keeps up; feed it faster, or measure with "
    '[recipe] data = "synthetic"',
    "straggler": "ranks wait for a slow one: look at its node (`tune doctor`, clocks in the trial's folder)",
}
"""Parts that no knob makes smaller, and what to do instead."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Why a candidate was raised."""

    from_trial: int
    """The measured trial."""

    part: str
    """Its large part."""

    move: str
    """The move in words."""

    reason: str
    """Why it should help."""

    def to_json(self) -> dict[str, Any]:
        """Keys of a trial's record."""
        return {"from_trial": self.from_trial, "part": self.part, "move": self.move, "reason": self.reason}


def diagnose(record: dict[str, Any], pool: Pool, spare_share: float) -> dict[int, Diagnosis]:
    """Positions of the candidates that a measured trial's breakdown speaks for, each with its first reason.

    Args:
        record: the trial's record.
        pool: every candidate.
        spare_share: share of the allowed device memory that the trial left free.
    """
    found = record.get("breakdown")
    if not found or not found["step_s"]:
        return {}
    candidate = Candidate.from_json(record["candidate"])
    raised: dict[int, Diagnosis] = {}
    for move in sorted(TABLE, key=lambda move: -found["parts_s"].get(move.part, 0.0)):
        share = found["parts_s"].get(move.part, 0.0) / found["step_s"]
        if share < move.share or (move.spare_memory and spare_share < 0.1):
            continue
        mask = move.leads_to(pool, candidate) & _same(pool, candidate, move.may_change)
        why = Diagnosis(from_trial=record["number"], part=move.part, move=move.name, reason=move.reason)
        for position in np.flatnonzero(mask):
            raised.setdefault(int(position), why)
    return raised


def hopeless_part(record: dict[str, Any]) -> str | None:
    """What to do first where the largest part of a trial's step is one that no knob makes smaller; else None."""
    found = record.get("breakdown")
    if not found or not found["step_s"]:
        return None
    part, seconds = max(found["parts_s"].items(), key=lambda item: item[1])
    if part not in NO_MOVE or seconds < 0.2 * found["step_s"]:
        return None
    return f"{part.replace('_', ' ')} takes {100 * seconds / found['step_s']:.0f}% of the step: {NO_MOVE[part]}"


def _same(pool: Pool, candidate: Candidate, may_change: frozenset[str]) -> np.ndarray:
    """Mask of the candidates that equal one in every knob that must stay."""
    one = Pool.from_candidates([candidate])
    keep = np.ones(len(pool), dtype=bool)
    for name in NAMES:
        if name not in may_change and name != "env":
            keep &= pool[name] == one[name][0]
    return keep
