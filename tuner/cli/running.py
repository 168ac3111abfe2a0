"""What `start` and `resume` share: one session of a study with its display and records."""

from __future__ import annotations

import argparse
from collections.abc import Callable
import contextlib
import sys
from typing import Any

from dashboards.live import choose_display
from search_space.job import Job
from tuner.cluster.metrics import RayMetrics
from tuner.records.layout import network_mount
from tuner.records.layout import StudyFolder
from tuner.records.mlflow_sink import MlflowSink
from tuner.records.summary import summarise
from tuner.study.plan import StudyPlan
from tuner.study.run import run_study
from tuner.study.run import RunOptions


def run_session(
    folder: StudyFolder, make: Callable[[], StudyPlan], job: Job, budget_s: float, args: argparse.Namespace
) -> int:
    """Plan, run, show and record; returns the exit code."""
    display = choose_display(as_json=args.json, plain=args.plain or not sys.stdout.isatty())
    display({"event": "planning", "study": folder.name, "budget_device_s": budget_s})
    plan = make()
    options = RunOptions(
        budget_device_s=budget_s,
        address=args.address,
        share_nodes=args.share_nodes,
        commit_to=args.commit_to or job.records.commit_to,
    )

    def warn(text: str) -> None:
        display({"event": "warning", "text": text})

    mount = network_mount(folder.root)
    if mount is not None and not (args.mlflow_uri or job.records.mlflow_uri):
        warn(
            f"the study lies on {mount}, where SQLite's locks cannot be trusted: Optuna keeps a journal file instead; "
            "MLflow's own store is SQLite, so name a server with --mlflow-uri, or put the study on a local disk"
        )
    sink = MlflowSink(folder, args.mlflow_uri or job.records.mlflow_uri, job.records.experiment, warn)

    earlier = summarise(folder).to_json()

    def record(event: dict[str, Any]) -> None:
        sink(event)

    # Standard output of --json belongs to events: what Ray and others print meanwhile goes to standard error.
    elsewhere = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
    try:
        with elsewhere, display:
            code, _ = run_study(folder, plan, options, [record, RayMetrics(folder.name, earlier, warn), display])
    finally:
        sink.close()
    display.finish(folder, code)
    return code
