"""Which candidate is exported: a study's winner, a stated one, a job's baseline, or its fastest predicted."""

from __future__ import annotations

from dataclasses import replace
import json
from typing import Any

import numpy as np

from pruning.assess import assess
from search_space.candidate import Candidate
from search_space.enumerate import enumerate_pool
from search_space.errors import UserError
from search_space.job import Job
from search_space.job_file import load_job
from search_space.knobs import parse_assignment
from search_space.pool import canonical
from search_space.resolve import setting_from_job
from search_space.setting import Setting
from trial_runner.recipe.base import BaseFunction
from trial_runner.recipe.base import describe
from tuner.evidence.small_run import setting_of
from tuner.export.subject import Subject
from tuner.records.layout import find_folder
from tuner.records.layout import StudyFolder
from tuner.records.summary import summarise
from tuner.study.plan import make_plan


def find_subject(source: str, candidate: str | None, needs_function: bool) -> Subject:
    """What to export.

    Args:
        source: a study's name or folder, or a job file (``.toml``).
        candidate: knobs; None for the winner of a study, or a job's baseline, or else its fastest predicted.
        needs_function: whether the target runs a torchtitan function, which is then read in a child process.

    Raises:
        UserError: there is no such study or job, it has no winner, or the candidate does not fit its devices.
    """
    if source.endswith(".toml"):
        return _from_job(source, candidate, needs_function)
    return _from_study(find_folder(source), candidate)


def _from_study(folder: StudyFolder, text: str | None) -> Subject:
    facts = json.loads(folder.facts.read_text())
    job = Job(**json.loads(folder.job.read_text()))
    setting = setting_of(facts, job)
    if text is not None:
        chosen, why = stated(text, setting), "stated"
    else:
        summary = summarise(folder)
        record = next((t for t in summary.trials if t["number"] == summary.winner), None)
        if record is None:
            raise UserError(f"study {folder.name}: it has no winner yet; name a --candidate, or wait until it ends")
        chosen = Candidate.from_json(record.get("effective_candidate") or record["candidate"])
        why = f"winner, trial {record['number']}"
    base = BaseFunction.from_json(facts["base"])
    return _subject(chosen, setting, job, f"study {folder.name}", why, base)


def _from_job(path: str, text: str | None, needs_function: bool) -> Subject:
    job = load_job(path)
    setting, base = job_setting(job)
    if base is None and needs_function and job.model.torchtitan:
        base = describe(job.model.torchtitan, job.model.path)
    if text is not None:
        chosen, why = stated(text, setting), "stated"
    elif job.baseline:
        chosen, why = baseline_of(job, setting), "baseline"
    else:
        chosen, why = fastest(job, setting), "fastest predicted"
    return _subject(chosen, setting, job, path.rpartition("/")[2], why, base)


def job_setting(job: Job) -> tuple[Setting, BaseFunction | None]:
    """A job's setting; what the job file and the shipped presets do not say is found on this machine, as for a study.

    Raises:
        UserError: neither says it.
    """
    try:
        return setting_from_job(job), None
    except UserError:
        if job.model.torchtitan is None or job.search.framework != "torchtitan":
            raise
    plan = make_plan(job)
    return plan.setting, plan.base


def _subject(
    candidate: Candidate, setting: Setting, job: Job, source: str, why: str, base: BaseFunction | None
) -> Subject:
    env = dict(job.env.get(candidate.env, {}))
    if candidate.env != "default" and candidate.env not in job.env:
        raise UserError(f"candidate: env = {candidate.env!r}, the job has no [env.{candidate.env}]")
    return Subject(
        candidate=canonical(candidate),
        setting=setting,
        source=source,
        why=why,
        seed=job.recipe.seed,
        base=base,
        env=env,
    )


def stated(text: str, setting: Setting) -> Candidate:
    """A candidate from the command line.

    Raises:
        UserError: it is none, or its degrees do not multiply to the devices.
    """
    from tuner.cli.explain import candidate_from

    found: Candidate = candidate_from(text, setting.framework, setting.num_devices)
    return found


def baseline_of(job: Job, setting: Setting) -> Candidate:
    """A job's ``[baseline]``, its open degree filled.

    Raises:
        UserError: its degrees do not multiply to the devices.
    """
    values: dict[str, Any] = dict(job.baseline)
    words = ",".join(f"{key}={value}" for key, value in values.items() if key != "env")
    parse_assignment(words)
    return replace(stated(words, setting), env=values.get("env", "default"))


def fastest(job: Job, setting: Setting) -> Candidate:
    """The fastest feasible candidate by the ledger; what may not fit comes after what fits.

    Raises:
        UserError: nothing is feasible.
    """
    pool = enumerate_pool(setting, job.search.knobs, job.search.allow_numeric_changes)
    found = assess(pool, setting)
    feasible = np.flatnonzero(found.feasible)
    if not len(feasible):
        raise UserError("nothing is feasible, so there is nothing to export; `tune plan` says why")
    order = np.lexsort((found.prices.step_time_s[feasible], found.doubtful[feasible]))
    return pool.candidate(int(feasible[order[0]]))
