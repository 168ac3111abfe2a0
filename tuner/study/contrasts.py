"""The ratio arm: designed contrasts TP × checkpointing × compile, which a search that hugs the winner never sees.

What carries over to another scale is ratios: how much slower is twice the tensor parallelism, full recomputation, eager
instead of compiled. Each needs pairs that differ in that knob and in little else.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from search_space.candidate import ACTIVATION_CHECKPOINT
from search_space.candidate import Candidate
from search_space.pool import NAMES
from search_space.pool import Pool


AXES = ("tensor_parallel", "activation_checkpoint", "compile")
"""Knobs whose ratios are measured."""

STRENGTH = {"none": 0, "first_n": 1, "memory_budget": 2, "selective": 3, "full": 4}
"""Kinds of checkpointing from what recomputes least to what recomputes most."""


def levels(pool: Pool, allowed: np.ndarray) -> list[tuple[int, ...]]:
    """The two ends of each axis among the allowed candidates, as column values; one where an axis does not vary."""
    ends = []
    for name in AXES:
        values = np.unique(pool[name][allowed]).tolist()
        if name == "activation_checkpoint":
            values.sort(key=lambda code: STRENGTH[ACTIVATION_CHECKPOINT[code]])
        ends.append(tuple(dict.fromkeys((values[0], values[-1]))))
    return ends


def design(pool: Pool, allowed: np.ndarray, step_time_s: np.ndarray, centre: Candidate) -> list[int]:
    """Positions of the contrasts, a balanced half of the design first, so that a small budget sees every axis.

    Of the candidates in a cell the one nearest to the centre in all other knobs stands for it, the fastest predicted
    of several.

    Args:
        pool: every candidate.
        allowed: mask of those that may be tried.
        step_time_s: predicted step times, shape (n,).
        centre: what the other knobs should be like.
    """
    if not allowed.any():
        return []
    one = Pool.from_candidates([centre])
    others = [name for name in NAMES if name not in (*AXES, "data_parallel_shard", "data_parallel_replicate", "env")]
    apart = sum((pool[name] != one[name][0]).astype(int) for name in others)
    # Half of a 2³ design: the cells with an odd number of high ends, then the rest.
    cells = list(product(*(range(len(ends)) for ends in levels(pool, allowed))))
    cells.sort(key=lambda cell: (sum(cell) % 2 == 0, cell))
    found: list[int] = []
    for cell in cells:
        inside = allowed.copy()
        for name, ends, level in zip(AXES, levels(pool, allowed), cell):
            inside &= pool[name] == ends[level]
        positions = np.flatnonzero(inside)
        if len(positions):
            found.append(int(positions[np.lexsort((step_time_s[positions], apart[positions]))[0]]))
    return list(dict.fromkeys(found))
