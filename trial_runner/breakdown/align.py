"""Collectives of several ranks side by side: one clock, who came last, and who only waited."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from trial_runner.breakdown import intervals
from trial_runner.breakdown.communication import Communication
from trial_runner.breakdown.communication import stage_peers
from trial_runner.breakdown.trace import Trace


CLOCK_TOLERANCE_NS = 20_000
"""Offsets between two ranks' clocks below this are no offsets."""

APART_NS = 1_000_000
"""A rank may seem to finish this much before the last has come, ns; beyond it they are different collectives."""

FAR_LONGER = 2.0
"""A communication that lasts longer than this many times the fastest of its class has waited."""

FLOOR_BYTES_PER_S = 1e9
"""Slowest link that a communication of known size and without others of its class is credited."""

FLOOR_LATENCY_NS = 1_000_000
"""Latency that such a communication is credited."""

SLOWEST_BYTES_PER_S = 1e8
"""No link that trains is slower (1 Gbit/s); even the fastest of a class is credited no less than this rate."""

LATENCY_PER_RANK_NS = 200_000
"""Latency that each rank of a group may add to a collective over a slow network."""

UNKNOWN_SIZE_NS = 50_000_000
"""Longest transfer credited to a communication of unknown size: 2.5 GB at 50 GB/s."""


MEETING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""Kinds in which no rank can finish before the last has come."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """One collective on the ranks whose traces are given."""

    items: dict[int, Communication]
    """The rank's view of it, by rank."""

    ready: dict[int, int]
    """When each rank was ready, ns on the common clock."""

    complete: bool
    """Whether all ranks of the group are there."""

    across_stages: bool
    """Whether ranks wait in it for another pipeline stage."""


def align(by_rank: dict[int, Trace], found: dict[int, list[Communication]]) -> tuple[list[Match], list[str]]:
    """Match collectives across ranks and set each one's last arrival and the start of its transfer.

    The k-th communication of a class (kind, size, group) is the same one on every rank of the group. Collectives end
    together, so the median difference of their ends is the offset of the clocks, where it is larger than its scatter.
    With the last arrival known on all ranks, the time before it is waiting and the rest is transfer, exactly. With an
    unknown arrival, or with peers missing, what lasts far longer than the fastest of its class has waited. Where ranks
    also talk point to point, waiting for a rank of another stage is the pipeline's.

    Args:
        by_rank: the traces by rank.
        found: communications by rank.
    """
    warnings: list[str] = []
    groups = _match(by_rank, found, warnings) if len(by_rank) > 1 else []
    offsets = _offsets(by_rank, groups)
    matches = []
    piped = any(item.kind == "p2p" for items in found.values() for item in items)
    peers = {rank: stage_peers(trace) for rank, trace in by_rank.items()}
    apart, pairings = 0, sum(1 for items, _ in groups if next(iter(items.values())).primary)
    for items, complete in groups:
        ready = {rank: _common(by_rank[rank], offsets[rank], item.start) for rank, item in items.items()}
        done = min(_common(by_rank[rank], offsets[rank], item.end) for rank, item in items.items())
        last = max(ready.values())
        if last > done + APART_NS:
            apart += next(iter(items.values())).primary
            continue
        latest = max(ready, key=lambda rank: ready[rank])
        across = False
        for rank, item in items.items():
            item.other_stage = piped and rank != latest and _other_stage(peers[rank], latest, item)
            across |= item.other_stage
            arrival = last - by_rank[rank].origin_ns + offsets[rank]
            item.arrival = min(max(arrival, item.start), item.end)
            item.complete = complete
        matches.append(Match(items=items, ready=ready, complete=complete, across_stages=across))
    if apart:
        warnings.append(
            f"{apart} of {pairings} pairings of collectives across ranks do not meet in time (events are missing in "
            "a trace, or groups have no names); they were not matched"
        )
    for mine in found.values():
        _mark_covers(mine)
    world = max((trace.world_size or 1 for trace in by_rank.values()), default=1)
    _set_transfers([item for items in found.values() for item in items], world)
    shifted = [f"rank {rank}: {offset / 1e3:+.1f} µs" for rank, offset in offsets.items() if offset]
    if shifted:
        warnings.append(f"clocks of the ranks differ and were aligned at the ends of collectives: {', '.join(shifted)}")
    return matches, warnings


def _other_stage(peers: set[int] | None, latest: int, item: Communication) -> bool:
    """Whether the rank that came last is on another stage: by the listed groups, else by what the collective serves."""
    if peers is None:
        return item.dimension in ("", "PP")
    return latest not in peers


def _common(trace: Trace, offset: int, time: int) -> int:
    return trace.origin_ns + time - offset


def _match(
    by_rank: dict[int, Trace], found: dict[int, list[Communication]], warnings: list[str]
) -> list[tuple[dict[int, Communication], bool]]:
    classes: dict[object, dict[int, list[Communication]]] = defaultdict(lambda: defaultdict(list))
    for rank, items in found.items():
        for item in items:
            if item.kind in MEETING:
                classes[(*item.key, item.primary)][rank].append(item)
    world = max((trace.world_size or 0 for trace in by_rank.values()), default=0)
    groups: list[tuple[dict[int, Communication], bool]] = []
    unmatched = 0
    for by in classes.values():
        first = next(iter(by.values()))[0]
        expected = set(first.members) & set(by_rank) if first.members else set(by_rank)
        size = first.group_size or world or len(by_rank)
        if len(by) < 2 and expected <= set(by):
            continue
        ambiguous = len(by) > size and not first.members
        if len(by) < 2 or ambiguous or len({len(items) for items in by.values()}) > 1:
            unmatched += sum(map(len, by.values())) if first.primary else 0
            continue
        for together in zip(*by.values()):
            groups.append((dict(zip(by, together)), len(by) >= size))
    if unmatched:
        warnings.append(
            f"{unmatched} collectives were not matched across the ranks (they occur in different numbers, or in groups "
            "that cannot be told apart); their waiting is judged on each rank alone"
        )
    return groups


def _offsets(by_rank: dict[int, Trace], groups: list[tuple[dict[int, Communication], bool]]) -> dict[int, int]:
    """Nanoseconds by which each rank's clock is ahead of the first rank's."""
    reference = min(by_rank)
    offsets = {rank: 0 for rank in by_rank}
    origin = by_rank[reference].origin_ns
    for rank, trace in by_rank.items():
        ends = [
            (trace.origin_ns - origin) + items[rank].end - items[reference].end
            for items, _ in groups
            if rank in items and reference in items
        ]
        if rank != reference and ends:
            differences = np.array(ends, dtype=np.int64)
            median = int(np.median(differences))
            scatter = float(np.median(np.abs(differences - median)))
            if abs(median) > max(CLOCK_TOLERANCE_NS, 3 * scatter):
                offsets[rank] = median
    return offsets


def _mark_covers(items: list[Communication]) -> None:
    """Blocking calls around operations that are listed themselves: the operations tell waiting from transfer."""
    inner = [item for item in items if item.primary]
    if not inner:
        return
    bounds = np.array([(item.start, item.end) for item in inner], dtype=np.int64)
    cover = intervals.Cover(intervals.union(bounds[:, 0], bounds[:, 1]))
    for item in items:
        if not item.primary:
            item.covers = cover(np.array([[item.start, item.end]], dtype=np.int64)) > 0


def _set_transfers(items: list[Communication], world: int) -> None:
    """Where in each communication the transfer begins."""
    fastest: dict[object, list[int]] = defaultdict(list)
    for item in items:
        if item.size_bytes is not None:
            fastest[item.key].append(item.end - (item.start if item.arrival is None else item.arrival))
    for item in items:
        begin = item.start if item.arrival is None else item.arrival
        lasted = item.end - begin
        if item.complete or item.covers or item.kind == "p2p":
            item.transfer_start = begin
            continue
        if item.size_bytes is None:
            credit = UNKNOWN_SIZE_NS
        elif len(fastest[item.key]) > 1:
            least = min(fastest[item.key])
            credit = lasted if lasted <= FAR_LONGER * least + 50_000 else least
            slowest = int(item.size_bytes / SLOWEST_BYTES_PER_S * 1e9)
            credit = min(credit, FLOOR_LATENCY_NS + (item.group_size or world) * LATENCY_PER_RANK_NS + slowest)
        else:
            credit = FLOOR_LATENCY_NS + int(item.size_bytes / FLOOR_BYTES_PER_S * 1e9)
        item.transfer_start = max(begin, item.end - credit)
