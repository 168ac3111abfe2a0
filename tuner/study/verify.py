"""Measuring a committed configuration again: does its claim hold on these devices, with today's code?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
import os
from pathlib import Path
from typing import Any

import numpy as np

from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.job import Job
from trial_runner.measure import read_records
from trial_runner.measure import steady_times
from trial_runner.recipe.config_file import docstring
from tuner.cluster.session import join
from tuner.evidence import wording
from tuner.evidence.claim import Claim
from tuner.evidence.holding import CANNOT_TELL
from tuner.evidence.holding import Holding
from tuner.evidence.holding import holding
from tuner.evidence.machine import Control
from tuner.evidence.machine import machine_change
from tuner.evidence.machine import MachineChange
from tuner.evidence.machine import SAME_SOFTWARE
from tuner.evidence.noise import Noise
from tuner.records import roles
from tuner.records.journal import Journal
from tuner.records.layout import StudyFolder
from tuner.records.summary import summarise
from tuner.study.loop import Loop
from tuner.study.opening import write_study
from tuner.study.plan import make_plan
from tuner.study.plan import StudyPlan
from tuner.study.plan import versions
from tuner.study.run import interruptible
from tuner.study.run import local_slots
from tuner.study.run import open_state
from tuner.study.run import RunOptions
from tuner.study.state import Listener


FEWEST_RUNS = 2
"""Runs before which nothing is said: one run does not tell noise from change."""

ROOM = 3.0
"""Default budget as a multiple of what the asked runs cost when the claim was made."""


def verification_plan(claim: Claim, module: str | None, path: str | None) -> StudyPlan:
    """The plan of a study of one candidate: the claimed one, from its committed file.

    Args:
        claim: what was committed.
        module: the committed config file; None: the text that the claim keeps.
        path: folder of the user's own modules; None: the one of the study.

    Raises:
        UserError: the job cannot be planned here, or these are not the claim's devices.
    """
    candidate = claim.after.candidate
    values = dict(claim.job)
    if path is not None:
        values["model"] = {**values["model"], "path": str(Path(path).expanduser().resolve())}
    values["baseline"] = candidate
    values["search"] = {**values["search"], **_only(candidate)}
    values["search"].pop("knobs", None)
    values["measure"] = {**values["measure"], "probe": False, "trace": False}
    job = Job.model_validate(values)
    on_cpu = (job.cluster.gpu or claim.hardware).lower() == "cpu"
    plan = make_plan(job, claim.peak_flops if on_cpu else None)
    found = (plan.setting.hardware.name, plan.setting.num_devices)
    if found != (claim.hardware, claim.num_devices):
        raise UserError(
            f"verify: the claim was measured on {claim.num_devices} × {claim.hardware}, this is "
            f"{found[1]} × {found[0]}; "
            "run it on the same devices"
        )
    text = module or docstring(wording.evidence(claim)) + "\n" + claim.module
    return replace(plan, module=(text, claim.name))


def _only(candidate: dict[str, Any]) -> dict[str, list[Any]]:
    """A search section that allows one candidate."""
    return {knob: [value] for knob, value in candidate.items()}


def default_budget(claim: Claim, runs: int) -> float:
    """Device-seconds that the asked runs should fit in."""
    return ROOM * runs * max(claim.after.device_s, 1.0)


def verify(
    folder: StudyFolder,
    plan: StudyPlan,
    claim: Claim,
    options: RunOptions,
    most_runs: int,
    listeners: Sequence[Listener],
) -> tuple[Holding | None, dict[str, Any]]:
    """Measure the claimed configuration until its claim holds, has regressed, or runs or budget are at their end.

    Args:
        folder: where the runs are recorded; the caller holds its lease.
        plan: from :func:`verification_plan`.
        claim: what was committed.
        options: cluster and budget.
        most_runs: runs after which "cannot tell" is the answer.
        listeners: called with every event.

    Returns:
        The finding (None when no run was measured) and the facts of the ``verify`` event.

    Raises:
        UserError: the cluster cannot be joined or does not fit.
    """
    write_study(folder, plan)
    journal = Journal(folder.journal)
    try:
        before = summarise(folder)
        state = open_state(folder, plan, options, journal, list(listeners), before)
        state.emit(
            "session",
            study=folder.name,
            folder=str(folder.root),
            budget_device_s=options.budget_device_s,
            spent_device_s=0.0,
            pid=os.getpid(),
            notes=[*plan.notes, *_other_versions(claim), *_no_control(claim)],
        )
        candidate = plan.baseline
        found: Holding | None = None
        with (
            join(plan.device, local_slots(plan, options.share_nodes), options.address, folder.root) as session,
            interruptible(state),
        ):
            loop = Loop(state, session, options.share_nodes)
            while not state.stop_asked:
                record = loop.run_one(candidate, roles.CONFIRM)
                if record is None or record["state"] != "measured":
                    break
                found = holding(
                    claim.after,
                    Noise.from_json(claim.noise),
                    _times(state.measured, candidate),
                    _machine(claim, state.measured, plan.device),
                )
                if found.runs >= most_runs or (found.verdict != CANNOT_TELL and found.runs >= FEWEST_RUNS):
                    break
        facts = {
            "claim": f"{claim.study}: {claim.name}",
            "verdict": found.verdict if found is not None else CANNOT_TELL,
            "finding": found.to_json() if found is not None else None,
            "failure": _failure(state.trials),
            "versions_changed": _changed(claim),
            "spent_device_s": round(state.meter.spent, 1),
            "interrupted": state.stop_asked,
        }
        state.emit("verify", **facts)
        state.emit(
            "study_end", state="interrupted" if state.stop_asked else "done", reason=f"verify: {facts['verdict']}"
        )
        return found, facts
    finally:
        journal.close()


def _times(trials: list[dict[str, Any]], candidate: Candidate) -> list[np.ndarray]:
    return [steady_times(read_records(Path(trial["folder"]), candidate.num_devices)) for trial in trials]


def _machine(claim: Claim, trials: list[dict[str, Any]], device: str) -> MachineChange | None:
    if any(package in _changed(claim) for package in SAME_SOFTWARE):
        return None
    return machine_change(claim.control, Control.of(trials), device)


def _failure(trials: list[dict[str, Any]]) -> dict[str, Any] | None:
    failed = [trial["failure"] for trial in trials if trial["failure"]]
    return failed[-1] if failed else None


def _changed(claim: Claim) -> dict[str, list[str | None]]:
    now = versions()
    return {name: [old, now.get(name)] for name, old in claim.versions.items() if now.get(name) != old}


def _other_versions(claim: Claim) -> list[str]:
    changed = _changed(claim)
    if not changed:
        return []
    words = ", ".join(f"{name} {old} → {new}" for name, (old, new) in changed.items())
    blind = any(package in changed for package in SAME_SOFTWARE)
    excuse = "; the control excuses nothing then: it may be slower for the same reason" if blind else ""
    return [f"the claim was measured with other software: {words}{excuse}"]


def _no_control(claim: Claim) -> list[str]:
    if claim.control.runs_s:
        return []
    return ["the claim does not say how fast its machine was: a slower machine will look like slower code"]
