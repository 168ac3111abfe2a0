"""`tune list`: the studies of this folder."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("list", help="studies in this folder")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print one line a study, oldest first."""
    from rich.table import Table

    from dashboards.console import make_console
    from tuner.records.layout import list_folders
    from tuner.records.layout import studies_root
    from tuner.records.summary import summarise
    from tuner.records.units import format_budget

    summaries = [summarise(folder) for folder in list_folders()]
    if args.json:
        keys = ("study", "folder", "state", "ended", "baseline", "winner", "budget_device_s", "spent_device_s")
        rows = [{key: summary.to_json()[key] for key in keys} for summary in summaries]
        print(json.dumps({"root": str(studies_root()), "studies": rows}))
        return 0
    console = make_console()
    if not summaries:
        console.print(f"no study in {studies_root()}; start one with `tune start --budget 0.3-gpu-hours`", markup=False)
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("study", "state", "model", "trials", "spent", "winner"):
        table.add_column(name)
    for summary in summaries:
        winner = next((t["label"] for t in summary.trials if t["number"] == summary.winner), "")
        spent = f"{format_budget(summary.spent_device_s)} of {format_budget(summary.budget_device_s)}"
        table.add_row(summary.study, summary.state, summary.facts["model"], str(len(summary.trials)), spent, winner)
    console.print(table)
    return 0
