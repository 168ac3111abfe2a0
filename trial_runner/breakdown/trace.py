"""One trace in memory: the events that matter as columns, times as exact nanoseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


KERNEL, MEMORY, RUNTIME, OPERATOR, ANNOTATION, PYTHON = range(6)
"""Lanes of kept events: device kernels, device copies and fills, runtime and driver calls, CPU operators, user
annotations on the CPU, Python frames."""


def grouped(keys: NDArray[np.integer], rows: NDArray[np.intp]) -> dict[int, NDArray[np.intp]]:
    """``rows`` by key, each group in the given order; ``keys`` and ``rows`` have shape (n,)."""
    order = np.argsort(keys, kind="stable")
    distinct, first = np.unique(keys[order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(rows[order], first[1:])))


@dataclass(frozen=True, kw_only=True)
class CommFacts:
    """What a trace says about one communication, as far as it says it."""

    kind: str = ""
    """``all_reduce``, ``p2p`` …; empty when not said."""

    size_bytes: int | None = None
    """Bytes of the larger of input and output on this rank."""

    group: str = ""
    """Process group: description or name."""

    members: tuple[int, ...] = ()
    """Ranks in the group, when said."""

    group_size: int | None = None
    """Number of ranks in the group."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The kept events of one file, sorted by start. All arrays have shape (n,)."""

    path: Path
    """Where it was read."""

    rank: int | None
    """Rank of the process, when the file says it."""

    world_size: int | None
    """Ranks of the job, when the file says it."""

    backend: str = ""
    """Backend of the default process group."""

    group_names: dict[str, str] = field(default_factory=dict)
    """Description of each process group by name."""

    group_sizes: dict[str, int] = field(default_factory=dict)
    """Number of ranks in each process group by name."""

    group_ranks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Ranks in each process group by name."""

    devices: tuple[str, ...] = ()
    """Device names that the file lists."""

    origin_ns: int
    """Wall-clock time of time zero, ns."""

    start: NDArray[np.int64]
    """Start, ns after the origin."""

    end: NDArray[np.int64]
    """End, ns after the origin."""

    lane: NDArray[np.int8]
    """Lane code."""

    name: NDArray[np.int32]
    """Index into ``names``."""

    thread: NDArray[np.int32]
    """Index of the (process, thread) or (device, stream) row."""

    correlation: NDArray[np.int64]
    """Number that joins a launch and its device events; -1 when absent."""

    external: NDArray[np.int64]
    """Number that joins a device event and its CPU operator; -1 when absent."""

    sequence: NDArray[np.int64]
    """Autograd sequence number of an operator; -1 when absent."""

    forward_thread: NDArray[np.int64]
    """Thread of the matching forward operator; 0 on forward operators, -1 when absent."""

    names: list[str]
    """Distinct names."""

    comm: dict[int, CommFacts]
    """Communication facts by event index."""

    shapes: dict[int, str]
    """Input shapes as JSON text, by event index (matrix products and attention only)."""

    dtypes: dict[int, str]
    """Input types as JSON text, by event index."""

    dropped: dict[str, int] = field(default_factory=dict)
    """Events that were left out because they are broken, by reason."""

    num_events: int
    """Events in the file, kept or not."""

    def rows(self, lane: int) -> NDArray[np.intp]:
        """Indices of the events of a lane."""
        return np.flatnonzero(self.lane == lane)

    def named(self, rows: NDArray[np.intp], test: Callable[[str], object]) -> NDArray[np.intp]:
        """Those of ``rows`` whose name passes ``test``."""
        known = np.zeros(len(self.names) + 1, dtype=bool)
        for index in np.unique(self.name[rows]):
            known[index] = bool(test(self.names[index]))
        return rows[known[self.name[rows]]]
