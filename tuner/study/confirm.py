"""Confirming the best candidate against the baseline, in turns, inside the budget's confirmation share."""

from __future__ import annotations

import shutil
import uuid

from search_space.candidate import Candidate
from tuner.evidence.parity import same_start
from tuner.evidence.sanity import unsound
from tuner.records import roles
from tuner.study.judging import Judge
from tuner.study.loop import Loop
from tuner.study.state import StudyState


MOST_RUNS = 5
"""Runs of each side after which an undecided difference is called noise."""

TIGHT_PCT = 1.0
"""Half-width of the difference's interval at which it is tight enough, percent of the step time."""

MOST_FAILURES = 2
"""Failed runs after which confirmation is given up: what there is must do."""

WEIGHTS_ROOM = 1.5
"""Room on disk that seed weights must find, as a multiple of their size."""


def confirm(loop: Loop) -> None:
    """Measure baseline and best in turns until their difference is decided, tight, or the budget is at its end.

    The order is A B A, then B A for every further round; a rival whose interval reaches into the best's is measured in
    the first. Where the layouts differ, all begin with the same weights, so that their losses compare. A job with
    ``confirm_share = 0`` wants no confirmation.
    """
    state = loop.state
    found = finalists(state)
    if not state.plan.job.budget.confirm_share or len(found) < 2:
        return
    baseline, best = found[0], found[1]
    weights = seed_weights(state, found)
    judge = Judge(state)
    failed = 0
    while not _enough(state, judge, best, baseline):
        first = not _runs(state, baseline)
        turn = [baseline, *found[1:], baseline] if first else [*found[1:2], baseline]
        for candidate in turn:
            if first and candidate != baseline and _runs(state, candidate):
                continue
            record = loop.run_one(candidate, roles.CONFIRM, weights)
            failed += record is not None and record["state"] != "measured"
            if record is None or failed == MOST_FAILURES:
                return


def finalists(state: StudyState) -> list[Candidate]:
    """The baseline, the best of the search, and the runner-up whose interval reaches into the best's; the baseline
    alone when nothing measured is faster."""
    best, baseline = state.best, state.baseline
    if best is None or baseline is None:
        return []
    if best is baseline:
        return [Candidate.from_json(baseline["candidate"])]
    searched = [trial for trial in state.measured if trial["role"] == roles.SEARCH and trial is not best]
    others = [trial for trial in searched if not unsound(trial, baseline)]
    second = min(others, key=lambda trial: trial["step_time_s"], default=None)
    found = [baseline, best]
    if second is not None and second["step_time_ci_s"][0] <= best["step_time_ci_s"][1]:
        found.append(second)
    return list(dict.fromkeys(Candidate.from_json(trial["candidate"]) for trial in found))


def seed_weights(state: StudyState, candidates: list[Candidate]) -> str | None:
    """Folder of the weights that all of these begin with; None where their layouts begin alike, or the disk is full."""
    if all(same_start(candidate, candidates[0]) for candidate in candidates):
        return None
    need = WEIGHTS_ROOM * 4 * state.plan.base.num_params
    free = shutil.disk_usage(state.folder.root).free
    if free < need:
        text = (
            f"no room for seed weights in {state.folder.root} ({free / 2**30:.0f} GiB free, {need / 2**30:.0f} GiB "
            "needed): losses of different layouts are not compared"
        )
        state.emit("warning", text=text)
        return None
    root = state.folder.seed_weights
    # Sets that a run has saved whole; a name of its own for every set, as curves compare only within one.
    whole = sorted(path for path in root.glob("*") if (path / ".metadata").exists())
    root.mkdir(exist_ok=True)
    return str(whole[-1] if whole else root / f"{len(list(root.iterdir())):03d}-{uuid.uuid4().hex[:8]}")


def remove_weights(state: StudyState) -> None:
    """Remove the seed weights of a study that is over: of a large model they fill a disk."""
    shutil.rmtree(state.folder.seed_weights, ignore_errors=True)


def _enough(state: StudyState, judge: Judge, best: Candidate, baseline: Candidate) -> bool:
    mine, theirs = _runs(state, best), _runs(state, baseline)
    if not mine or theirs < 2:
        return False
    found = judge.compare(best, baseline)
    low, high = found.step_time_change_ci_pct
    return found.decided or (high - low) / 2 <= TIGHT_PCT or min(mine, theirs) >= MOST_RUNS


def _runs(state: StudyState, candidate: Candidate) -> int:
    """Measured confirmation runs of a candidate."""
    return sum(
        trial["role"] == roles.CONFIRM and Candidate.from_json(trial["candidate"]) == candidate
        for trial in state.measured
    )
