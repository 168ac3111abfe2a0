"""`tune resume`: go on with a study, with its old budget or a larger one."""

from __future__ import annotations

import argparse
from typing import Any

from tuner.cli.start import add_run_options


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("resume", help="go on with a study")
    parser.add_argument("study", nargs="?", help="name or folder (default: the newest)")
    add_run_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Reopen a study and run it on.

    Raises:
        UserError: no such study, it is running, or what it rests on changed.
    """
    from search_space.job import Job
    from tuner.budget import parse_budget
    from tuner.cli.running import run_session
    from tuner.records.layout import find_folder
    from tuner.records.lease import lease
    from tuner.records.summary import summarise
    from tuner.study.opening import reopen

    folder = find_folder(args.study)
    job = Job.model_validate_json(folder.job.read_text())
    with lease(folder):
        budget = parse_budget(args.budget) if args.budget else summarise(folder).budget_device_s
        return run_session(folder, lambda: reopen(folder, share_nodes=args.share_nodes), job, budget, args)
