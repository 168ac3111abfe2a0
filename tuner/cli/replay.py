"""`tune replay`: search strategies against measured tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("replay", help="search strategies against measured tables, at no device's cost")
    parser.add_argument("tables", nargs="+", metavar="TABLE.csv", help="tables under the common header")
    parser.add_argument(
        "--strategy",
        default="ours,ledger,random",
        metavar="S,S…",
        help="some of ours, ledger, tpe, gp, random (default ours,ledger,random)",
    )
    parser.add_argument(
        "--seeds", type=int, default=20, metavar="N", help="replays of what draws at random (default 20)"
    )
    parser.add_argument(
        "--least", type=int, default=8, metavar="N", help="measured rows of a group to count (default 8)"
    )
    parser.add_argument("--startup", type=float, default=180.0, metavar="S", help="start-up of a trial (default 180 s)")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="steps of a trial (default 100)")
    parser.add_argument("--oom", type=float, default=120.0, metavar="S", help="an out-of-memory trial (default 120 s)")
    parser.add_argument("--budget", help="device-hours that each replay may spend (default: no limit)")
    parser.add_argument("--plot", metavar="FILE.png", help="draw regret against cost")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replay.

    Raises:
        UserError: an unknown strategy, an unreadable table, no group large enough, or a picture that cannot be written.
    """
    from tuner.budget import parse_budget
    from tuner.replay.play import Costs
    from tuner.replay.play import PLENTY
    from tuner.replay.plot import plot
    from tuner.replay.run import replay

    names = [name.strip() for name in args.strategy.split(",") if name.strip()]
    costs = Costs(startup_s=args.startup, steps=args.steps, oom_s=args.oom)
    budget = parse_budget(args.budget) if args.budget else PLENTY
    document, results = replay(
        args.tables, names, args.seeds, costs, args.least, budget, lambda text: print(text, file=sys.stderr)
    )
    if args.plot:
        plot(results, Path(args.plot))
    if args.json:
        print(json.dumps(document))
    else:
        _print(document)
    return 0


def _print(document: dict[str, Any]) -> None:
    from rich.table import Table

    from dashboards.console import make_console

    console = make_console()
    for name, found in document["strategies"].items():
        table = Table(
            "group", "GPUs", "n", "pool", "trials to 1%", "cost / oracle", "regret after 3", "OOMs", title=name
        )
        for group in found["groups"]:
            cost = group["device_s_to_1pct"]
            ratio = cost / group["oracle_device_s"] if cost is not None else None
            numbers = (group["trials_to_1pct"], ratio, group["regret_pct_after"]["3"], group["oom_paid"])
            sizes = (str(group["gpus"]), str(group["n"]), str(group["pool"]))
            table.add_row(group["model"], *sizes, *map(_number, numbers))
        console.print(table)
        for scope, figures in (*found["tables"].items(), ("all", found["overall"])):
            console.print(f"{name}, {scope}: " + ", ".join(f"{key} {_number(value)}" for key, value in figures.items()))


def _number(value: float | None) -> str:
    return "never" if value is None else f"{value:.3g}"
