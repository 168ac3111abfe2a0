"""The table of a step's communication: by class, with bytes, exposure and achieved bandwidth."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from trial_runner.breakdown import intervals
from trial_runner.breakdown.attribute import Owned
from trial_runner.breakdown.communication import Communication
from trial_runner.breakdown.intervals import Intervals
from trial_runner.breakdown.result import Collective
from trial_runner.breakdown.steps import Step
from trial_runner.breakdown.trace import Trace


def collective_table(
    step: Step, owned: Owned, communication: list[Communication], trace: Trace, top: int = 20
) -> tuple[tuple[Collective, ...], dict[str, float]]:
    """Communication of a step by class, most exposed first, and exposed communication by parallelism, seconds.

    Where two communications run alone at the same time the table counts the time in both; by parallelism it is counted
    once, for the first in the order of names, so that the sum is the exposed part.
    """
    here = [item for item in communication if item.end > step.start and item.start < step.end]
    by_class: dict[object, list[Communication]] = defaultdict(list)
    for item in here:
        by_class[(*item.key, item.dimension, item.primary)].append(item)
    waiting = intervals.join(owned.straggler, owned.unexplained)
    alone = intervals.Cover(intervals.join(owned.exposed, owned.bubble, waiting))
    waits = intervals.Cover(waiting)
    rows = []
    for items in by_class.values():
        span = _span(items, step)
        total = sum(min(item.end, step.end) - max(item.start, step.start) for item in items)
        shortest = min(item.end - item.transfer_start for item in items)
        size = items[0].size_bytes
        rows.append(
            Collective(
                kind=items[0].kind,
                dimension=items[0].dimension,
                name=trace.names[trace.name[items[0].row]][:200],
                count=len(items),
                size_bytes=size,
                total_s=total / 1e9,
                exposed_s=alone(span) / 1e9,
                waiting_s=waits(span) / 1e9,
                bandwidth_gb_s=size / shortest if size and shortest > 0 else None,
            )
        )
    rows.sort(key=lambda row: -row.exposed_s)
    return tuple(rows[:top]), _by_dimension(step, owned, here)


def _span(items: list[Communication], step: Step) -> Intervals:
    bounds = np.array([(item.start, item.end) for item in items], dtype=np.int64)
    return intervals.clip(intervals.union(bounds[:, 0], bounds[:, 1]), step.start, step.end)


def _by_dimension(step: Step, owned: Owned, here: list[Communication]) -> dict[str, float]:
    groups: dict[str, list[Communication]] = defaultdict(list)
    for item in here:
        groups[item.dimension or "unknown"].append(item)
    shares: dict[str, float] = {}
    left = owned.exposed
    order = sorted(groups, key=lambda name: (name == "unknown", name))
    for dimension in order:
        mine = [item for item in groups[dimension] if item.kind != "p2p"]
        if not mine:
            continue
        part = intervals.intersect(left, _span(mine, step))
        left = intervals.subtract(left, part)
        if len(part):
            shares[dimension] = intervals.total(part) / 1e9
    return shares
