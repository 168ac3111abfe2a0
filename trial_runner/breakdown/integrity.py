"""Whether a trace can be believed: lost kernels, broken events, unknown names."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from trial_runner.breakdown import names
from trial_runner.breakdown.links import Links
from trial_runner.breakdown.steps import Step
from trial_runner.breakdown.trace import KERNEL
from trial_runner.breakdown.trace import RUNTIME


LOST_SHARE = 0.02
"""Share of launches without a kernel above which the idle time of a step cannot be believed."""

AHEAD_SHARE = 0.1
"""Share of the step by which the CPU may run ahead of the device before that is said."""

COVERAGE_PCT = 95.0
"""Share of kernel time that must be recognised."""


@dataclass(frozen=True, kw_only=True)
class Integrity:
    """What a step's kernels and launches say about the trace."""

    launches: int
    """Launch calls."""

    lost: int
    """Launch calls without any device event."""

    kernels: int
    """Kernels that begin in the step."""

    coverage_pct: float
    """Share of kernel time that is recognised."""

    unknown: tuple[dict[str, Any], ...]
    """Unrecognised kernels, longest first."""

    time_by_kind_s: dict[str, float]
    """Device time by kind, seconds."""

    overhang_s: float
    """How long after the step's end the device still works on what the step launched, seconds."""

    sync_calls: int
    """Calls that blocked the CPU on the device for more than 10 µs."""

    sync_s: float
    """Time in them, seconds."""

    @property
    def reliable(self) -> bool:
        """Whether few enough launches lost their kernels."""
        return self.lost <= LOST_SHARE * self.launches or self.launches == 0


def check(links: Links, step: Step) -> Integrity:
    """Count the launches and kernels of a step and sum kernel time by kind."""
    trace = links.trace
    calls = trace.named(trace.rows(RUNTIME), names.is_launch)
    calls = calls[(trace.start[calls] >= step.start) & (trace.start[calls] < step.end)]
    lost = int(links.lost[calls].sum())
    kernels = trace.rows(KERNEL)
    kernels = kernels[(trace.start[kernels] < step.end) & (trace.end[kernels] > step.start)]
    length = np.minimum(trace.end[kernels], step.end) - np.maximum(trace.start[kernels], step.start)
    times: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    ids, where = np.unique(trace.name[kernels], return_inverse=True)
    sums = np.bincount(where, weights=length, minlength=len(ids))
    counts = np.bincount(where, minlength=len(ids))
    by_kind: dict[str, float] = defaultdict(float)
    for index, name_id in enumerate(ids.tolist()):
        name = trace.names[name_id]
        kind = names.kernel_kind(name)
        by_kind[kind or "unknown"] += float(sums[index]) / 1e9
        if kind is None:
            times[name][0] += int(counts[index])
            times[name][1] += int(sums[index])
    total = float(sums.sum())
    waits = trace.named(trace.rows(RUNTIME), lambda name: "ynchronize" in name)
    waits = waits[(trace.start[waits] >= step.start) & (trace.end[waits] <= step.end)]
    blocked = (trace.end - trace.start)[waits]
    mine = trace.rows(KERNEL)
    mine = mine[(links.called_at[mine] >= step.start) & (links.called_at[mine] < step.end)]
    overhang = max(0, int(trace.end[mine].max()) - step.end) if len(mine) else 0
    unknown = sum(value for _, value in times.values())
    return Integrity(
        launches=len(calls),
        lost=lost,
        kernels=int((trace.start[kernels] >= step.start).sum()),
        coverage_pct=100 * (1 - unknown / total) if total else 100.0,
        unknown=tuple(
            {"name": name, "count": count, "time_s": value / 1e9, "share_pct": 100 * value / total if total else 0.0}
            for name, (count, value) in sorted(times.items(), key=lambda item: -item[1][1])
        ),
        overhang_s=overhang / 1e9,
        sync_calls=int((blocked > 10_000).sum()),
        sync_s=float(blocked[blocked > 10_000].sum()) / 1e9,
        time_by_kind_s=dict(sorted(by_kind.items(), key=lambda item: -item[1])),
    )
