"""The same candidate in separate studies: ``python benchmarks/repeatability.py [JOB.toml] --studies 5``.

Each study measures the job's baseline alone (the built-in job where none is named). Its claim says where the median of
a run in another study should fall (95%); the medians of all other studies are held against that, and, for comparison,
against the interval of the run's own steps, which knows nothing of what differs between runs. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from pathlib import Path
import statistics
import sys
import tempfile
from typing import Any

from search_space.job import Job
from search_space.job_file import load_job
from tuner.cli.start import embedded_job
from tuner.evidence.claim import Claim
from tuner.records.layout import StudyFolder
from tuner.records.lease import lease
from tuner.records.summary import summarise
from tuner.study.opening import create
from tuner.study.run import run_study
from tuner.study.run import RunOptions


BUDGET_S = 3600.0
"""Device-seconds, more than the baseline needs."""


def measure(root: Path, job: Job) -> dict[str, Any]:
    """One study of the baseline alone: its median and both intervals, seconds."""
    search = job.search.model_copy(update={"max_trials": 1})
    budget = job.budget.model_copy(update={"confirm_share": 0.0})
    folder = StudyFolder(root)
    with lease(folder):
        plan = create(folder, job.model_copy(update={"search": search, "budget": budget}))
        print(f"{root.name} of {plan.baseline.label()}", file=sys.stderr, flush=True)
        code, end = run_study(folder, plan, RunOptions(budget_device_s=BUDGET_S), [])
    if code:
        raise SystemExit(f"the study ended with exit code {code}: {end['reason']}")
    trial = summarise(folder).trials[0]
    return {
        "label": trial["label"],
        "median_s": trial["step_time_s"],
        "own_s": trial["step_time_ci_s"],
        "repeat_s": Claim.read(folder.claim).after.repeat_s,
    }


def covered(found: list[dict[str, Any]], key: str) -> float:
    """Share of (interval, other study's median) pairs in which the median lies in the interval, percent."""
    pairs = list(itertools.permutations(found, 2))
    inside = sum(one[key][0] <= other["median_s"] <= one[key][1] for one, other in pairs)
    return round(100 * inside / len(pairs), 1)


def main() -> None:
    """Run the studies and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", nargs="?", help="job file; absent: the built-in job")
    parser.add_argument("--studies", type=int, default=5)
    args = parser.parse_args()
    job = load_job(args.job) if args.job else embedded_job()
    with tempfile.TemporaryDirectory() as folder:
        found = [measure(Path(folder) / f"study{i}", job) for i in range(args.studies)]
    middle = statistics.median(one["median_s"] for one in found)
    print(
        json.dumps(
            {
                "candidate": found[0]["label"],
                "medians_s": [round(one["median_s"], 4) for one in found],
                "spread_pct": round(100 * statistics.stdev(one["median_s"] for one in found) / middle, 2),
                "repeat_s": [[round(end, 4) for end in one["repeat_s"]] for one in found],
                "repeat_covers_pct": covered(found, "repeat_s"),
                "own_steps_cover_pct": covered(found, "own_s"),
                "load": os.getloadavg()[0],
            }
        )
    )


if __name__ == "__main__":
    main()
