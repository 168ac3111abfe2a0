"""A real small space on this machine: measure all of it once, then see what `tune start` finds for a quarter of that.

    python benchmarks/real_search.py record tests/data/real_space.json
    python benchmarks/real_search.py again tests/data/real_space.json --repeats 2
    python benchmarks/real_search.py check tests/data/real_space.json --studies 5

``record`` measures every feasible candidate of a one-device job (the llama3 debug model on one core, the rest of
the machine's work kept off that core by ``--core``) and keeps step times, intervals, costs and the machine's load.
``again`` measures the best of a recording ``--repeats`` more times, so that the noise between runs is on record, too.
``check`` starts fresh studies with a quarter of the recorded cost as their budget and compares each winner by its
recorded step time: it is right when it is within 3% of the best, or within the best's own interval. It only says
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
from tuner.evidence.compare import level_interval
from tuner.evidence.noise import estimate
from tuner.records.layout import StudyFolder
from tuner.records.summary import summarise
from tuner.study import deciding


JOB = """
[model]
torchtitan = "llama3:llama3_debugmodel"
[cluster]
gpu = "cpu"
gpus_per_node = 1
[recipe]
seq_len = 128
global_batch_seqs = 16
precision = "fp32"
data = "synthetic"
[search]
sampler = "{sampler}"
compile = false
reshard_after_forward = "default"
first_n = [2]
{knobs}
[measure]
steps = {steps}
warmup_steps = 5
trace = false
stop_confidence = {confidence}
[budget]
confirm_share = {confirm}
"""

KNOBS = {
    "activation_checkpoint": ["none", "selective", "full", "first_n"],
    "micro_batch": [1, 2, 4, 8],
    "loss_chunks": [1, 8],
}
"""The space."""

BEST = 8
"""Candidates that ``again`` measures."""

SHARE = 0.25
"""Budget of a checked study over the cost of measuring everything."""

TOLERANCE = 0.03
"""How much slower than the best a winner may be, where the best's own interval is narrower."""


def study(root: Path, budget_device_s: float, **values: Any) -> Any:
    """One real study; its summary."""
    defaults = {"sampler": "ours", "steps": 20, "confidence": 0.95, "confirm": 0.2, "knobs": KNOBS}
    values = {**defaults, **values}
    values["knobs"] = "\n".join(f"{name} = {json.dumps(allowed)}" for name, allowed in values["knobs"].items())
    job = root.parent / f"{root.name}.toml"
    job.write_text(JOB.format(**values))
    with contextlib.redirect_stdout(sys.stderr):
        budget = f"{budget_device_s / 60:.4f}-cpu-minutes"
        code = tune(["start", str(job), "--budget", budget, "--study", str(root), "--plain"])
    if code:
        raise SystemExit(f"the study ended with exit code {code}")
    return summarise(StudyFolder(root))


def record(path: Path) -> dict[str, Any]:
    """Measure every feasible candidate once."""
    document: dict[str, Any] = {
        "what": "every feasible candidate of benchmarks/real_search.py's job, real torchtitan 0.3.0 on one CPU core",
        "recorded_unix_s": round(time.time()),
        "candidates": {},
    }
    cost = measure_all(document["candidates"], KNOBS)
    document |= {"load_average": round(os.getloadavg()[0], 2), "exhaustive_device_s": cost}
    path.write_text(json.dumps(document, indent=1) + "\n")
    measured = [entry for entry in document["candidates"].values() if entry["runs"]]
    return {"recorded": len(measured), "exhaustive_device_s": cost, "load_average": document["load_average"]}


def again(path: Path, repeats: int) -> dict[str, Any]:
    """Measure the best of a recording ``repeats`` more times."""
    document = json.loads(path.read_text())
    entries = document["candidates"]
    best = sorted((key for key in entries if entries[key]["runs"]), key=lambda key: level(entries[key]))[:BEST]
    shown = [entries[key]["knobs"] for key in best]
    knobs = {name: sorted({one[name] for one in shown}, key=str) for name in KNOBS}
    for _ in range(repeats):
        measure_all(entries, knobs)
        path.write_text(json.dumps(document, indent=1) + "\n")
    return {"runs": {entries[key]["label"]: [run["step_time_s"] for run in entries[key]["runs"]] for key in best}}


def measure_all(entries: dict[str, Any], knobs: dict[str, list[Any]]) -> float:
    """Measure a whole space once more; the device-seconds it took."""
    deciding.OPTIMISM = float("inf")  # nothing is given up: the recording is exhaustive
    with tempfile.TemporaryDirectory() as folder:
        found = study(Path(folder) / "all", 1e6, sampler="random", confidence=1.0, confirm=0.0, knobs=knobs)
    for trial in found.trials:
        candidate = Candidate.from_json(trial["candidate"])
        entry = entries.setdefault(candidate.key(), {"label": candidate.label(), "runs": []})
        entry["knobs"] = {name: trial["candidate"][name] for name in KNOBS}
        if trial["state"] == "measured":
            keys = ("step_time_s", "step_time_ci_s", "device_s", "flags")
            entry["runs"].append({key: trial[key] for key in keys})
    return float(found.spent_device_s)


def level(entry: dict[str, Any]) -> float:
    """Geometric mean of a candidate's runs, seconds."""
    return float(np.exp(np.mean([np.log(run["step_time_s"]) for run in entry["runs"]])))


def check(path: Path, studies: int) -> dict[str, Any]:
    """Run fresh studies at a quarter of the recorded cost."""
    document = json.loads(path.read_text())
    entries = {key: entry for key, entry in document["candidates"].items() if entry["runs"]}
    medians = {key: level(entry) for key, entry in entries.items()}
    # The best is looked for among those that were repeated: one lucky run does not make a best.
    most = max(len(entry["runs"]) for entry in entries.values())
    best = min((key for key in entries if len(entries[key]["runs"]) == most), key=lambda key: medians[key])
    noise = estimate([[run["step_time_s"] for run in entry["runs"]] for entry in entries.values()], "cpu")
    runs = [np.array([run["step_time_s"]]) for run in entries[best]["runs"]]
    _, (_, high) = level_interval(runs, noise)
    bound = max(medians[best] * (1 + TOLERANCE), high)
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
        "bound_s": bound,
        "noise_floor_pct": noise.floor_pct,
        "budget_device_s": round(budget, 1),
        "within": sum(one["within"] for one in found),
        "studies": found,
        "load_average": round(os.getloadavg()[0], 2),
    }


def main() -> None:
    """Record or check; print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "again", "check"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--studies", type=int, default=5)
    parser.add_argument("--core", type=int, default=0, help="core that everything of this command runs on")
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    verbs = {
        "record": lambda: record(args.file),
        "again": lambda: again(args.file, args.repeats),
        "check": lambda: check(args.file, args.studies),
    }
    print(json.dumps(verbs[args.what]()))


if __name__ == "__main__":
    main()
