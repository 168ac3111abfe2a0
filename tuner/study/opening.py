"""Opening a study: its fixed facts, a new plan or the old one again."""

from __future__ import annotations

from collections.abc import Sequence
import json
from pathlib import Path
from typing import Any

from search_space.errors import UserError
from search_space.job import Job
from trial_runner.recipe.base import BaseFunction
from tuner.records.layout import StudyFolder
from tuner.repository import head_of
from tuner.study.plan import make_plan
from tuner.study.plan import StudyPlan
from tuner.study.plan import versions
from tuner.study.transfer import read_source
from tuner.study.transfer import write_transfer


def create(
    folder: StudyFolder, job: Job, sources: Sequence[StudyFolder] = (), *, share_nodes: bool = False
) -> StudyPlan:
    """Plan a new study and write its fixed facts.

    Args:
        folder: the new study's folder.
        job: the job.
        sources: earlier studies whose coefficients and residuals carry over.
        share_nodes: whether gangs may share a node.

    Raises:
        UserError: the job cannot be planned on this machine, or a source rests on other devices or software.
    """
    plan = make_plan(job, share_nodes=share_nodes)
    facts = study_facts(folder, plan)
    if sources:
        folder.root.mkdir(parents=True, exist_ok=True)
        read = [read_source(source, plan.setting, facts) for source in sources]
        write_transfer(folder, read, plan.setting)
    write_study(folder, plan)
    return plan


def write_study(folder: StudyFolder, plan: StudyPlan) -> None:
    """Write what holds for the whole study: job and facts."""
    folder.root.mkdir(parents=True, exist_ok=True)
    folder.job.write_text(plan.job.model_dump_json(indent=1))
    scratch = folder.facts.with_suffix(".writing")
    scratch.write_text(json.dumps(study_facts(folder, plan), indent=1))
    scratch.replace(folder.facts)


def study_facts(folder: StudyFolder, plan: StudyPlan) -> dict[str, Any]:
    """The fixed facts of a study."""
    job = plan.job
    return {
        "study": folder.name,
        "model": plan.base.shape.name,
        "function": f"{plan.base.module}:{plan.base.function}",
        "device": plan.device,
        "threads": plan.threads,
        "hardware": plan.setting.hardware.name,
        "num_devices": plan.setting.num_devices,
        "peak_flops": plan.setting.hardware.peak(plan.setting.precision),
        "seq_len": plan.setting.seq_len,
        "global_batch_seqs": plan.setting.global_batch_seqs,
        "precision": plan.setting.precision,
        "steps": job.measure.steps,
        "rehearsal": plan.rehearsal,
        "warmup_steps": job.measure.warmup_steps,
        "versions": versions(),
        "git_head": head_of(Path.cwd()),
        "workdir": plan.workdir,
        "base": plan.base.to_json(),
    }


def reopen(folder: StudyFolder, *, share_nodes: bool = False) -> StudyPlan:
    """The plan of an existing study, with the peak measured when it was created.

    Args:
        folder: the study's folder.
        share_nodes: whether gangs may share a node.

    Raises:
        UserError: software versions or devices changed since, so old and new trials would not be comparable.
    """
    job = Job.model_validate_json(folder.job.read_text())
    facts = json.loads(folder.facts.read_text())
    now = versions()
    changed = {k: (v, now.get(k)) for k, v in facts["versions"].items() if k in ("torch", "torchtitan") and v != now[k]}
    if changed:
        words = ", ".join(f"{name} {old} → {new}" for name, (old, new) in changed.items())
        raise UserError(f"study {folder.name}: {words} since it began; start a new study")
    peak = facts["peak_flops"] if facts["device"] == "cpu" else None
    plan = make_plan(job, peak, facts.get("workdir"), share_nodes=share_nodes)
    found = {
        "device": plan.device,
        "threads": plan.threads,
        "hardware": plan.setting.hardware.name,
        "num_devices": plan.setting.num_devices,
        "seq_len": plan.setting.seq_len,
        "global_batch_seqs": plan.setting.global_batch_seqs,
    }
    began = {"threads": plan.threads, **facts}
    differing = [f"{name} {began[name]} → {value}" for name, value in found.items() if began[name] != value]
    if differing:
        raise UserError(
            f"study {folder.name}: {', '.join(differing)} since it began, so old and new trials would not compare; "
            "resume it on the same devices and with the same --share-nodes, or start a new study"
        )
    if plan.base.shape != BaseFunction.from_json(facts["base"]).shape:
        raise UserError(f"study {folder.name}: the model {facts['function']} changed since it began; start a new study")
    return plan
