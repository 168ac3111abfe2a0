"""`tune report`: a study's trials, its winner, and the winner's diff against the baseline."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("report", help="a study's trials, winner and the winner's diff")
    parser.add_argument("study", nargs="?", help="name or folder (default: the newest)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--html", metavar="FILE", help="write the report as one self-contained page")
    parser.add_argument("--open", action="store_true", help="open that page in the browser")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the report, or write it as a page.

    Raises:
        UserError: no such study, or the page cannot be written.
    """
    if args.html or args.open:
        return write_page(args)
    from rich.syntax import Syntax

    from dashboards.console import make_console
    from dashboards.tables import parts_table
    from dashboards.tables import print_summary
    from search_space.candidate import Candidate
    from tuner.records.config_diff import config_diff
    from tuner.records.layout import find_folder
    from tuner.records.summary import summarise
    from tuner.records.tracking.report import tracking_lines

    folder = find_folder(args.study)
    summary = summarise(folder)
    by_number = {trial["number"]: trial for trial in summary.trials}
    winner = by_number.get(summary.winner) if summary.winner is not None else None
    baseline = by_number.get(summary.baseline) if summary.baseline is not None else None
    changed: dict[str, Any] = {}
    diff: list[str] = []
    if winner is not None and baseline is not None:
        changed = Candidate.from_json(winner["candidate"]).changed(Candidate.from_json(baseline["candidate"]))
        diff = config_diff(folder.trial(baseline["number"]), folder.trial(winner["number"]))
    if args.json:
        print(json.dumps({**summary.to_json(), "changed_knobs": changed, "config_diff": diff}))
        return 0
    console = make_console()
    print_summary(console, summary, folder)
    for line in tracking_lines(folder):
        console.print(line, markup=False)
    for line in move_lines(summary.trials):
        console.print(line, markup=False)
    if winner is None:
        return 0
    console.print()
    for trial in dict.fromkeys(t["number"] for t in (baseline, winner) if t is not None and t.get("breakdown")):
        console.print(parts_table(by_number[trial]))
        console.print()
    if not changed:
        console.print("the winner is the baseline: nothing measured beat it beyond noise", markup=False)
        return 0
    console.print("what the winner changes against the baseline:", markup=False)
    before = (baseline or {}).get("candidate", {})
    for knob, value in changed.items():
        console.print(f"  {knob}: {before.get(knob)} → {value}", markup=False)
    console.print()
    console.print(Syntax("\n".join(diff), "diff", background_color="default"))
    return 0


def write_page(args: argparse.Namespace) -> int:
    """Write the page; without a name for it, into the study's folder.

    Raises:
        UserError: no such study, or the file cannot be written.
    """
    from dashboards.page import report_page
    from search_space.errors import UserError
    from tuner.records.layout import find_folder

    folder = find_folder(args.study)
    path = Path(args.html).expanduser() if args.html else folder.root / "report.html"
    text = report_page(folder)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {path}: cannot be written: {error.strerror}") from None
    size = path.stat().st_size
    if args.json:
        print(json.dumps({"study": folder.name, "html": str(path.resolve()), "bytes": size}))
    else:
        print(f"{path} ({size / 1e6:.1f} MB, one file, needs no network)")
    if args.open:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
    return 0


def move_lines(trials: list[dict[str, Any]]) -> list[str]:
    """Which trials came from which part of which breakdown, what became of them, and what no knob can mend."""
    by_number = {trial["number"]: trial for trial in trials}
    lines = []
    for trial in trials:
        move = trial.get("move")
        if not move:
            continue
        origin = by_number.get(move["from_trial"], {})
        outcome = trial["state"]
        if trial.get("step_time_s") and origin.get("step_time_s"):
            outcome = f"step time {100 * (trial['step_time_s'] / origin['step_time_s'] - 1):+.1f}% against it"
        lines.append(
            f"trial {trial['number']} came from trial {move['from_trial']}: {move['part'].replace('_', ' ')} → "
            f"{move['move']} ({move['reason']}); {outcome}"
        )
    measured = [trial for trial in trials if trial["state"] == "measured"]
    best = min(measured, key=lambda trial: trial["step_time_s"], default=None)
    if best is not None and best.get("hopeless_part"):
        lines.append(f"first of all: {best['hopeless_part']}")
    return lines
