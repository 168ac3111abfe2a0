"""Studies on disk for tests of tracking: a journal as the loop writes it, trial folders as ranks fill them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tuner.records.journal import Journal
from tuner.records.layout import StudyFolder


CANDIDATE = {"tensor_parallel": 2, "pipeline_parallel": 1, "micro_batch": 1, "compile": False, "dps": 1}
FACTS = {
    "study": "s",
    "model": "toy",
    "function": "m:f",
    "hardware": "cpu",
    "num_devices": 2,
    "seq_len": 128,
    "global_batch_seqs": 8,
    "precision": "fp32",
    "steps": 20,
    "warmup_steps": 2,
    "device": "cpu",
    "peak_flops": 1e11,
    "versions": {"torch": "2"},
    "git_head": None,
}


def new_study(root: Path, mlflow_uri: str | None = None) -> StudyFolder:
    """A study's folder with facts and job, without a journal."""
    folder = StudyFolder(root)
    folder.root.mkdir(parents=True)
    folder.facts.write_text(json.dumps({**FACTS, "study": folder.name}))
    records = {"mlflow_uri": mlflow_uri} if mlflow_uri else {}
    folder.job.write_text(json.dumps({"model": {"torchtitan": "m:f"}, "records": records}))
    return folder


def trial(number: int, folder: StudyFolder, steps: int = 20, **changes: Any) -> dict[str, Any]:
    """A trial's record; its folder gets the files of a rank."""
    place = folder.trial(number)
    place.mkdir(parents=True, exist_ok=True)
    lines = [
        {"step": i + 1, "phase": "measured", "step_time_s": 0.5, "at_s": 0.5 * (i + 1), "loss": 8.0 - i / steps}
        for i in range(steps)
    ]
    (place / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (place / "m_f.py").write_text("def f():\n    pass\n")
    return {
        "number": number,
        "role": "baseline" if number == 0 else "search",
        "state": "measured",
        "candidate": {**CANDIDATE, "micro_batch": number + 1},
        "label": f"tp2 b{number + 1}",
        "step_time_s": 0.5,
        "step_time_ci_s": [0.49, 0.51],
        "tokens_per_s_per_device": 1024.0,
        "hfu_pct": 11.0,
        "peak_reserved_gib": 1.0,
        "mfu_pct": 10.0 + number,
        "device_s": 20.0,
        "wall_s": 10.0,
        "predicted": {"step_time_s": 0.4, "mfu_pct": 12.0, "memory_gib": 1.0},
        "folder": str(place),
        "failure": None,
        **changes,
    }


def write(folder: StudyFolder, *events: dict[str, Any]) -> None:
    """Append events to the journal."""
    journal = Journal(folder.journal)
    for event in events:
        journal.write(**event)
    journal.close()


def session(folder: StudyFolder) -> dict[str, Any]:
    return {"event": "session", "study": folder.name, "budget_device_s": 100.0, "spent_device_s": 0.0}


def placed(number: int) -> dict[str, Any]:
    return {"event": "trial_placed", "number": number, "role": "search", "candidate": CANDIDATE, "label": "x"}


def whole_study(folder: StudyFolder, trials: int = 3, steps: int = 20) -> None:
    """A study from its session to its end."""
    write(folder, session(folder))
    for number in range(trials):
        write(folder, placed(number), {"event": "trial", **trial(number, folder, steps)})
    comparison = {"step_time_change_pct": -10.0, "mfu_points": 2.0}
    write(folder, {"event": "winner", "number": trials - 1, "label": "tp2", "comparison": comparison, "why": "faster"})
    write(folder, {"event": "study_end", "state": "done", "reason": "pool exhausted"})
