"""A real small space on this machine: measure all of it once, then see what `tune start` finds for a quarter of that.

    python benchmarks/real_search.py record tests/data/real_space.json
    python benchmarks/real_search.py check tests/data/real_space.json --studies 5

``record`` runs every feasible candidate of a two-rank job (torchtitan's llama3 debug model, gloo), twice where time
allows (``--repeats``), and keeps step times, intervals, costs and the machine's load. ``check`` starts fresh studies
with a quarter of the recorded cost as their budget and compares each winner by its recorded step time. It only says
something on the machine, and under the load, that the recording was made on. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
import sys
import tempfile
import time
from typing import Any

import numpy as np

from search_space.candidate import Candidate
from tuner.cli import main as tune
from tuner.records.layout import StudyFolder
from tuner.records.summary import summarise
from tuner.study import deciding


JOB = """
[model]
torchtitan = "llama3:llama3_debugmodel"
[cluster]
gpu = "cpu"
gpus_per_node = 2
[recipe]
seq_len = 128
global_batch_seqs = 8
precision = "fp32"
data = "synthetic"
[search]
sampler = "{sampler}"
compile = false
reshard_after_forward = "default"
activation_checkpoint = ["none", "full"]
micro_batch = [1, 2, 4]
[measure]
steps = {steps}
warmup_steps = 5
trace = false
stop_confidence = {confidence}
[budget]
confirm_share = {confirm}
"""

SHARE = 0.25
"""Budget of a checked study over the cost of measuring everything."""

TOLERANCE = 0.03
"""How much slower than the best a winner may be, where the best's own interval is narrower."""


def study(root: Path, budget_device_s: float, **values: Any) -> Any:
    """One real study; its summary."""
    defaults = {"sampler": "ours", "steps": 20, "confidence": 0.95, "confirm": 0.2}
    job = root.parent / f"{root.name}.toml"
    job.write_text(JOB.format(**{**defaults, **values}))
    with contextlib.redirect_stdout(sys.stderr):
        budget = f"{budget_device_s / 60:.4f}-cpu-minutes"
        code = tune(["start", str(job), "--budget", budget, "--study", str(root), "--plain"])
    if code:
        raise SystemExit(f"the study ended with exit code {code}")
    return summarise(StudyFolder(root))


def record(path: Path, repeats: int) -> dict[str, Any]:
    """Measure every feasible candidate ``repeats`` times."""
    deciding.OPTIMISM = float("inf")  # nothing is given up: the recording is exhaustive
    runs: dict[str, dict[str, Any]] = {}
    cost, began, load = 0.0, time.time(), [os.getloadavg()[0]]
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats):
            found = study(Path(folder) / f"all{repeat}", 1e6, sampler="random", confidence=1.0, confirm=0.0)
            load.append(os.getloadavg()[0])
            cost = cost or found.spent_device_s
            for trial in found.trials:
                candidate = Candidate.from_json(trial["candidate"])
                entry = runs.setdefault(candidate.key(), {"label": candidate.label(), "state": [], "runs": []})
                entry["state"].append(trial["state"])
                if trial["state"] == "measured":
                    keys = ("step_time_s", "step_time_ci_s", "device_s", "flags")
                    entry["runs"].append({key: trial[key] for key in keys})
    document = {
        "what": "every feasible candidate of benchmarks/real_search.py's job, real torchtitan 0.3.0 on two CPU ranks",
        "recorded_unix_s": round(began),
        "repeats": repeats,
        "load_averages": [round(value, 2) for value in load],
        "exhaustive_device_s": cost,
        "candidates": runs,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    measured = [entry for entry in runs.values() if entry["runs"]]
    return {"recorded": len(measured), "exhaustive_device_s": cost, "load_averages": document["load_averages"]}


def check(path: Path, studies: int) -> dict[str, Any]:
    """Run fresh studies at a quarter of the recorded cost."""
    document = json.loads(path.read_text())
    medians = {
        key: float(np.median([run["step_time_s"] for run in entry["runs"]]))
        for key, entry in document["candidates"].items()
        if entry["runs"]
    }
    best = min(medians, key=lambda key: medians[key])
    highs = [run["step_time_ci_s"][1] for run in document["candidates"][best]["runs"]]
    bound = max(medians[best] * (1 + TOLERANCE), max(highs))
    budget = SHARE * document["exhaustive_device_s"]
    found = []
    for number in range(studies):
        with tempfile.TemporaryDirectory() as folder:
            summary = study(Path(folder) / f"check{number}", budget)
        winner = next(trial for trial in summary.trials if trial["number"] == summary.winner)
        key = Candidate.from_json(winner["candidate"]).key()
        found.append(
            {
                "winner": winner["label"],
                "regret_pct": round(100 * (medians[key] / medians[best] - 1), 2) if key in medians else None,
                "within": key in medians and medians[key] <= bound,
                "spent_device_s": round(summary.spent_device_s, 1),
                "trials": len(summary.trials),
            }
        )
    return {
        "best": document["candidates"][best]["label"],
        "best_step_time_s": medians[best],
        "budget_device_s": round(budget, 1),
        "within": sum(one["within"] for one in found),
        "studies": found,
        "load_average": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Record or check; print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--studies", type=int, default=5)
    args = parser.parse_args()
    print(json.dumps(record(args.file, args.repeats) if args.what == "record" else check(args.file, args.studies)))


if __name__ == "__main__":
    main()
