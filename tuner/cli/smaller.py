"""`tune smaller`: a trial on fewer replicas of this machine, corrected to the job's full scale."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("smaller", help="a trial on fewer replicas, corrected to full scale")
    parser.add_argument("job", metavar="JOB.toml", help="job file of the full scale")
    parser.add_argument("--candidate", metavar="K=V,…", help="knobs at full scale (default: the baseline)")
    parser.add_argument("--devices", type=int, required=True, metavar="N", help="devices of the smaller trial, here")
    parser.add_argument("--layers", type=int, metavar="L", help="layers that are kept (default all)")
    parser.add_argument("--steps", type=int, default=20, metavar="S", help="measured steps (default 20)")
    parser.add_argument("--timeout", type=float, default=600, metavar="S", help="longest wall time of a trial")
    parser.add_argument("--full", action="store_true", help="run the full scale here too, and learn the error")
    parser.add_argument("--history", metavar="FILE", help="file of earlier pairs; --full adds to it")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run it.

    Raises:
        UserError: bad job or candidate, the smaller scale does not fit it, or a trial failed.
    """
    from pruning.smaller import shrink
    from search_space.job_file import load_job
    from tuner.cli.dry_run import choose_candidate
    from tuner.smaller import judge
    from tuner.smaller import read_history
    from tuner.smaller import run_here
    from tuner.study.plan import make_plan

    plan = make_plan(load_job(args.job))
    candidate = choose_candidate(plan.job, args.candidate, plan.setting.num_devices)
    smaller = shrink(candidate, plan.setting, args.devices, args.layers)
    history = Path(args.history) if args.history else None
    print(f"running {smaller.candidate.label()} on {args.devices} devices …", file=sys.stderr)
    measured = run_here(plan, smaller.candidate, smaller.setting, args.steps, args.timeout)
    found = judge(smaller, measured, read_history(history))
    if args.full:
        print(f"running {candidate.label()} on {plan.setting.num_devices} devices …", file=sys.stderr)
        full = run_here(plan, candidate, plan.setting, args.steps, args.timeout)
        found["full_step_time_s"] = full.step_time_s
        found["error_pct"] = 100 * (found["step_time_s"] / full.step_time_s - 1)
        if history:
            pair = {"label": found["label"], "corrected_s": found["corrected_s"], "full_s": full.step_time_s}
            with history.open("a") as file:
                file.write(json.dumps(pair) + "\n")
    if args.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0


def _print(found: dict[str, Any]) -> None:
    from dashboards.console import make_console

    console = make_console()
    low, high = found["step_time_interval_s"]
    lines = [
        f"smaller trial of {found['label']}: {found['ran_label']} on {found['ran_devices']} of "
        f"{found['full_devices']} devices, {found['ran_layers']} of {found['full_layers']} layers",
        f"measured {found['ran_step_time_s']:.4g} s a step, × {found['correction']:.3g} by the ledger",
        f"at full scale {found['step_time_s']:.4g} s [{low:.4g}, {high:.4g}], error learned from "
        f"{found['correction_error']['pairs']} full trials",
    ]
    if "error_pct" in found:
        lines.append(f"really {found['full_step_time_s']:.4g} s: off by {found['error_pct']:+.1f}%")
    for line in lines:
        console.print(line, markup=False)
