"""The degrees of every candidate as float arrays, and what follows from them alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import numpy as np

from search_space.candidate import SCHEDULES
from search_space.model import ModelShape
from search_space.pool import Pool
from search_space.setting import Setting
from search_space.stages import split_by_cost
from search_space.stages import split_layers
from search_space.stages import stage_ranks


Links = tuple[np.ndarray, np.ndarray]
"""Bandwidths inside the fast domain and of the network, bytes/s, arrays of shape (n,)."""


@dataclass(frozen=True)
class Layout:
    """Degrees and sizes, each an array of shape (n,) of float64."""

    pool: Pool
    """The candidates."""

    setting: Setting
    """What is fixed for all of them."""

    tp: np.ndarray
    """Tensor-parallel ranks."""

    pp: np.ndarray
    """Pipeline ranks."""

    vp: np.ndarray
    """Stages per pipeline rank."""

    cp: np.ndarray
    """Context-parallel ranks."""

    ep: np.ndarray
    """Expert-parallel ranks."""

    replicate: np.ndarray
    """Copies of the sharded model."""

    shard: np.ndarray
    """Ranks over which the state of one copy is sharded (data-parallel shard × context parallel)."""

    dp: np.ndarray
    """Data-parallel ranks, replicate × shard knob."""

    micro_batch: np.ndarray
    """Sequences in one forward pass."""

    micro_batches: np.ndarray
    """Forward passes per step and data-parallel rank."""

    tokens: np.ndarray
    """Tokens of one micro-batch on one context-parallel rank."""

    domain_bandwidth: np.ndarray
    """One-direction bandwidth inside the fast domain, bytes/s."""

    nic_bandwidth: np.ndarray
    """One-direction network bandwidth per device, bytes/s."""

    def __len__(self) -> int:
        return len(self.tp)

    def flag(self, knob: str) -> np.ndarray:
        """A switch or count column as float64, shape (n,)."""
        return self.pool[knob].astype(np.float64)

    def is_code(self, knob: str, code: int) -> np.ndarray:
        """Mask of the candidates whose coded knob has that code, shape (n,)."""
        return self.pool[knob] == code


def layout_of(pool: Pool, setting: Setting, links: Links | None = None) -> Layout:
    """The layout arrays of a pool; ``links`` replaces the hardware's bandwidths row by row."""
    column = {name: pool[name].astype(np.float64) for name in (*_DEGREES, "micro_batch")}
    replicate, shard = column["data_parallel_replicate"], column["data_parallel_shard"]
    dp = replicate * shard
    hardware = setting.hardware
    if links is None:
        domain, network = np.full_like(dp, hardware.domain_bandwidth), np.full_like(dp, hardware.nic_bandwidth)
    else:
        domain, network = links
    micro_batch = column["micro_batch"]
    return Layout(
        pool=pool,
        setting=setting,
        tp=column["tensor_parallel"],
        pp=column["pipeline_parallel"],
        vp=column["virtual_stages"],
        cp=column["context_parallel"],
        ep=column["expert_parallel"],
        replicate=replicate,
        shard=shard * column["context_parallel"],
        dp=dp,
        micro_batch=micro_batch,
        micro_batches=np.maximum(1.0, np.floor(setting.global_batch_seqs / (dp * micro_batch))),
        domain_bandwidth=domain,
        nic_bandwidth=network,
        tokens=micro_batch * setting.seq_len / column["context_parallel"],
    )


_DEGREES = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_stages",
    "context_parallel",
    "expert_parallel",
    "data_parallel_replicate",
    "data_parallel_shard",
)


@dataclass(frozen=True)
class Ranks:
    """What each pipeline rank holds, arrays of shape (n, ranks); ranks that do not exist hold nothing."""

    exists: np.ndarray
    """Whether the candidate has that pipeline rank."""

    layers: np.ndarray
    """Transformer blocks on the rank."""

    first: np.ndarray
    """1 where the rank holds the embedding."""

    last: np.ndarray
    """1 where the rank holds the head and the loss."""

    held: dict[int, tuple[int, ...]]
    """Blocks of each stage by number of stages."""


DENSE = 1 << 26
"""Largest range of combination codes that a table of marks is kept for; beyond it codes are sorted."""


def distinct(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions of one row of every distinct combination, and each row's combination.

    Combinations are numbered by mixed radix; a table of marks finds those that occur, in time linear in rows.

    Returns:
        ``(positions, inverse)``: arrays of shape (k,) and (n,).
    """
    n = len(columns[0])
    code, span = np.zeros(n, dtype=np.int64), 1
    for column in columns:
        numbers, count = _numbered(column)
        if count == 1:
            continue
        if span * count > DENSE:
            code, span = _numbered(code)
        code, span = code * count + numbers, span * count
    if span > DENSE:
        positions, inverse = np.unique(code, return_index=True, return_inverse=True)[1:]
        return positions, inverse
    positions_by_code = np.full(span, -1, dtype=np.int64)
    positions_by_code[code] = np.arange(n)
    occurs = positions_by_code >= 0
    return positions_by_code[occurs], (np.cumsum(occurs) - 1)[code]


def _numbered(column: np.ndarray) -> tuple[np.ndarray, int]:
    """Each value's number among the column's distinct values, and how many there are."""
    scaled = np.round(column * 4096) if column.dtype.kind == "f" else column
    values = scaled.astype(np.int64)
    low = int(values.min(initial=0))
    span = int(values.max(initial=0)) - low + 1
    if span > DENSE:
        unique, inverse = np.unique(values, return_inverse=True)
        return inverse, max(1, len(unique))
    occurs = np.zeros(span, dtype=bool)
    occurs[values - low] = True
    numbers = np.cumsum(occurs) - 1
    return numbers[values - low], int(numbers[-1]) + 1 if len(numbers) else 1


def head_in_blocks(shape: ModelShape, seq_len: int) -> float:
    """Forward FLOP of the output head over that of one average block."""
    head = 2.0 * shape.hidden * shape.vocab
    ends = shape.embedding_params + shape.norm_params + shape.head_params
    block = 2.0 * (shape.num_active_params - ends) / shape.layers + 2.0 * shape.score_width * shape.context(seq_len)
    return head / block


def ranks_of(layout: Layout, balanced: bool = False) -> Ranks:
    """Blocks, embedding and head by pipeline rank. Candidates with more stages than layers hold nothing.

    Args:
        layout: the candidates.
        balanced: whether the framework cuts by cost, the head counted, instead of by blocks.
    """
    pool, n = layout.pool, len(layout)
    width = int(pool["pipeline_parallel"].max(initial=1))
    schedule, pp, vp = pool["schedule"], pool["pipeline_parallel"], pool["virtual_stages"]
    positions, inverse = distinct(schedule, pp, vp)
    table = np.zeros((4, len(positions), width))
    total = layout.setting.shape.layers
    head = head_in_blocks(layout.setting.shape, layout.setting.seq_len)
    held: dict[int, tuple[int, ...]] = {}
    for row, i in enumerate(positions):
        name, p, v = SCHEDULES[int(schedule[i])], int(pp[i]), int(vp[i])
        table[0, row, :p] = 1
        if p * v > total and not balanced:
            continue
        homes = stage_ranks(name, p, v)
        cut = split_by_cost(total, p * v, head) if balanced else split_layers(total, p * v)
        held[p * v] = cut
        for home, blocks in zip(homes, cut):
            table[1, row, home] += blocks
        table[2, row, homes[0]] = 1
        table[3, row, homes[-1]] = 1
    if n == 0:
        table = np.zeros((4, 1, width))
        inverse = np.zeros(0, dtype=np.int64)
    exists, layers, first, last = (part[inverse] for part in table)
    return Ranks(exists.astype(bool), layers, first, last, held)


def total(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """The element-wise sum of arrays (at least one)."""
    return reduce(np.add, arrays)
