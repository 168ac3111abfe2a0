"""The pool: every candidate of a study as arrays, legal ones and refused ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import fields
from dataclasses import replace
from typing import Any

import numpy as np

from search_space.candidate import ACTIVATION_CHECKPOINT
from search_space.candidate import Candidate
from search_space.candidate import RESHARD
from search_space.candidate import SCHEDULES


CODES: dict[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "reshard_after_forward": RESHARD,
    "activation_checkpoint": ACTIVATION_CHECKPOINT,
}
"""Knobs that arrays hold as the index into a list of names."""

DTYPES = {"memory_budget": np.float32, "compile": np.bool_, "async_tp": np.bool_, "float8": np.bool_}
DTYPES |= {"accumulate_without_sync": np.bool_, "symm_mem": np.bool_}
NAMES = tuple(field.name for field in fields(Candidate))
"""Column names: every knob, in the order of :class:`Candidate`."""


@dataclass(frozen=True)
class Pool:
    """Candidates as a struct of arrays: ``columns[knob][i]`` is the value (or its code) of candidate ``i``."""

    columns: dict[str, np.ndarray]
    """One array of shape (n,) per knob; texts as codes, see :data:`CODES`."""

    env_names: tuple[str, ...] = ("default",)
    """Names behind the codes of the ``env`` column."""

    def __len__(self) -> int:
        return len(self.columns["micro_batch"])

    def __getitem__(self, knob: str) -> np.ndarray:
        return self.columns[knob]

    @property
    def data_parallel(self) -> np.ndarray:
        """Data-parallel ranks, replicate × shard, shape (n,)."""
        return self["data_parallel_replicate"].astype(np.int64) * self["data_parallel_shard"]

    @property
    def num_stages(self) -> np.ndarray:
        """Pipeline stages over all ranks, shape (n,)."""
        return self["pipeline_parallel"].astype(np.int64) * self["virtual_stages"]

    def is_schedule(self, *names: str) -> np.ndarray:
        """Mask of the candidates whose schedule is one of ``names``, shape (n,)."""
        return np.isin(self["schedule"], [SCHEDULES.index(name) for name in names])

    def take(self, index: np.ndarray) -> Pool:
        """The candidates at ``index`` (positions or a mask)."""
        return Pool({name: column[index] for name, column in self.columns.items()}, self.env_names)

    def candidate(self, i: int) -> Candidate:
        """Candidate ``i`` as one object."""
        values: dict[str, Any] = {}
        for name in NAMES:
            value = self.columns[name][i].item()
            if name in CODES:
                value = CODES[name][value]
            elif name == "env":
                value = self.env_names[value]
            elif name == "memory_budget":
                value = round(value, 4)
            values[name] = value
        return Candidate(**values)

    def candidates(self) -> list[Candidate]:
        """All candidates as objects."""
        return [self.candidate(i) for i in range(len(self))]

    def position(self, candidate: Candidate) -> int | None:
        """Where a candidate stands; None when the pool has none like it."""
        left = np.arange(len(self))
        for name in NAMES:
            value: Any = getattr(candidate, name)
            if name in CODES:
                value = CODES[name].index(value)
            elif name == "env":
                if value not in self.env_names:
                    return None
                value = self.env_names.index(value)
            column = self.columns[name][left]
            same = np.abs(column - value) < 5e-5 if name == "memory_budget" else column == value
            left = left[same]
            if not len(left):
                return None
        return int(left[0])

    @classmethod
    def from_candidates(cls, candidates: Iterable[Candidate]) -> Pool:
        """A pool of the given candidates, in their order."""
        rows = list(candidates)
        env_names = tuple(dict.fromkeys(["default", *(row.env for row in rows)]))
        columns: dict[str, np.ndarray] = {}
        for name in NAMES:
            values = [getattr(row, name) for row in rows]
            if name in CODES:
                values = [CODES[name].index(value) for value in values]
            elif name == "env":
                values = [env_names.index(value) for value in values]
            columns[name] = np.array(values, dtype=DTYPES.get(name, np.int32))
        return cls(columns, env_names)

    @classmethod
    def concatenate(cls, pools: list[Pool]) -> Pool:
        """All candidates of ``pools`` (which share their environment names), in order."""
        columns = {name: np.concatenate([pool.columns[name] for pool in pools]) for name in NAMES}
        return cls(columns, pools[0].env_names)


def canonical(candidate: Candidate) -> Candidate:
    """The candidate with every knob that has no effect set to its default.

    A schedule without a pipeline, resharding without sharding and the like do not change the program.
    """
    changes: dict[str, Any] = {}
    if candidate.pipeline_parallel == 1:
        changes |= {"schedule": "1F1B", "virtual_stages": 1}
    if candidate.data_parallel_shard == 1 and candidate.context_parallel == 1:
        changes |= {"reshard_after_forward": "default", "forward_prefetch": 0, "symm_mem": False}
    if candidate.activation_checkpoint != "memory_budget":
        changes["memory_budget"] = 1.0
    if candidate.activation_checkpoint != "first_n":
        changes["first_n"] = 0
    if candidate.tensor_parallel == 1 or not candidate.compile:
        changes["async_tp"] = False
    return replace(candidate, **changes)
