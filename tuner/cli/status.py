"""`tune status`: what a study has done and spent."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("status", help="what a study has done and spent")
    parser.add_argument("study", nargs="?", help="name or folder (default: the newest)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the study's summary.

    Raises:
        UserError: no such study.
    """
    from dashboards.console import make_console
    from dashboards.tables import print_summary
    from tuner.records.layout import find_folder
    from tuner.records.summary import summarise
    from tuner.records.tracking.report import tracking_facts
    from tuner.records.tracking.report import tracking_lines

    folder = find_folder(args.study)
    summary = summarise(folder)
    if args.json:
        print(json.dumps({**summary.to_json(), "tracking": tracking_facts(folder)}))
        return 0
    console = make_console()
    console.print(f"study {summary.study} ({summary.state}) in {summary.folder}", markup=False)
    facts = summary.facts
    console.print(
        f"{facts['function']} on {facts['num_devices']} × {facts['hardware']}, sequence {facts['seq_len']}, "
        f"global batch {facts['global_batch_seqs']}, {facts['precision']}, {facts['steps']} measured steps a trial",
        markup=False,
    )
    print_summary(console, summary, folder)
    for line in tracking_lines(folder):
        console.print(line, markup=False)
    if summary.state == "interrupted":
        console.print(f"go on with: tune resume {summary.study}", markup=False)
    return 0
