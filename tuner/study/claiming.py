"""From a study's choice to the claim that is committed."""

from __future__ import annotations

from datetime import date
from pathlib import Path
import re
from typing import Any

import numpy as np

from search_space.candidate import Candidate
from trial_runner.recipe.config_file import render
from tuner.evidence.claim import Claim
from tuner.evidence.claim import Side
from tuner.evidence.compare import level_interval
from tuner.evidence.compare import repeat_interval
from tuner.evidence.compare import unchanged
from tuner.evidence.machine import Control
from tuner.repository import head_of
from tuner.study.choosing import Choice
from tuner.study.judging import Judge
from tuner.study.plan import StudyPlan
from tuner.study.plan import versions
from tuner.study.state import StudyState


def winner_function(plan: StudyPlan) -> str:
    """Name of the committed function and of its file: model, hardware, scale."""
    parts = [plan.base.function, plan.setting.hardware.name, f"{plan.setting.num_devices}x"]
    return re.sub(r"\W+", "_", "_".join(parts)).strip("_").lower()


def make_claim(state: StudyState, choice: Choice) -> Claim:
    """The claim of a study's winner.

    What did not take effect is not claimed: the figures belong to the configuration that really ran.

    Raises:
        UserError: the winner cannot be written as a config function.
    """
    plan, judge = state.plan, Judge(state)
    assert state.baseline is not None
    winner, baseline = choice.winner, state.baseline
    kept = Candidate.from_json(winner["candidate"]) == Candidate.from_json(baseline["candidate"])
    ran = Candidate.from_json(winner.get("effective_candidate") or winner["candidate"])
    name, setting = winner_function(plan), plan.setting
    before = _side(state, judge, baseline)
    comparison = unchanged(judge.noise) if kept else choice.comparison
    return Claim(
        study=state.folder.name,
        date=date.today().isoformat(),
        function=f"{plan.base.module}:{plan.base.function}",
        name=name,
        hardware=setting.hardware.name,
        num_devices=setting.num_devices,
        seq_len=setting.seq_len,
        global_batch_seqs=setting.global_batch_seqs,
        precision=setting.precision,
        peak_flops=setting.hardware.peak(setting.precision),
        ideal_s=setting.ideal_s,
        data=plan.job.recipe.data,
        versions=versions(),
        git_head=head_of(Path(plan.base.user_path)) if plan.base.user_path else None,
        job=plan.job.model_dump(mode="json"),
        module=render(ran, plan.base, plan.recipe, function=name, header=None),
        before=before,
        after=before if kept else _side(state, judge, winner),
        comparison=comparison.to_json(),
        parity=(judge.parity(plan.baseline) if kept else choice.parity).to_json(),
        noise=judge.noise.to_json(),
        changes=choice.changes,
        why=choice.why,
        env=dict(plan.job.env.get(ran.env, {})),
    )


def _side(state: StudyState, judge: Judge, record: dict[str, Any]) -> Side:
    candidate = Candidate.from_json(record["candidate"])
    records, runs, noise = judge.records(candidate), judge.times(candidate), judge.noise
    level, (low, high) = level_interval(runs, noise)
    ideal_s, setting = state.plan.setting.ideal_s, state.plan.setting
    ran = Candidate.from_json(record.get("effective_candidate") or record["candidate"])
    return Side(
        candidate=ran.to_json(),
        label=ran.label(),
        trials=tuple(trial["number"] for trial in records),
        run_medians_s=tuple(float(np.median(run)) for run in runs),
        step_time_s=level,
        step_time_ci_s=(low, high),
        step_time_p95_s=float(np.quantile(np.concatenate(runs), 0.95)),
        tokens_per_s_per_device=setting.tokens_per_step / level / setting.num_devices,
        mfu_pct=100 * ideal_s / level,
        mfu_ci_pct=(100 * ideal_s / high, 100 * ideal_s / low),
        peak_reserved_gib=max(trial["peak_reserved_gib"] for trial in records),
        device_s=float(np.mean([trial["device_s"] for trial in records])),
        repeat_s=repeat_interval(runs, noise),
        control=Control.of(records),
        traces=tuple(
            "/".join([state.folder.name, *Path(trace).parts[-3:]]) for trial in records for trace in trial["traces"]
        ),
    )
