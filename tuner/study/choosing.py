"""Choosing the winner: surely faster than the baseline, the simplest of those that cannot be told apart, sound."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from typing import Any

from search_space.candidate import Candidate
from tuner.evidence.compare import Comparison
from tuner.evidence.compare import NOISE_MFU_POINTS
from tuner.evidence.compare import unchanged
from tuner.evidence.parity import Parity
from tuner.records.journal import read_journal
from tuner.study.confirm import finalists
from tuner.study.judging import Judge
from tuner.study.state import StudyState


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The winner and what it rests on."""

    winner: dict[str, Any]
    """Record of one of its trials."""

    comparison: Comparison
    """Winner against baseline; of a kept baseline, the best rival against it."""

    parity: Parity
    """Whether the loss curves agree; of a kept baseline, of the rival that was refused for it."""

    changes: tuple[dict[str, Any], ...] = field(default=())
    """What each change from the baseline bought."""

    why: str = ""
    """Why this one, in words."""


def fastest_simple(state: StudyState, judge: Judge) -> Candidate | None:
    """The finalist that wins on step time.

    A finalist counts when its gain over the baseline is significant and its loss does not speak against it. Of those
    within one MFU point of the fastest, the one with the fewest changes from the baseline wins. None: no baseline.
    """
    found = finalists(state)
    if not found:
        return None
    baseline, rivals = found[0], [candidate for candidate in found[1:] if judge.times(candidate)]
    able = [one for one in _faster(judge, rivals, baseline) if judge.parity(one).may_win]
    if not able:
        return baseline
    top = min(able, key=judge.level_s)
    equal = [one for one in able if one == top or judge.compare(top, one).mfu_points < NOISE_MFU_POINTS]
    return min(equal, key=lambda candidate: (len(candidate.changed(baseline)), judge.level_s(candidate)))


def _faster(judge: Judge, rivals: list[Candidate], baseline: Candidate) -> list[Candidate]:
    """Those whose gain over the baseline is significant."""
    return [candidate for candidate in rivals if judge.compare(candidate, baseline).significant]


def choose(state: StudyState) -> Choice | None:
    """The study's winner; None when there is no measured baseline."""
    judge = Judge(state)
    picked = fastest_simple(state, judge)
    record = state.baseline
    if picked is None or record is None:
        return None
    baseline = Candidate.from_json(record["candidate"])
    changes: tuple[dict[str, Any], ...] = ()
    if picked == baseline:
        rivals = [candidate for candidate in finalists(state)[1:] if judge.times(candidate)]
        if not rivals:
            comparison, why = unchanged(judge.noise), "nothing measured was faster than the baseline"
            return Choice(winner=record, comparison=comparison, parity=judge.parity(baseline), why=why)
        refused = _faster(judge, rivals, baseline)
        rival = min(refused or rivals, key=judge.level_s)
        comparison, parity = judge.compare(rival, baseline), judge.parity(rival)
        why = f"the gain of {rival.label()} is within noise, so the baseline stays"
        if refused:
            why = f"{rival.label()} is faster, but {_against(parity)}; the baseline stays"
        return Choice(winner=record, comparison=comparison, parity=parity, why=why)
    why = "fastest measured, significant"
    ablated = _ablation(state, picked)
    if ablated is not None:
        simplified = Candidate.from_json(ablated["winner"])
        changes = tuple(ablated["changes"])
        if simplified != picked and _faster(judge, [simplified], baseline) and judge.parity(simplified).may_win:
            dropped = len(picked.changed(baseline)) - len(simplified.changed(baseline))
            picked, why = simplified, f"fastest measured, significant; {dropped} change(s) that bought nothing left out"
        elif simplified != picked:
            changes = tuple(change | {"kept": True} for change in changes)
    return Choice(
        winner=judge.records(picked)[-1],
        comparison=judge.compare(picked, baseline),
        parity=judge.parity(picked),
        changes=changes,
        why=why,
    )


def _against(parity: Parity) -> str:
    """Why a loss curve keeps a candidate from winning."""
    if parity.verdict == "differ":
        return f"its loss does not agree with the baseline's: {parity.why}"
    return f"it changes numbers ({', '.join(parity.numeric_changes)}) and was not compared: {parity.why}"


def _ablation(state: StudyState, best: Candidate) -> dict[str, Any] | None:
    """The last ablation in the journal, if it began from this candidate."""
    found = [event for event in read_journal(state.folder.journal) if event["event"] == "ablation"]
    if not found or Candidate.from_json(found[-1]["best"]) != best:
        return None
    return found[-1]
