"""`tune start`: find the fastest configuration within a budget."""

from __future__ import annotations

import argparse
import contextlib
from functools import partial
import importlib.resources
from pathlib import Path
from typing import Any

from search_space.errors import UserError
from search_space.job import Job
from search_space.job_file import load_job
from search_space.job_file import parse_job


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("start", help="find the fastest configuration within a budget")
    parser.add_argument("job", nargs="?", metavar="JOB.toml", help="job file; absent: torchtitan's llama3 debug model")
    parser.add_argument("--study", help="name or folder of the new study (default: model and time)")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="try out placement, budget and records: ranks hold devices and report predictions, nothing is trained",
    )
    parser.add_argument(
        "--from",
        dest="sources",
        nargs="+",
        default=[],
        metavar="STUDY",
        help="earlier studies on the same devices and versions, to start from what they calibrated",
    )
    parser.add_argument(
        "--or-resume",
        action="store_true",
        help="go on with --study if it began already, by the budget it has left: for schedulers that start a job again",
    )
    add_run_options(parser)
    parser.set_defaults(run=run)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Options that `start` and `resume` share."""
    parser.add_argument(
        "--budget", help="device-hours in all: 40-gpu-hours, 90-gpu-minutes (a device is a GPU, or a CPU slot)"
    )
    parser.add_argument("--address", help="address of a running Ray cluster, or auto (default: a local Ray)")
    parser.add_argument("--share-nodes", action="store_true", help="several gangs on one node; disturbs timing")
    parser.add_argument("--mlflow-uri", help="MLflow tracking server (default: a store in the study folder)")
    parser.add_argument("--commit-to", help="git repository for the winner's branch (default: one in the study folder)")
    parser.add_argument("--plain", action="store_true", help="one line per event instead of a live table")
    parser.add_argument("--json", action="store_true", help="one JSON object per event on standard output")


def with_options(job: Job, args: argparse.Namespace) -> Job:
    """The job with the command line's options and absolute paths in it, so that a resumed study needs neither."""
    records, model = job.records, job.model
    commit_to = args.commit_to or records.commit_to
    changes = {
        "commit_to": str(Path(commit_to).expanduser().resolve()) if commit_to else None,
        "mlflow_uri": args.mlflow_uri or records.mlflow_uri,
    }
    update = {"records": records.model_copy(update=changes)}
    if model.path is not None:
        path = str(Path(model.path).expanduser().resolve())
        return job.model_copy(update={**update, "model": model.model_copy(update={"path": path})})
    return job.model_copy(update=update)


def embedded_job() -> Job:
    """The job that `tune start` runs without a job file."""
    from trial_runner import devices

    text = importlib.resources.files("search_space").joinpath("default_job.toml").read_text()
    job = parse_job(text, name="the embedded default job")
    # Two devices are enough to see every kind of parallelism, and keep the budget of a first look small.
    found = devices.num_gpus() or devices.num_cpu_slots()
    return job.model_copy(update={"cluster": job.cluster.model_copy(update={"gpus_per_node": min(2, found)})})


def run(args: argparse.Namespace) -> int:
    """Create a study and run it.

    Raises:
        UserError: bad budget, bad job, unreadable model, or no fitting cluster.
    """
    from tuner.budget import parse_budget
    from tuner.cli.again import go_on
    from tuner.cli.running import run_session
    from tuner.cluster.slurm import allocation
    from tuner.evidence.commit import check_commit_target
    from tuner.records.layout import find_folder
    from tuner.records.layout import named_folder
    from tuner.records.layout import new_folder
    from tuner.records.lease import forget
    from tuner.records.lease import lease
    from tuner.study.opening import create

    job = load_job(args.job) if args.job else embedded_job()
    if args.budget is not None:
        budget = parse_budget(args.budget)
    elif job.budget.gpu_hours is not None:
        budget = job.budget.gpu_hours * 3600
    else:
        raise UserError("start needs a budget: --budget 40-gpu-hours, or gpu_hours under [budget] in the job file")
    job = with_options(job, args)
    if args.address is None and "nodes" not in job.cluster.model_fields_set:
        found = allocation()
        nodes = len(found.nodes) if found is not None else 1
        job = job.model_copy(update={"cluster": job.cluster.model_copy(update={"nodes": nodes})})
    if args.rehearse:
        job = job.model_copy(update={"measure": job.measure.model_copy(update={"rehearse": True})})
    model = job.model.torchtitan or job.model.name or "model"
    sources = [find_folder(name) for name in args.sources]
    if args.or_resume and args.study is None:
        raise UserError("--or-resume needs --study NAME, to know which one to go on with")
    folder = named_folder(args.study) if args.or_resume else new_folder(args.study, model.split(":")[-1])
    check_commit_target(job.records.commit_to)
    try:
        with lease(folder):
            # Only the holder of the lease may ask: a process that waited for it finds what the last holder left.
            if folder.facts.exists():
                return go_on(folder, job, budget, args)
            begin = partial(create, folder, job, sources, share_nodes=args.share_nodes)
            return run_session(folder, begin, job, budget, args)
    finally:
        if not folder.facts.exists():
            # Nothing came of it: a request that could not be served leaves no empty study behind.
            forget(folder)
            folder.transfer.unlink(missing_ok=True)
            folder.job.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.root.rmdir()
