"""A live job against its claim: where its step time changed, and whether it holds now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from search_space.errors import UserError
from tuner.evidence.expected import Expectation
from tuner.evidence.run_log import Point


HOLD, REGRESSED, CANNOT_TELL = "hold", "regressed", "cannot tell"
"""Verdicts."""

EXIT = {HOLD: 0, REGRESSED: 4, CANNOT_TELL: 5}
"""Exit codes of ``tune watch``."""

FEWEST = 8
"""Logged steps below which nothing is said."""

SHORTEST = 5
"""Logged steps of the shortest stretch between two changes."""

PENALTY = 12.0
"""What a further change must gain over the noise's variance, times log n: false changes are rare, also where neighbours
are correlated."""

CLIP = 4.0
"""Deviations beyond so many noise deviations count as so many, so that single slow steps are no change."""

RESAMPLES = 1000
"""Bootstrap resamples of a stretch's median."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps between two changes."""

    first_step: int
    """Its first logged step."""

    last_step: int
    """Its last."""

    unix_s: float | None
    """When it began."""

    ratio: float
    """Median step time over the claim's; 1 is as claimed, above is slower."""

    interval: tuple[float, float]
    """95% interval of that median."""

    count: int
    """Logged steps in it."""

    spans: dict[str, float]
    """Median seconds of the named phases."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What a run shows against its claim."""

    verdict: str
    """One of :data:`HOLD`, :data:`REGRESSED`, :data:`CANNOT_TELL`."""

    why: str
    """In words."""

    stretches: tuple[Stretch, ...]
    """The run in stretches of equal speed."""

    fell: Stretch | None
    """The stretch with which it fell below its claim; None where it holds."""

    grew: tuple[tuple[str, float], ...]
    """Phases that grew with the fall and by how many seconds, most first, where the log has phases."""

    def to_json(self, claim: Expectation) -> dict[str, Any]:
        """The document of ``tune watch``."""
        return {
            "verdict": self.verdict,
            "exit_code": EXIT[self.verdict],
            "why": self.why,
            "claim": claim.to_json(),
            "fell": None if self.fell is None else asdict(self.fell),
            "grew": [{"phase": name, "more_s": more} for name, more in self.grew],
            "stretches": [asdict(stretch) for stretch in self.stretches],
        }


def watch(points: Sequence[Point], claim: Expectation, skip: int = 10) -> Watched:
    """Judge a run.

    The log of step time over claim is cut where its mean changes by more than noise; the last stretch decides. It has
    regressed when its whole interval is above the claim's tolerance. It holds when its median is inside the tolerance
    and its interval excludes a fall of twice that. Else nobody can tell.

    Args:
        points: logged steps in order; where the step number falls back the job was restarted.
        claim: what was promised.
        skip: steps after each start that are warm-up.

    Raises:
        UserError: the log and the claim have no unit in common.
    """
    kept = _settled(points, skip)
    ratios = _ratios(kept, claim)
    if len(kept) < FEWEST:
        why = f"{len(kept)} logged steps after {skip} of warm-up, {FEWEST} are needed"
        return Watched(verdict=CANNOT_TELL, why=why, stretches=(), fell=None, grew=())
    edges = [0, *changes(np.log(ratios)), len(kept)]
    stretches = tuple(_stretch(kept[a:b], ratios[a:b]) for a, b in pairwise(edges))
    limit = 1 + claim.tolerance
    now = stretches[-1]
    slow = (
        f"{100 * (now.ratio - 1):+.1f}% against the claim [{_pct(now.interval)}], {100 * claim.tolerance:.1f}% allowed"
    )
    if now.ratio <= limit and now.interval[1] <= 1 + 2 * claim.tolerance:
        return Watched(verdict=HOLD, why=f"step time {slow}", stretches=stretches, fell=None, grew=())
    if now.interval[0] <= limit:
        why = f"step time {slow}: too wide an interval; more steps would tell"
        return Watched(verdict=CANNOT_TELL, why=why, stretches=stretches, fell=None, grew=())
    at = len(stretches) - 1
    while at > 0 and stretches[at - 1].ratio > limit:
        at -= 1
    fell = stretches[at]
    since = "from the first step on" if at == 0 else f"since step {fell.first_step}"
    grew = _grew(stretches[at - 1], now) if at else ()
    return Watched(verdict=REGRESSED, why=f"step time {slow}, {since}", stretches=stretches, fell=fell, grew=grew)


def _pct(interval: tuple[float, float]) -> str:
    return ", ".join(f"{100 * (end - 1):+.1f}" for end in interval)


def _settled(points: Sequence[Point], skip: int) -> list[Point]:
    """Points after warm-up: ``skip`` steps after the first and after every restart."""
    kept: list[Point] = []
    begin, last = None, None
    for point in points:
        if begin is None or (last is not None and point.step <= last):
            begin = point.step
        last = point.step
        if point.step >= begin + skip:
            kept.append(point)
    return kept


def _ratios(points: Sequence[Point], claim: Expectation) -> np.ndarray:
    """Step time over the claim's, from step times where both have them, else from throughput; shape (n,)."""
    if claim.step_time_s and all(point.step_time_s for point in points):
        return np.array([(point.step_time_s or 0.0) / claim.step_time_s for point in points])
    if claim.tokens_per_s_per_device and all(point.rate for point in points):
        return np.array([claim.tokens_per_s_per_device / (point.rate or 1.0) for point in points])
    has = "step times" if points and points[0].step_time_s else "tokens a second"
    states = "a step time" if claim.step_time_s else "tokens a second"
    raise UserError(f"watch: the log has {has}, the claim states {states} only; they cannot be compared")


def changes(values: np.ndarray) -> list[int]:
    """Positions at which the level of a noisy series changes, ascending.

    Exact segmentation with a squared cost and a penalty on each change (optimal partitioning, Jackson et al. 2005) of
    values whose noise is the median absolute difference of neighbours; outliers count as :data:`CLIP` deviations.

    Args:
        values: shape (n,).
    """
    n = len(values)
    if n < 2 * SHORTEST:
        return []
    step = max(1, n // 2000)
    if step > 1:
        short = np.array([np.median(values[i : i + step]) for i in range(0, n - step + 1, step)])
        return [position * step for position in changes(short)]
    noise = float(np.median(np.abs(np.diff(values)))) / (0.6745 * np.sqrt(2))
    noise = max(noise, 1e-4)
    window = 2 * SHORTEST + 1
    padded = np.pad(values, window // 2, mode="edge")
    level = np.median(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)
    clean = np.clip(values, level - CLIP * noise, level + CLIP * noise) / noise
    sums = np.concatenate([[0.0], np.cumsum(clean)])
    squares = np.concatenate([[0.0], np.cumsum(clean**2)])
    penalty = PENALTY * np.log(n)
    best = np.full(n + 1, np.inf)
    best[0] = -penalty
    cut = np.zeros(n + 1, dtype=int)
    for end in range(SHORTEST, n + 1):
        begin = np.arange(0, end - SHORTEST + 1)
        begin = begin[(begin == 0) | (begin >= SHORTEST)]
        size = end - begin
        cost = squares[end] - squares[begin] - (sums[end] - sums[begin]) ** 2 / size
        total = best[begin] + cost + penalty
        chosen = int(np.argmin(total))
        best[end], cut[end] = total[chosen], begin[chosen]
    found, end = [], n
    while end > 0:
        end = int(cut[end])
        if end:
            found.append(end)
    return found[::-1]


def _stretch(points: Sequence[Point], ratios: np.ndarray) -> Stretch:
    """Median and its interval by a block bootstrap, blocks of √n neighbours."""
    rng = np.random.default_rng(0)
    n = len(ratios)
    block = max(1, int(np.sqrt(n)))
    starts = rng.integers(0, n, (RESAMPLES, -(-n // block)))
    index = (starts[:, :, None] + np.arange(block)).reshape(RESAMPLES, -1)[:, :n] % n
    low, high = np.quantile(np.median(ratios[index], axis=1), [0.025, 0.975])
    names = sorted({name for point in points for name in point.spans})
    spans = {name: float(np.median([point.spans.get(name, 0.0) for point in points])) for name in names}
    return Stretch(
        first_step=points[0].step,
        last_step=points[-1].step,
        unix_s=points[0].unix_s,
        ratio=float(np.median(ratios)),
        interval=(float(low), float(high)),
        count=n,
        spans=spans,
    )


def _grew(before: Stretch, now: Stretch) -> tuple[tuple[str, float], ...]:
    more = {name: now.spans[name] - before.spans.get(name, 0.0) for name in now.spans}
    ranked = sorted(more.items(), key=lambda pair: -pair[1])
    return tuple((name, seconds) for name, seconds in ranked if seconds > 0)
