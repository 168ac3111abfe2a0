"""What `start` and `resume` share: one session of a study with its display and records."""

from __future__ import annotations

import argparse
from collections.abc import Callable
import contextlib
import sys

from dashboards.live import choose_display
from search_space.job import Job
from tuner.cluster.metrics import RayMetrics
from tuner.records.layout import network_mount
from tuner.records.layout import StudyFolder
from tuner.records.summary import summarise
from tuner.records.tracking.tracker import Tracker
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

    ended = False

    def warn(text: str) -> None:
        if ended and args.json:
            # The last line of standard output is study_end; what comes after it is for people.
            print(f"tune: {text}", file=sys.stderr)
        else:
            display({"event": "warning", "text": text})

    mount = network_mount(folder.root)
    if mount is not None and not (args.mlflow_uri or job.records.mlflow_uri):
        warn(
            f"the study lies on {mount}, where SQLite's locks cannot be trusted: Optuna keeps a journal file instead; "
            "MLflow's own store is SQLite, so name a server with --mlflow-uri, or put the study on a local disk"
        )
    records = job.records
    tracker = Tracker(folder, args.mlflow_uri or records.mlflow_uri, records.experiment, warn, records.upload_cap_mib)

    earlier = summarise(folder).to_json()

    # Standard output of --json belongs to events: what Ray and others print meanwhile goes to standard error.
    elsewhere = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
    try:
        with elsewhere, display:
            code, _ = run_study(folder, plan, options, [tracker, RayMetrics(folder.name, earlier, warn), display])
    finally:
        ended = True
        urls = tracker.close()
    if urls:
        display({"event": "mlflow", "urls": urls})
    display.finish(folder, code)
    return code
