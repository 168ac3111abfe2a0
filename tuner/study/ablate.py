"""Ablation: undo the winner's changes one at a time; what buys nothing goes back to the baseline's value."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

from search_space.candidate import Candidate
from search_space.pool import canonical
from tuner.evidence.compare import NOISE_MFU_POINTS
from tuner.evidence.parity import LAYOUT
from tuner.records import roles
from tuner.study.choosing import fastest_simple
from tuner.study.confirm import seed_weights
from tuner.study.judging import Judge
from tuner.study.loop import Loop
from tuner.study.state import StudyState


TOGETHER = (
    LAYOUT,
    ("activation_checkpoint", "memory_budget", "first_n"),
    ("compile", "async_tp"),
)
"""Knobs that only mean something together: they are undone together."""

MOST_RUNS = 3
"""Runs of a candidate with one change undone, while its difference is undecided."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one change from the baseline bought."""

    knobs: dict[str, list[Any]]
    """Name of each knob to its value in the baseline and in the best."""

    step_time_change_pct: float | None
    """Step time with the change against without it, percent; negative is what it bought. None: cannot be told."""

    interval_pct: tuple[float, float] | None
    """95% interval of the same; None unless measured."""

    source: str
    """``measured``, ``predicted`` (by the ledger), or ``not_alone`` (without it the rest is not legal)."""

    kept: bool
    """Whether the winner keeps it."""

    sure: bool = True
    """Whether the interval decides; a change that looks worth it stays when the budget ends before it does."""

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)


def ablate(loop: Loop) -> None:
    """Undo the best candidate's changes one group of knobs at a time and write what each bought to the journal.

    Backward elimination: the change that the ledger expects least of is tried first; a change whose absence does not
    slow the confirmed best beyond noise is left out from then on; where the budget ends before that is decided, a
    change that looks worth a point of MFU stays. Every comparison is with the confirmed best, so that small losses do
    not add up unseen. What the budget does not cover is predicted, and stays.
    """
    state = loop.state
    judge = Judge(state)
    best = fastest_simple(state, judge)
    baseline = state.plan.baseline
    if best is None or best == baseline or not judge.times(best):
        return
    weights = seed_weights(state, [best, baseline])
    kept, rows = best, []
    for group in sorted(changed_groups(best, baseline), key=lambda group: _predicted_pct(state, best, group)):
        row, kept = _undo(loop, judge, best, kept, group, weights)
        rows.append(row)
        if state.stop_asked:
            return
    state.emit(
        "ablation",
        best=best.to_json(),
        winner=kept.to_json(),
        changes=[row.to_json() for row in rows],
    )


def changed_groups(candidate: Candidate, baseline: Candidate) -> list[tuple[str, ...]]:
    """The knobs that differ, in groups that are undone together."""
    left = list(candidate.changed(baseline))
    groups = []
    for together in TOGETHER:
        found = tuple(knob for knob in left if knob in together)
        if found:
            groups.append(found)
            left = [knob for knob in left if knob not in found]
    return groups + [(knob,) for knob in left]


def without(candidate: Candidate, baseline: Candidate, group: tuple[str, ...]) -> Candidate:
    """The candidate with a group of knobs at the baseline's values."""
    return canonical(replace(candidate, **{knob: getattr(baseline, knob) for knob in group}))


def _undo(
    loop: Loop, judge: Judge, best: Candidate, kept: Candidate, group: tuple[str, ...], weights: str | None
) -> tuple[Change, Candidate]:
    """What a group of changes bought, and the candidate that goes on."""
    state = loop.state
    baseline = state.plan.baseline
    tried = without(kept, baseline, group)
    knobs = {knob: [getattr(baseline, knob), getattr(best, knob)] for knob in group}
    position = state.plan.pool.position(tried)
    if position is None or not state.knowledge.assessment.feasible[position]:
        change = Change(knobs=knobs, step_time_change_pct=None, interval_pct=None, source="not_alone", kept=True)
        return change, kept
    while tried != baseline and len(judge.times(tried)) < MOST_RUNS:
        if judge.times(tried) and judge.compare(best, tried).decided:
            break
        record = loop.run_one(tried, roles.ABLATE, weights)
        if record is None or record["state"] != "measured":
            break
    if not judge.times(tried):
        predicted = _predicted_pct(state, kept, group)
        return Change(
            knobs=knobs, step_time_change_pct=-predicted, interval_pct=None, source="predicted", kept=True
        ), kept
    found = judge.compare(best, tried)
    # An interval that reaches zero is noise only once enough runs were spent on it.
    promising = found.mfu_points >= NOISE_MFU_POINTS and len(judge.times(tried)) < MOST_RUNS and tried != baseline
    stays = found.significant or promising
    change = Change(
        knobs=knobs,
        step_time_change_pct=found.step_time_change_pct,
        interval_pct=found.step_time_change_ci_pct,
        source="measured",
        kept=stays,
        sure=not promising or found.significant,
    )
    return change, kept if stays else tried


def _predicted_pct(state: StudyState, candidate: Candidate, group: tuple[str, ...]) -> float:
    """What the ledger expects a group of changes to buy: step time saved against the one without, percent."""
    pool, times = state.plan.pool, state.knowledge.assessment.prices.step_time_s
    here, there = pool.position(candidate), pool.position(without(candidate, state.plan.baseline, group))
    if here is None or there is None:
        return 0.0
    return float(100 * (1 - times[here] / times[there]))
