"""`tune sync`: send the records that wait in a study's folder to its tracking server."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("sync", help="send a study's waiting records to MLflow")
    parser.add_argument("study", nargs="?", help="name or folder (default: the newest)")
    parser.add_argument("--mlflow-uri", help="another server than the study's own; it is told everything")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="longest time (default: 600)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Send what waits and close what a crash left open.

    Raises:
        UserError: no such study, it runs (its own process sends), or the server does not take records.
    """
    from tuner.records.layout import find_folder
    from tuner.records.tracking.views import page_urls

    folder = find_folder(args.study)
    state = send_waiting(folder, args.mlflow_uri, args.timeout).state
    urls = {}
    if state.uri.startswith("http"):
        urls = page_urls(state.uri, state.experiment, state.parent, list(state.trials.values()), state.study_id)
    facts = {
        "study": folder.name,
        "server": state.uri,
        "trials": len(state.trials),
        "late_trials": sorted(state.late),
        "refused": state.refused,
        "left_out": state.left_out,
        "status": state.status,
        "urls": urls,
    }
    if args.json:
        print(json.dumps(facts))
        return 0
    print(f"{folder.name}: MLflow has the study and {len(state.trials)} trials; the study's run is {state.status}")
    for text in (*state.refused, *state.left_out):
        print(f"  {text}", file=sys.stderr)
    for name, url in urls.items():
        print(f"{name:14} {url}")
    return 0


def send_waiting(folder: Any, uri: str | None, timeout_s: float) -> Any:
    """Send what waits; returns the :class:`~tuner.records.tracking.sender.Sender` that did.

    Args:
        folder: the study's folder.
        uri: a server; None for the one of the study's job, else the study's own store.
        timeout_s: longest time (seconds).

    Raises:
        UserError: the study runs, or the server does not take records.
    """
    from search_space.errors import UserError
    from search_space.job import Job
    from tuner.records.lease import is_held
    from tuner.records.tracking.remote import what_kind
    from tuner.records.tracking.report import waiting_in
    from tuner.records.tracking.tracker import describe_trouble
    from tuner.records.tracking.tracker import local_uri
    from tuner.records.tracking.tracker import send_now

    if is_held(folder):
        raise UserError(f"study {folder.name} is running; its own process sends its records")
    records = Job.model_validate_json(folder.job.read_text()).records
    address = uri or records.mlflow_uri or local_uri(folder)
    try:
        return send_now(folder, address, records.experiment, records.upload_cap_mib, timeout_s)
    except (TimeoutError, BlockingIOError) as error:
        raise UserError(f"sync {folder.name}: {error}; `tune sync {folder.handle}` goes on where it stopped") from None
    except Exception as error:
        waiting = waiting_in(folder)
        text = describe_trouble(address, what_kind(error), error, waiting, folder.handle)
        raise UserError(f"sync {folder.name}: {text}") from None
