"""Which CPU operators compute, on a machine where the CPU is the device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trial_runner.breakdown import names
from trial_runner.breakdown.trace import grouped
from trial_runner.breakdown.trace import OPERATOR
from trial_runner.breakdown.trace import Trace


HELPERS = frozenset(
    f"aten::{name}" for name in "fill_ zero_ zeros copy_ clone _to_copy contiguous zeros_like ones new_zeros".split()
)
"""Operators that a computing operator may call beside its own work."""

OWN_WORK_NS = 50_000
"""Time outside its children from which an operator computes itself, ns."""


def cpu_work(trace: Trace) -> NDArray[np.intp]:
    """Operators that compute, as kernels do on a device; the rest of the CPU's time is the cost of launching them.

    These are the operators that call no other (views and allocations do not count), and those that call only helpers
    which fill less than half of them, such as the attention backward that clears its outputs first.
    """
    rows = trace.named(trace.rows(OPERATOR), lambda name: names.is_cpu_work(name) or names.is_comm_operator(name))
    keep = []
    for mine in grouped(trace.thread[rows], rows).values():
        last = np.append(trace.start[mine][1:] >= trace.end[mine][:-1], True)
        leaves = mine[last]
        keep += [leaves, _own_work(trace, mine[~last], leaves)]
    found = np.sort(np.concatenate(keep)) if keep else rows
    return trace.named(found, names.is_cpu_work)


def _own_work(trace: Trace, parents: NDArray[np.intp], leaves: NDArray[np.intp]) -> NDArray[np.intp]:
    """Those of ``parents`` that compute themselves."""
    starts, ends = trace.start[parents], trace.end[parents]
    others = trace.start[trace.named(leaves, lambda name: name not in HELPERS)]
    filled = np.append(0, np.cumsum((trace.end - trace.start)[leaves]))
    low, high = np.searchsorted(trace.start[leaves], starts), np.searchsorted(trace.start[leaves], ends)
    children = filled[high] - filled[low]
    alone = np.searchsorted(others, starts) == np.searchsorted(others, ends)
    rest = ends - starts - children
    return parents[alone & (rest >= OWN_WORK_NS) & (rest > children)]
