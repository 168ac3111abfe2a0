"""The communication of one trace: every kernel or gloo operation with its kind, size, group and parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trial_runner.breakdown import intervals
from trial_runner.breakdown import names
from trial_runner.breakdown.links import Links
from trial_runner.breakdown.trace import ANNOTATION
from trial_runner.breakdown.trace import CommFacts
from trial_runner.breakdown.trace import KERNEL
from trial_runner.breakdown.trace import MEMORY
from trial_runner.breakdown.trace import OPERATOR
from trial_runner.breakdown.trace import Trace


@dataclass(kw_only=True)
class Communication:
    """One communication on one rank. Times in ns after the trace's origin."""

    row: int
    """Row in the trace."""

    start: int
    """When this rank was ready: its kernel began."""

    end: int
    """When it had finished."""

    kind: str
    """``all_gather``, ``p2p`` … or ``unknown``."""

    size_bytes: int | None
    """Bytes on this rank, when known."""

    group: str
    """Name or description of the group."""

    members: tuple[int, ...]
    """Ranks of the group; empty when not known."""

    group_size: int | None
    """Ranks in the group, when known."""

    dimension: str
    """Parallelism it serves; empty when nothing tells."""

    primary: bool = True
    """False for a blocking call around other communication events (CPU traces)."""

    covers: bool = False
    """A blocking call inside which other communication events ran."""

    arrival: int | None = None
    """When the last known peer was ready, in this trace's time; None without a peer's trace."""

    other_stage: bool = False
    """The last peer belongs to another pipeline stage, so waiting for it is bubble."""

    complete: bool = False
    """Whether the traces of all ranks of the group were given."""

    transfer_start: int = 0
    """From here to the end it transfers; before, it waits."""

    @property
    def key(self) -> tuple[str, int | None, object]:
        """What communications of the same class share on all ranks."""
        return self.kind, self.size_bytes, self.members or self.group


def find_communication(trace: Trace, links: Links) -> list[Communication]:
    """Every communication of a trace in order of start.

    On a device: kernels that are communication by name, peer copies, and gloo operations of the CPU. The kind of a
    kernel comes from its name; where that says only send-and-receive or nothing (all-to-all by NCCL, RCCL's generic
    kernel), from the operator that launched it. Without a device: gloo operations, and the calls that block on them.
    """
    kernels = trace.named(trace.rows(KERNEL), lambda name: names.kernel_kind(name) == names.COMMUNICATION)
    peers = trace.named(trace.rows(MEMORY), lambda name: "PtoP" in name)
    marks = trace.rows(ANNOTATION)
    gloo = trace.named(marks, lambda name: name.startswith(("gloo:", "mpi:", "ucc:")))
    rows = np.concatenate([kernels, peers, gloo])
    calls = np.empty(0, dtype=np.intp)
    if not links.on_device:
        operators = trace.named(trace.rows(OPERATOR), names.is_comm_operator)
        calls = operators[trace.end[operators] > trace.start[operators]]
        calls = _outermost(trace, calls)
    facts = _launch_facts(trace, links, kernels)
    fsdp = trace.named(marks, lambda name: name.startswith("FSDP::"))
    in_fsdp = set(rows[_inside_any(trace, links, rows, fsdp)].tolist()) if len(fsdp) else set()
    found = []
    for row in np.sort(np.concatenate([rows, calls])).tolist():
        found.append(_describe(trace, row, facts.get(row) or trace.comm.get(row), row in in_fsdp))
    secondary = set(calls.tolist())
    for communication in found:
        communication.primary = communication.row not in secondary
    found = [item for item in found if item.end > item.start]
    _guess_dimensions(found, links)
    return found


def _outermost(trace: Trace, rows: NDArray[np.intp]) -> NDArray[np.intp]:
    """Rows that no other of the rows encloses on the same thread."""
    keep = []
    reach: dict[int, int] = {}
    for row in rows.tolist():
        thread = int(trace.thread[row])
        if int(trace.end[row]) > reach.get(thread, -1):
            reach[thread] = int(trace.end[row])
            keep.append(row)
    return np.array(keep, dtype=np.intp)


def _inside_any(trace: Trace, links: Links, rows: NDArray[np.intp], marks: NDArray[np.intp]) -> NDArray[np.bool_]:
    span = intervals.union(trace.start[marks], trace.end[marks])
    called = links.called_at[rows]
    return intervals.contains(span, np.where(called >= 0, called, trace.start[rows]))


def _launch_facts(trace: Trace, links: Links, kernels: NDArray[np.intp]) -> dict[int, CommFacts]:
    """Facts of each kernel: its own arguments, completed by the communication operators around its launch."""
    sources = np.array(sorted(row for row in trace.comm if trace.lane[row] in (OPERATOR, ANNOTATION)), dtype=np.intp)
    facts = {int(row): trace.comm[int(row)] for row in kernels if int(row) in trace.comm}
    if not len(sources) or not len(kernels):
        return facts
    merged: dict[int, CommFacts] = {}
    sized = [row for row in sources.tolist() if trace.comm[row].size_bytes is not None]
    named = [row for row in sources.tolist() if trace.comm[row].kind not in ("", names.UNKNOWN_COLLECTIVE)]
    for part in (np.array(sized, dtype=np.intp), np.array(named, dtype=np.intp)):
        for row, source in zip(kernels.tolist(), links.around(kernels, part).tolist()):
            if source >= 0:
                merged[row] = _merge(merged.get(row), trace.comm[source])
    for row, found in merged.items():
        facts[row] = _merge(facts.get(row), found)
    return facts


def _merge(first: CommFacts | None, second: CommFacts) -> CommFacts:
    if first is None:
        return second
    known = first.kind not in ("", names.UNKNOWN_COLLECTIVE)
    return CommFacts(
        kind=first.kind if known else second.kind,
        size_bytes=first.size_bytes if first.size_bytes is not None else second.size_bytes,
        group=first.group or second.group,
        members=first.members or second.members,
        group_size=first.group_size if first.group_size is not None else second.group_size,
    )


def _describe(trace: Trace, row: int, facts: CommFacts | None, in_fsdp: bool) -> Communication:
    name = trace.names[trace.name[row]]
    facts = facts or CommFacts()
    kind = names.collective_kind(name)
    if kind in (names.UNKNOWN_COLLECTIVE, names.P2P) and facts.kind not in ("", names.UNKNOWN_COLLECTIVE):
        kind = facts.kind
    if trace.lane[row] == MEMORY:
        kind = "peer_copy"
    group = facts.group
    text = trace.group_names.get(group) or group
    members = facts.members or trace.group_ranks.get(group, ())
    return Communication(
        row=row,
        start=int(trace.start[row]),
        end=int(trace.end[row]),
        kind=kind,
        size_bytes=facts.size_bytes,
        group=text,
        members=members,
        group_size=facts.group_size or len(members) or trace.group_sizes.get(group) or None,
        dimension=dimension_of(text) or ("FSDP" if in_fsdp else ""),
    )


_DIMENSIONS = [
    ("TP", ("tp", "tensor", "sequence_parallel")),
    ("PP", ("pp", "pipe")),
    ("EP", ("ep", "expert", "efsdp")),
    ("CP", ("cp", "context")),
    ("FSDP", ("fsdp", "dp_shard", "shard", "zero")),
    ("DP", ("dp", "replicate", "ddp", "data", "batch", "loss")),
]


def dimension_of(group: str) -> str:
    """Parallelism that a process group's name tells, such as ``mesh_tp`` or ``PIPELINE_MODEL_PARALLEL_GROUP``."""
    lowered = group.lower()
    words = set(lowered.replace("-", "_").replace(" ", "_").replace(".", "_").split("_"))
    for dimension, marks in _DIMENSIONS:
        for mark in marks:
            if mark in words or (len(mark) > 2 and mark in lowered):
                return dimension
    return ""


def stage_peers(trace: Trace) -> set[int] | None:
    """Ranks of the same pipeline stage as the trace's own, by the groups that the file lists; None when it names none.

    Tensor-, data-, context- and expert-parallel groups stay inside a stage.
    """
    inside = [
        ranks
        for name, ranks in trace.group_ranks.items()
        if dimension_of(trace.group_names.get(name, "")) not in ("", "PP")
    ]
    return set().union(*inside) if inside else None


def _only_dimension(trace: Trace) -> str:
    """The one parallelism of the job when the listed groups leave only one with more than one rank; else empty."""
    sizes: dict[str, int] = {}
    for name, text in trace.group_names.items():
        dimension = dimension_of(text)
        sizes[dimension] = max(sizes.get(dimension, 0), trace.group_sizes.get(name, 0))
    left = [dimension for dimension in ("TP", "PP", "CP", "FSDP", "DP") if sizes.get(dimension, 2) > 1]
    return left[0] if sizes and len(left) == 1 else ""


def _guess_dimensions(found: list[Communication], links: Links) -> None:
    """Fill in the parallelism that positions tell where groups have no telling name.

    Point to point serves the pipeline and all-to-all the experts; what is left serves the only parallelism that the
    listed groups leave. Else all-reduces in forward and backward alike serve tensor parallelism, in backward alone data
    parallelism.
    """
    unknown = [item for item in found if not item.dimension]
    if not unknown:
        return
    only = _only_dimension(links.trace)
    ever = intervals.join(*links.backward.values())
    begun = np.array([item.start for item in unknown], dtype=np.int64)
    called = links.called_at[np.array([item.row for item in unknown], dtype=np.intp)]
    backward = intervals.contains(ever, np.where(called >= 0, called, begun))
    reduces = [bool(late) for item, late in zip(unknown, backward) if item.kind == "all_reduce"]
    early = sum(1 for late in reduces if not late)
    tensor = early >= 8 and early > len(reduces) / 4
    for item in unknown:
        if item.kind == names.P2P:
            item.dimension = "PP"
        elif item.kind == "all_to_all":
            item.dimension = "EP"
        elif only:
            item.dimension = only
        elif item.kind == "all_reduce" and links.backward:
            item.dimension = "TP" if tensor else "DP"
