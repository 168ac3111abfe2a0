"""Confirming the best candidate against the baseline, in turns, inside the budget's confirmation share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from search_space.candidate import Candidate
from trial_runner.measure import read_records
from trial_runner.measure import steady_times
from tuner.evidence.compare import compare
from tuner.evidence.compare import Comparison
from tuner.study.loop import Loop
from tuner.study.loop import StudyState


def confirm(loop: Loop) -> None:
    """Measure best and baseline once more each, if both fit; they count beside their first runs.

    A job with ``confirm_share = 0`` wants no confirmation.
    """
    state = loop.state
    if not state.plan.job.budget.confirm_share:
        return
    best, baseline = state.best, state.baseline
    if best is None or baseline is None or best is baseline:
        return
    confirmed = [
        trial["candidate"] for trial in state.trials if trial["role"] == "confirm" and trial["state"] == "measured"
    ]
    if best["candidate"] in confirmed:
        return
    rival = runner_up(state)
    # The baseline is measured again beside every new best, and a rival in between: the hour counts, too.
    for record in (best, rival, baseline):
        if record is not None:
            loop.run_one(Candidate.from_json(record["candidate"]), "confirm")


def runner_up(state: StudyState) -> dict[str, Any] | None:
    """The second best measured trial of the search, if its interval reaches into the best's; the baseline is none."""
    best = state.best
    others = [trial for trial in state.measured if trial["role"] == "search" and trial is not best]
    second = min(others, key=lambda trial: trial["step_time_s"], default=None)
    if best is None or second is None or second["step_time_ci_s"][0] > best["step_time_ci_s"][1]:
        return None
    return second


def choose_winner(state: StudyState) -> tuple[dict[str, Any], Comparison] | None:
    """The winner and its comparison with the baseline; the baseline wins where the gain is within noise."""
    best, baseline = state.best, state.baseline
    if best is None or baseline is None:
        return None
    ideal_s = state.plan.setting.ideal_s
    rival = runner_up(state)
    if rival is not None and min(len(_runs(state, best)), len(_runs(state, rival))) > 1:
        # Both were repeated in turns: the repeats decide, not which of them had the luckier first run.
        best = min((best, rival), key=lambda record: float(np.median(np.concatenate(_runs(state, record)))))
    comparison = compare(_runs(state, best), _runs(state, baseline), ideal_s)
    if best is baseline or not comparison.significant:
        return baseline, comparison
    return best, comparison


def _runs(state: StudyState, record: dict[str, Any]) -> list[np.ndarray]:
    """Step times of every measured run of a record's candidate."""
    same = [trial for trial in state.measured if trial["candidate"] == record["candidate"]]
    world = state.plan.setting.num_devices
    return [steady_times(read_records(Path(trial["folder"]), world)) for trial in same]
