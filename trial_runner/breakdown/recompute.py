"""Which compute of a step is the forward running again inside backward."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trial_runner.breakdown import intervals
from trial_runner.breakdown import names
from trial_runner.breakdown.gemm import find_products
from trial_runner.breakdown.intervals import Intervals
from trial_runner.breakdown.links import Links
from trial_runner.breakdown.trace import ANNOTATION
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
    """Without marks and shapes: time by the ratio of GEMM times, ns (then ``again`` is empty)."""

    basis: str
    """How it was found; empty when there is none."""


def find_recompute(links: Links, rows: NDArray[np.intp]) -> Recompute:
    """Find recompute among compute events ``rows`` (one step of one rank).

    1. By marks: operators that run forward (they carry an autograd sequence number and no forward thread) inside a
       node of the backward engine, the forward part of a reentrant checkpoint's node, frames of
       ``torch/utils/checkpoint.py``, annotations that say recompute. Everything these launch counts, GEMM or not.
       Where every forward operator has its number and no graph is compiled, the absence of marks means no recompute.
    2. Else by shapes: a forward product of M, N, K has two in backward with the same three lengths; more of them, and
       forward attention inside backward, are recompute. Fused kernels of a compiled backward are not told apart.
    3. Else by the ratio of GEMM times: backward above twice forward. Slower backward GEMMs within
       :data:`RATIO_TOLERANCE` count as none.
    """
    none = Recompute(again=np.zeros(len(rows), dtype=bool), ratio_ns=0, basis="")
    if not len(rows) or not links.backward:
        return none
    backward = links.called_inside(rows, links.backward)
    windows, anywhere = _marks(links)
    again = links.called_inside(rows, windows)
    if len(anywhere):
        again |= backward & intervals.contains(anywhere, links.called_at[rows])
    if again.any():
        return Recompute(again=again, ratio_ns=0, basis="forward operators inside backward")
    if _tells_all(links):
        return none
    by_shape = _by_shapes(links, rows, backward)
    if by_shape is not None:
        return Recompute(again=by_shape, ratio_ns=0, basis="shapes" if by_shape.any() else "")
    return _by_ratio(links, rows, backward)


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
    for thread in np.unique(trace.thread[nodes]).tolist():
        mine, inner = nodes[trace.thread[nodes] == thread], engine[trace.thread[engine] == thread]
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
    attention = np.array([_is_forward_attention(trace.names[trace.name[row]]) for row in rows.tolist()], dtype=bool)
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
    return again | (attention & backward)


def _is_forward_attention(name: str) -> bool:
    lowered = name.lower()
    return names.kernel_kind(name) == names.ATTENTION and "fwd" in lowered and "bwd" not in lowered


def _by_ratio(links: Links, rows: NDArray[np.intp], backward: NDArray[np.bool_]) -> Recompute:
    trace = links.trace
    gemms = np.array([names.kernel_kind(trace.names[trace.name[row]]) == names.GEMM for row in rows.tolist()], bool)
    length = (trace.end - trace.start)[rows]
    first = int(length[gemms & ~backward].sum())
    extra = int(length[gemms & backward].sum()) - 2 * first
    none = np.zeros(len(rows), dtype=bool)
    if not first or extra <= RATIO_TOLERANCE * first:
        return Recompute(again=none, ratio_ns=0, basis="")
    return Recompute(again=none, ratio_ns=extra, basis="ratio of backward to forward GEMM time")
