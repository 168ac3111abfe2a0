"""Which ranks the others waited for."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from trial_runner.breakdown import intervals
from trial_runner.breakdown.align import Match
from trial_runner.breakdown.result import Straggler
from trial_runner.breakdown.steps import Step


LATE_SHARE = 1e-3
"""Lateness below this share of the analysed time names no straggler."""


def find_stragglers(steps: dict[int, list[Step]], matches: list[Match], analysed_s: float) -> list[Straggler]:
    """Ranks that came late to collectives, the latest first, over the analysed steps.

    Lateness is counted against the lower median of the ranks of a collective, so that one early rank makes nobody late.
    Waiting across pipeline stages names nobody.

    Args:
        steps: the analysed steps by rank.
        matches: collectives across the ranks.
        analysed_s: analysed time of one rank, seconds.
    """
    windows = {
        rank: intervals.union(
            np.array([one.start for one in mine], dtype=np.int64), np.array([one.end for one in mine], dtype=np.int64)
        )
        for rank, mine in steps.items()
    }
    late: dict[int, int] = defaultdict(int)
    times: dict[int, int] = defaultdict(int)
    for match in matches:
        inside = any(
            bool(intervals.contains(windows[rank], np.array([item.start]))[0]) for rank, item in match.items.items()
        )
        if not inside or match.across_stages or not next(iter(match.items.values())).primary:
            continue
        ready = sorted(match.ready.values())
        middle = ready[(len(ready) - 1) // 2]
        for rank, time in match.ready.items():
            late[rank] += max(0, time - middle)
            times[rank] += time == ready[-1] and time > middle
    found = [
        Straggler(rank=rank, late_s=value / 1e9, collectives=times[rank])
        for rank, value in late.items()
        if value / 1e9 > LATE_SHARE * analysed_s
    ]
    return sorted(found, key=lambda item: -item.late_s)
