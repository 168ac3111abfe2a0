"""Which compute of a step is the forward running again inside backward."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trial_runner.breakdown import intervals
from trial_runner.breakdown import names
from trial_runner.breakdown.gemm import find_products
from trial_runner.breakdown.intervals import Intervals
from trial_runner.breakdown.links import Links
from trial_runner.breakdown.trace import ANNOTATION
from trial_runner.breakdown.trace import grouped
from trial_runner.breakdown.trace import OPERATOR
from trial_runner.breakdown.trace import PYTHON


RATIO_TOLERANCE = 0.3
"""Backward GEMM time above twice the forward's, as a share of the forward's, that still is no recompute."""


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """What of the compute is recompute."""

    again: NDArray[np.bool_]
    """Which of the asked rows; shape (rows,)."""

    ratio_ns: int
    """Without marks and shapes: GEMM time by the ratio, ns, beside the rows of ``again``."""

    basis: str
    """How it was found; empty when there is none."""

    region: Intervals
    """Without a device: from the first to the last recomputed operator inside each node of backward, and what leads
    up to the first. There the CPU does the recompute, so the time between the operators belongs to it as well."""


def find_recompute(links: Links, rows: NDArray[np.intp], start: int, end: int) -> Recompute:
    """Find recompute among compute events ``rows`` of the step ``[start, end)`` of one rank.

    1. By marks: operators that run forward (they carry an autograd sequence number and no forward thread) inside a
       node of the backward engine, the forward part of a reentrant checkpoint's node, frames of
       ``torch/utils/checkpoint.py``, annotations that say recompute. Everything these launch counts, GEMM or not.
       Where every forward operator has its number and no graph is compiled, the absence of marks means no recompute.
    2. Else by shapes: a forward product of M, N, K has two in backward with the same three lengths; more of them, and
       forward attention inside backward, are recompute. Fused kernels of a compiled backward are not told apart.
    3. Else by the ratio of GEMM times: backward above twice forward. Slower backward GEMMs within
       :data:`RATIO_TOLERANCE` count as none.

    A kernel whose launch the trace does not have belongs to backward when it runs between the first node of backward
    and the optimizer, and to recompute by marks when it runs while such a mark is open.
    """
    none = Recompute(again=np.zeros(len(rows), dtype=bool), ratio_ns=0, basis="", region=intervals.EMPTY)
    if not len(rows) or not links.backward:
        return none
    backward = _in_backward(links, rows, start, end)
    windows, anywhere = _marks(links)
    called = links.called_at[rows]
    at = np.where(called >= 0, called, links.trace.start[rows])
    again = links.called_inside(rows, windows)
    again |= backward & (called < 0) & intervals.contains(intervals.join(*windows.values()), at)
    again |= backward & intervals.contains(anywhere, at)
    if again.any():
        region = intervals.EMPTY if links.on_device else _region(links, rows, again)
        return Recompute(again=again, ratio_ns=0, basis="forward operators inside backward", region=region)
    if _tells_all(links):
        return none
    by_shape = _by_shapes(links, rows, backward)
    if by_shape is not None:
        return replace(none, again=by_shape, basis="shapes" if by_shape.any() else "")
    extra = _by_ratio(links, rows, backward)
    attention = backward & _forward_attention(links, rows)
    basis = "ratio of backward to forward GEMM time" if extra else ""
    return replace(none, again=attention, ratio_ns=extra, basis=basis or ("shapes" if attention.any() else ""))


def _region(links: Links, rows: NDArray[np.intp], again: NDArray[np.bool_]) -> Intervals:
    """Spans of recomputed operators by thread and outermost node of backward, from the end of the work before."""
    trace = links.trace
    spans = []
    repeated, others = rows[again], rows[~again]
    first_runs = grouped(trace.thread[others], others)
    for thread, mine in grouped(trace.thread[repeated], repeated).items():
        nodes = links.backward.get(thread, intervals.EMPTY)
        other = np.sort(trace.end[first_runs.get(thread, others[:0])])
        node = np.searchsorted(nodes[:, 0], trace.start[mine], side="right")
        for one, inside in grouped(node, mine).items():
            if not one:
                continue
            first = int(trace.start[inside].min())
            before = int(np.searchsorted(other, first, side="right")) - 1
            begin = max(int(nodes[one - 1, 0]), int(other[before]) if before >= 0 else 0)
            spans.append((min(begin, first), int(trace.end[inside].max())))
    array = np.array(spans, dtype=np.int64).reshape(-1, 2)
    return intervals.union(array[:, 0], array[:, 1])


def _in_backward(links: Links, rows: NDArray[np.intp], start: int, end: int) -> NDArray[np.bool_]:
    """Which rows were launched by backward; those without a launch by their own time."""
    trace = links.trace
    nodes = intervals.clip(intervals.join(*links.backward.values()), start, end)
    inside = links.called_inside(rows, links.backward)
    if not len(nodes):
        return inside
    marks = trace.named(trace.rows(ANNOTATION), names.is_optimizer)
    after = trace.start[marks]
    after = after[(after > nodes[0, 0]) & (after < end)]
    last = int(after.min()) if len(after) else end
    begun = trace.start[rows]
    return inside | ((links.called_at[rows] < 0) & (begun >= nodes[0, 0]) & (begun < last))


def _marks(links: Links) -> tuple[dict[int, Intervals], Intervals]:
    """Windows of recompute by thread, and windows whose thread is not known."""
    trace = links.trace
    operators = trace.rows(OPERATOR)
    forward = operators[(trace.sequence[operators] >= 0) & (trace.forward_thread[operators] == 0)]
    forward = trace.named(forward, lambda name: "::" in name and not names.is_comm_operator(name))
    forward = forward[links.called_inside(forward, links.backward)]
    nodes = trace.named(operators, lambda name: name == "CheckpointFunctionBackward")
    engine = trace.named(operators, names.is_backward)
    windows = links.windows(forward)
    engines = grouped(trace.thread[engine], engine)
    for thread, mine in grouped(trace.thread[nodes], nodes).items():
        inner = engines.get(thread, engine[:0])
        outer = intervals.union(trace.start[mine], trace.end[mine])
        inner = inner[intervals.contains(outer, trace.start[inner])]
        own = intervals.subtract(outer, intervals.union(trace.start[inner], trace.end[inner]))
        windows[thread] = intervals.join(windows.get(thread, intervals.EMPTY), own)
    marked = np.flatnonzero((trace.lane == PYTHON) | (trace.lane == ANNOTATION))
    marked = trace.named(marked, names.is_checkpoint)
    return windows, intervals.union(trace.start[marked], trace.end[marked])


def _tells_all(links: Links) -> bool:
    """Whether recompute, if there were any, would have left marks: eager operators with autograd's numbers."""
    trace = links.trace
    operators = trace.rows(OPERATOR)
    compiled = trace.named(operators, lambda name: "CompiledFunction" in name or name.startswith("Torch-Compiled"))
    if len(compiled):
        return False
    numbered = operators[(trace.sequence[operators] >= 0) & (trace.forward_thread[operators] == 0)]
    return len(trace.named(numbered, lambda name: name.startswith("aten::"))) > 0


def _by_shapes(links: Links, rows: NDArray[np.intp], backward: NDArray[np.bool_]) -> NDArray[np.bool_] | None:
    """Surplus products of backward; None when too few products have shapes to tell."""
    trace = links.trace
    products = find_products(links, rows)
    gemms = np.array([names.kernel_kind(trace.names[trace.name[row]]) == names.GEMM for row in rows.tolist()])
    if (links.on_device and len(products) < 0.5 * gemms.sum()) or not products:
        return None
    forward = Counter(tuple(sorted(product.shape)) for product in products if not backward[product.place])
    later = Counter(tuple(sorted(product.shape)) for product in products if backward[product.place])
    exact = {product.shape for product in products if not backward[product.place]}
    if not forward or not later:
        return None
    left = {key: min(max(later[key] - 2 * count, 0), count) for key, count in forward.items()}
    again = np.zeros(len(rows), dtype=bool)
    for product in products:
        key = tuple(sorted(product.shape))
        if backward[product.place] and left.get(key, 0) > 0 and product.shape in exact:
            left[key] -= 1
            again[product.place] = True
    return again | (_forward_attention(links, rows) & backward)


def _forward_attention(links: Links, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which rows are kernels of forward attention, which backward alone never runs."""
    trace = links.trace

    def forward(name: str) -> bool:
        lowered = name.lower()
        told = "fwd" in lowered or "forward" in lowered
        return (
            names.kernel_kind(name) == names.ATTENTION and told and "bwd" not in lowered and "backward" not in lowered
        )

    return np.isin(rows, trace.named(rows, forward))


def _by_ratio(links: Links, rows: NDArray[np.intp], backward: NDArray[np.bool_]) -> int:
    """Backward GEMM time above twice the forward's, ns; 0 within the tolerance."""
    trace = links.trace
    gemms = np.array([names.kernel_kind(trace.names[trace.name[row]]) == names.GEMM for row in rows.tolist()], bool)
    length = (trace.end - trace.start)[rows]
    first = int(length[gemms & ~backward].sum())
    extra = int(length[gemms & backward].sum()) - 2 * first
    return extra if first and extra > RATIO_TOLERANCE * first else 0
