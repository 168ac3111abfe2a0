"""Unchanged code, verified again and again: ``python benchmarks/verifications.py tune/STUDY --runs 20``.

Runs `tune verify` that often on a claim of this machine and looks at all verifications of it in the folder of studies
(``--runs 0``: only that): how many held, how step times moved from the claim's, and how well the control beside each
run follows them, by their correlation and the slope of log step time over log control. Prints one JSON line.
"""

from __future__ import annotations

import argparse
from collections import Counter
import contextlib
import json
import os
from pathlib import Path
import sys
from typing import Any

import numpy as np

from tuner.cli import main as tune
from tuner.records.journal import read_journal
from tuner.records.layout import list_folders
from tuner.records.layout import studies_root
from tuner.records.summary import summarise


def on_record(study: str) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """The findings of every verification of a study's claim, oldest first, and the measured runs of each."""
    findings, runs = [], []
    for folder in list_folders(studies_root()):
        ends = [event for event in read_journal(folder.journal) if event["event"] == "verify"]
        if ends and ends[-1]["claim"].split(":")[0] == study and ends[-1]["finding"]:
            findings.append(ends[-1]["finding"])
            runs.append([trial for trial in summarise(folder).trials if trial["state"] == "measured"])
    return findings, runs


def main() -> None:
    """Verify and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="tune/STUDY, as `tune verify` takes it")
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    for number in range(args.runs):
        with contextlib.redirect_stdout(sys.stderr):
            code = tune(["verify", args.commit, "--json"])
        print(f"{number + 1} of {args.runs}: exit code {code}", file=sys.stderr, flush=True)
    findings, runs = on_record(Path(args.commit).name)
    if not findings:
        raise SystemExit(f"no verification of {args.commit} in {studies_root()}")
    trials = [trial for one in runs for trial in one if "control_s" in trial]
    document: dict[str, Any] = {
        "verifications": len(findings),
        "verdicts": dict(Counter(finding["verdict"] for finding in findings)),
        "change_pct": [round(finding["change_pct"], 1) for finding in findings],
        "runs": sum(map(len, runs)),
        "load": round(os.getloadavg()[0], 2),
    }
    if len(trials) > 2:
        steps, control = (np.log([trial[key] for trial in trials]) for key in ("step_time_s", "control_s"))
        document |= {
            "step_sd_pct": round(100 * float(steps.std()), 1),
            "control_sd_pct": round(100 * float(control.std()), 1),
            "correlation": round(float(np.corrcoef(steps, control)[0, 1]), 2),
            "slope": round(float(np.polyfit(control, steps, 1)[0]), 2),
        }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
