"""A study that is started again by a scheduler: the same one goes on, and nothing is spent twice."""

from __future__ import annotations

import argparse
import contextlib
import sys

from dashboards.live import choose_display
from search_space.errors import UserError
from search_space.job import Job
from tuner.cli.running import run_session
from tuner.records.layout import StudyFolder
from tuner.records.summary import summarise
from tuner.study.opening import reopen


def go_on(folder: StudyFolder, job: Job, budget_s: float, args: argparse.Namespace) -> int:
    """Go on with a study that began; one that has its winner is only reported.

    Args:
        folder: the study's folder, whose lease is held.
        job: the job that was asked for.
        budget_s: device-seconds for the whole study, earlier sessions included.
        args: the command's options.

    Raises:
        UserError: the study is another job's, or what it rests on changed.
    """
    began = Job.model_validate_json(folder.job.read_text())
    differing = different_sections(began, job)
    if differing:
        raise UserError(
            f"study {folder.name} began with another job ({', '.join(differing)} differ); give this one another --study"
        )
    summary = summarise(folder)
    # Of a study that ended with a winner only a larger budget asks for more.
    if summary.state == "done" and summary.winner is not None and budget_s <= summary.budget_device_s:
        display = choose_display(as_json=args.json, plain=args.plain or not sys.stdout.isatty())
        with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext(), display:
            display({"event": "study_end", **summary.to_json(), "reason": summary.ended})
        display.finish(folder, 0)
        return 0
    return run_session(folder, lambda: reopen(folder, share_nodes=args.share_nodes), began, budget_s, args)


def different_sections(one: Job, other: Job) -> list[str]:
    """Sections in which two jobs differ; where records go and what may be spent may change on the way."""
    return [
        name
        for name in Job.model_fields
        if name not in ("records", "budget") and getattr(one, name) != getattr(other, name)
    ]
