"""The decision tree: every nanosecond of a step on a rank is owned once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trial_runner.breakdown import intervals
from trial_runner.breakdown import names
from trial_runner.breakdown.communication import Communication
from trial_runner.breakdown.cpu_work import cpu_work
from trial_runner.breakdown.intervals import Intervals
from trial_runner.breakdown.links import Links
from trial_runner.breakdown.recompute import find_recompute
from trial_runner.breakdown.recompute import Recompute
from trial_runner.breakdown.steps import Step
from trial_runner.breakdown.trace import ANNOTATION
from trial_runner.breakdown.trace import KERNEL
from trial_runner.breakdown.trace import MEMORY
from trial_runner.breakdown.trace import OPERATOR
from trial_runner.breakdown.trace import PYTHON
from trial_runner.breakdown.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Owned:
    """Who owns which time of a step; all sets disjoint, together the step. Nanoseconds after the trace's origin."""

    compute_rows: NDArray[np.intp]
    """Compute events of the step."""

    compute: Intervals
    """A compute kernel runs."""

    recompute: Recompute
    """What of the compute rows is recompute."""

    recompute_ns: int
    """Of the compute, time in which only recompute runs, ns."""

    recompute_between: Intervals
    """Time between recomputed operators where the CPU is the device."""

    bubble: Intervals
    """Only point-to-point communication, or waiting in a collective for another pipeline stage."""

    exposed: Intervals
    """A collective transfers and nothing computes."""

    straggler: Intervals
    """Collectives wait for a peer that came late."""

    unexplained: Intervals
    """Collectives wait, and no given trace says for whom."""

    data_wait: Intervals
    """Nothing on the device while the CPU is in the data loader, or only the upload of input."""

    cpu_launch: Intervals
    """Nothing on the device otherwise."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """The compute of a trace."""

    rows: NDArray[np.intp]
    """Its events."""

    fused: Intervals
    """Time inside compiled graphs on the CPU, whose fused kernels are no events."""

    def busy(self, trace: Trace, start: int, end: int) -> Intervals:
        """When something computes inside ``[start, end)``."""
        rows = self.rows[(trace.end[self.rows] > start) & (trace.start[self.rows] < end)]
        return intervals.join(_clipped(trace, rows, start, end), intervals.clip(self.fused, start, end))


def find_work(links: Links, communication: list[Communication]) -> Work:
    """The compute of a trace.

    On a device: kernels that are no communication, and fills and copies inside the device. Without one: the CPU
    operators of :func:`cpu_work` that are not on a thread that only communicates, and compiled graphs but for the
    communication in them.
    """
    trace = links.trace
    if links.on_device:
        kernels = trace.named(trace.rows(KERNEL), lambda name: names.kernel_kind(name) != names.COMMUNICATION)
        copies = trace.named(trace.rows(MEMORY), _inside_device)
        return Work(rows=np.sort(np.concatenate([kernels, copies])), fused=intervals.EMPTY)
    work = cpu_work(trace)
    gloo = np.array([item.row for item in communication if item.primary], dtype=np.intp)
    inside = links.called_inside(work, links.windows(gloo))
    own_work = np.unique(trace.thread[work[~inside]])
    graphs = trace.named(trace.rows(ANNOTATION), names.is_compiled_graph)
    talk = trace.named(trace.rows(OPERATOR), names.is_comm_operator)
    fused = intervals.subtract(
        intervals.union(trace.start[graphs], trace.end[graphs]), intervals.union(trace.start[talk], trace.end[talk])
    )
    return Work(rows=work[np.isin(trace.thread[work], own_work)], fused=fused)


def _inside_device(name: str) -> bool:
    return not any(word in name for word in ("HtoD", "DtoH", "PtoP", "Host", "Pageable", "Pinned"))


def own(links: Links, step: Step, work: Work, communication: list[Communication]) -> Owned:
    """Give every nanosecond of ``step`` to one owner.

    A compute kernel runs: compute. Else point-to-point runs: bubble. Else a collective runs: exposed communication
    while it transfers, straggler while it waits for a peer that is known to be late (bubble, when that peer is on
    another pipeline stage), unexplained while it waits otherwise. Else the CPU is in the data loader, or input is being
    uploaded: data wait. Else: CPU launch.
    """
    trace, start, end = links.trace, step.start, step.end
    rows = work.rows[(trace.end[work.rows] > start) & (trace.start[work.rows] < end)]
    busy = work.busy(trace, start, end)
    recompute = find_recompute(links, rows, start, end)
    again = _clipped(trace, rows[recompute.again], start, end)
    first = _clipped(trace, rows[~recompute.again], start, end)
    told = intervals.total(intervals.subtract(again, first))
    recompute_ns = min(told + recompute.ratio_ns, intervals.total(busy))
    here = [item for item in communication if item.end > start and item.start < end]
    p2p = _spans([(c.start, c.end) for c in here if c.kind == names.P2P], start, end)
    collectives = [item for item in here if item.kind != names.P2P]
    running = _spans([(c.start, c.end) for c in collectives], start, end)
    listed = _spans([(c.start, c.end) for c in collectives if c.primary], start, end)
    around = _spans([(c.transfer_start, c.end) for c in collectives if not c.primary], start, end)
    transfers = _spans([(c.transfer_start, c.end) for c in collectives if c.primary], start, end)
    transfers = intervals.join(transfers, intervals.subtract(around, listed))
    known = [c for c in collectives if c.arrival is not None]
    late = _spans([(c.start, c.arrival or 0) for c in known if not c.other_stage], start, end)
    drained = _spans([(c.start, c.arrival or 0) for c in known if c.other_stage], start, end)
    alone = intervals.subtract(running, intervals.join(busy, p2p))
    waiting = intervals.subtract(alone, transfers)
    late = intervals.intersect(waiting, late)
    drained = intervals.subtract(intervals.intersect(waiting, drained), late)
    whole = np.array([[start, end]], dtype=np.int64)
    idle = intervals.subtract(whole, intervals.join(busy, p2p, running))
    between = intervals.intersect(idle, recompute.region)
    idle = intervals.subtract(idle, between)
    loading = intervals.intersect(idle, _loading(trace, step))
    return Owned(
        compute_rows=rows,
        compute=busy,
        recompute=recompute,
        recompute_ns=recompute_ns,
        recompute_between=between,
        bubble=intervals.join(intervals.subtract(p2p, busy), drained),
        exposed=intervals.intersect(alone, transfers),
        straggler=late,
        unexplained=intervals.subtract(waiting, intervals.join(late, drained)),
        data_wait=loading,
        cpu_launch=intervals.subtract(idle, loading),
    )


def _clipped(trace: Trace, rows: NDArray[np.intp], start: int, end: int) -> Intervals:
    return intervals.clip(intervals.union(trace.start[rows], trace.end[rows]), start, end)


def _spans(spans: list[tuple[int, int]], start: int, end: int) -> Intervals:
    if not spans:
        return intervals.EMPTY
    array = np.array(spans, dtype=np.int64)
    return intervals.clip(intervals.union(array[:, 0], array[:, 1]), start, end)


def _loading(trace: Trace, step: Step) -> Intervals:
    """When the CPU asks for data, or uploads it; events on the training loop's thread where there are any."""
    marked = np.flatnonzero((trace.lane == OPERATOR) | (trace.lane == ANNOTATION))
    frames = trace.named(trace.rows(PYTHON), names.is_loader_frame)
    rows = np.concatenate([trace.named(marked, names.is_loader), frames])
    own_thread = rows[trace.thread[rows] == step.thread]
    rows = own_thread if len(own_thread) else rows
    uploads = trace.named(trace.rows(MEMORY), lambda name: "HtoD" in name)
    return intervals.join(
        intervals.union(trace.start[rows], trace.end[rows]), intervals.union(trace.start[uploads], trace.end[uploads])
    )
