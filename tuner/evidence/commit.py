"""The winner's commit: its config function and a row in the change table."""

from __future__ import annotations

import csv
from datetime import date
import io
from pathlib import Path
import re
from typing import Any

from search_space.candidate import Candidate
from trial_runner.recipe.config_file import render
from tuner.evidence.compare import Comparison
from tuner.evidence.compare import UNCHANGED
from tuner.repository import commit_files
from tuner.repository import open_repository
from tuner.repository import read_file
from tuner.repository import tip_of
from tuner.study.plan import StudyPlan
from tuner.study.plan import versions


TABLE = "tuning_ledger.csv"
"""Change table in the user's repository."""

COLUMNS = (
    "date",
    "study",
    "what",
    "why",
    "config",
    "before_step_time_s",
    "after_step_time_s",
    "change_pct",
    "change_interval_pct",
    "before_mfu_pct",
    "after_mfu_pct",
    "before_peak_reserved_gib",
    "after_peak_reserved_gib",
    "trace",
    "versions",
    "approved_by",
)
"""Columns of the change table."""


def branch_of(study: str) -> str:
    """The branch that a study's winner goes to: a name that git takes, whatever the study is called."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", study).strip("-") or "study"
    return f"tune/{plain}"


def check_commit_target(commit_to: str | None) -> None:
    """Find out before anything is spent whether the winner can be committed.

    Raises:
        UserError: ``commit_to`` is no git repository.
    """
    if commit_to is not None:
        open_repository(Path(commit_to).expanduser(), create=False)


def winner_function(plan: StudyPlan) -> str:
    """Name of the committed function and of its file: model, hardware, scale."""
    parts = [plan.base.function, plan.setting.hardware.name, f"{plan.setting.num_devices}x"]
    return re.sub(r"\W+", "_", "_".join(parts)).strip("_").lower()


def commit_winner(
    plan: StudyPlan,
    study: str,
    winner: dict[str, Any],
    baseline: dict[str, Any],
    comparison: Comparison,
    repository: Path,
    create: bool,
) -> dict[str, str]:
    """Commit the winner to branch ``tune/<study>``.

    Args:
        plan: the study's plan.
        study: the study's name.
        winner: record of the winning trial.
        baseline: record of the baseline trial.
        comparison: winner against baseline.
        repository: where to commit.
        create: make the repository when there is none.

    Returns:
        ``repo``, ``branch``, ``hash`` and ``file``.

    Raises:
        UserError: ``repository`` is no repository, or git refuses.
    """
    top = open_repository(repository, create)
    if winner["number"] == baseline["number"]:
        comparison = UNCHANGED
    # What did not take effect is not committed: the figures belong to the configuration that really ran.
    winner = winner | {"candidate": winner.get("effective_candidate") or winner["candidate"]}
    candidate = Candidate.from_json(winner["candidate"])
    name = winner_function(plan)
    branch = branch_of(study)
    header = _evidence(plan, study, winner, baseline, comparison)
    text = render(candidate, plan.base, plan.recipe, function=name, header=header)
    file = f"{name}.py"
    tip = tip_of(top, branch)
    table = read_file(top, tip or "HEAD", TABLE)
    row = _row(plan, study, winner, baseline, comparison, file)
    what = row["what"] or "baseline kept"
    message = (
        f"Tune {plan.base.function}: {what}\n\n"
        f"{_gain(comparison)} on {plan.setting.num_devices} × {plan.setting.hardware.name}, study {study}.\n"
    )
    commit = commit_files(top, branch, {file: text, TABLE: add_row(table, row)}, message)
    return {"repo": str(top), "branch": branch, "hash": commit, "file": file, "function": name}


def _gain(comparison: Comparison) -> str:
    low, high = comparison.step_time_change_ci_pct
    return (
        f"Step time {comparison.step_time_change_pct:+.1f}% [{low:+.1f}, {high:+.1f}], "
        f"MFU {comparison.mfu_points:+.1f} points"
    )


def _evidence(
    plan: StudyPlan, study: str, winner: dict[str, Any], baseline: dict[str, Any], comparison: Comparison
) -> str:
    setting = plan.setting
    lines = [
        f"{plan.base.module}:{plan.base.function} tuned for {setting.num_devices} × {setting.hardware.name}.",
        "",
        f"study: {study}, trial {winner['number']} against baseline trial {baseline['number']}",
        f"recipe: sequence {setting.seq_len}, global batch {setting.global_batch_seqs}, {setting.precision}",
        f"before: {_figures(baseline)}",
        f"after:  {_figures(winner)}",
        f"change: {_gain(comparison)} ({'significant' if comparison.significant else 'within noise'})",
        f"peak used for MFU: {setting.hardware.peak(setting.precision) / 1e12:.4g} TFLOP/s per device",
        f"versions: {', '.join(f'{key} {value}' for key, value in versions().items())}",
    ]
    if plan.job.recipe.data == "synthetic":
        lines.append("measured on synthetic tokens; the data loader of the original function is untouched here")
    return "\n".join(lines)


def _figures(trial: dict[str, Any]) -> str:
    low, high = trial["step_time_ci_s"]
    return (
        f"step {trial['step_time_s']:.4g} s [{low:.4g}, {high:.4g}], p95 {trial['step_time_p95_s']:.4g} s, "
        f"{trial['tokens_per_s_per_device']:.4g} tokens/s/device, MFU {trial['mfu_pct']:.2f}%, "
        f"peak reserved {trial['peak_reserved_gib']:.2f} GiB"
    )


def _row(
    plan: StudyPlan,
    study: str,
    winner: dict[str, Any],
    baseline: dict[str, Any],
    comparison: Comparison,
    file: str,
) -> dict[str, str]:
    changed = Candidate.from_json(winner["candidate"]).changed(Candidate.from_json(baseline["candidate"]))
    low, high = comparison.step_time_change_ci_pct
    return {
        "date": date.today().isoformat(),
        "study": study,
        "what": "; ".join(f"{knob}={value}" for knob, value in changed.items()),
        "why": "fastest measured, significant" if changed else "nothing measured beat the baseline beyond noise",
        "config": file,
        "before_step_time_s": f"{baseline['step_time_s']:.5g}",
        "after_step_time_s": f"{winner['step_time_s']:.5g}",
        "change_pct": f"{comparison.step_time_change_pct:+.2f}",
        "change_interval_pct": f"[{low:+.2f}, {high:+.2f}]",
        "before_mfu_pct": f"{baseline['mfu_pct']:.2f}",
        "after_mfu_pct": f"{winner['mfu_pct']:.2f}",
        "before_peak_reserved_gib": f"{baseline['peak_reserved_gib']:.2f}",
        "after_peak_reserved_gib": f"{winner['peak_reserved_gib']:.2f}",
        "trace": "/".join([study, *Path((winner.get("traces") or [""])[0]).parts[-3:]]),
        "versions": " ".join(f"{key}={value}" for key, value in versions().items()),
        "approved_by": "",
    }


def add_row(table: str | None, row: dict[str, str]) -> str:
    """The change table with ``row`` in it; an earlier row of the same study is replaced."""
    rows = list(csv.DictReader(io.StringIO(table))) if table else []
    rows = [old for old in rows if old.get("study") != row["study"]] + [row]
    columns = list(dict.fromkeys([*COLUMNS, *(key for old in rows for key in old if key)]))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
