"""`tune watch`: a live job against its committed claim."""

from __future__ import annotations

import argparse
from datetime import datetime
import json
from pathlib import Path
import sys
import time
from typing import Any

from search_space.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser(
        "watch",
        help="a live job against its committed claim: holds, regressed and since when, or cannot tell",
        description="Reads the steps of a running job and compares them with what its committed configuration "
        "claims. Exit "
        "codes: 0 the claim holds, 4 regressed, 5 cannot tell (too few steps, or too wide an interval), 2 bad input.",
    )
    parser.add_argument(
        "job",
        metavar="LOG_OR_RUN",
        help="torchtitan's console log, its structured log (*.jsonl), a folder of either, or an MLflow run id",
    )
    parser.add_argument(
        "--claim",
        required=True,
        metavar="FILE|COMMIT",
        help="config file or change table of a tune commit, a JSON record, or a commit or branch",
    )
    parser.add_argument("--repo", type=Path, metavar="FOLDER", help="repository of the commit (default: here)")
    parser.add_argument(
        "--trace", nargs="+", type=Path, default=[], metavar="TRACE", help="traces of now: name the part"
    )
    parser.add_argument(
        "--claim-trace",
        nargs="+",
        type=Path,
        default=[],
        metavar="TRACE",
        help="traces of the claim (default: its own)",
    )
    parser.add_argument("--skip", type=int, default=10, metavar="N", help="warm-up steps after each start (default 10)")
    parser.add_argument("--follow", action="store_true", help="go on reading until it has regressed, or --for is over")
    parser.add_argument(
        "--every", type=float, default=10.0, metavar="S", help="with --follow: seconds between readings"
    )
    parser.add_argument("--for", dest="limit_s", type=float, metavar="S", help="with --follow: longest time, seconds")
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow server (default: MLflow's own)")
    parser.add_argument("--metric", metavar="NAME", help="MLflow metric of step time or throughput")
    parser.add_argument("--json", action="store_true", help="one JSON document (with --follow: one a line)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Watch; the exit code says the verdict.

    Raises:
        UserError: log, claim or trace cannot be used.
    """
    from tuner.evidence.expected import find_expectation
    from tuner.evidence.watch import EXIT

    if args.skip < 0 or args.every <= 0:
        raise UserError("watch: --skip needs at least 0, --every more than 0 seconds")
    claim = find_expectation(args.claim, args.repo)
    began = time.monotonic()
    shown = None
    while True:
        document = _look(args, claim)
        verdict = document["verdict"]
        if not args.follow or verdict != shown:
            print(json.dumps(document), flush=True) if args.json else _print(document)
            shown = verdict
        over = args.limit_s is not None and time.monotonic() - began >= args.limit_s
        if not args.follow or over or verdict == "regressed":
            return EXIT[verdict]
        time.sleep(args.every)


def _look(args: argparse.Namespace, claim: Any) -> dict[str, Any]:
    from tuner.evidence.run_log import read_run
    from tuner.evidence.watch import watch

    try:
        points = read_run(args.job, args.tracking_uri, args.metric)
    except UserError:
        # A job that has just begun has logged nothing yet.
        if not args.follow or not Path(args.job).expanduser().exists():
            raise
        points = []
    watched = watch(points, claim, args.skip)
    document = watched.to_json(claim)
    document["parts"] = None
    if args.trace and watched.verdict == "regressed":
        document["parts"] = _parts(args.trace, args.claim_trace, claim)
    return document


def _parts(now: list[Path], before: list[Path], claim: Any) -> dict[str, Any]:
    """Seconds by part now and in the claim's trace, and the part that grew most."""
    known = before or ([Path(claim.trace)] if claim.trace and Path(claim.trace).exists() else [])
    seen = _mean(now)
    found: dict[str, Any] = {"now_s": seen, "claim_s": None, "grew": None, "more_s": None}
    if known:
        was = _mean(known)
        grew = {part: seen[part] - was[part] for part in seen}
        part = max(grew, key=lambda name: grew[name])
        found |= {"claim_s": was, "grew": part, "more_s": grew[part]}
    return found


def _mean(paths: list[Path]) -> dict[str, float]:
    """Seconds a step by part, useful time and what is unexplained, the mean over ranks and steps."""
    from trial_runner.breakdown import break_down
    from tuner.cli.breakdown import find_traces
    from tuner.study.facts import mean_over_ranks

    found = mean_over_ranks(break_down(find_traces(paths)))
    if found is None:
        raise UserError(f"--trace {paths[0]}: no complete step in it")
    # Without an ideal time useful is all compute: slower kernels show there.
    parts: dict[str, float] = dict(found["parts_s"]) | {"unexplained": found["unexplained_s"]}
    parts["kernel_efficiency"] += found["useful_s"]
    return parts


def _print(document: dict[str, Any]) -> None:
    print(f"{document['verdict']}: {document['why']}")
    claim = document["claim"]
    words = [f"step {claim['step_time_s']:.4g} s"] if claim["step_time_s"] else []
    if claim["tokens_per_s_per_device"]:
        words.append(f"{claim['tokens_per_s_per_device']:.4g} tokens/s/device")
    if claim["mfu_pct"]:
        words.append(f"MFU {claim['mfu_pct']:.1f}%")
    print(f"claim ({claim['source']}): {', '.join(words)}")
    for stretch in document["stretches"]:
        low, high = stretch["interval"]
        when = ""
        if stretch["unix_s"]:
            when = f" from {datetime.fromtimestamp(stretch['unix_s']).isoformat(' ', 'seconds')}"
        print(
            f"  steps {stretch['first_step']}–{stretch['last_step']}{when}: {100 * (stretch['ratio'] - 1):+.1f}% "
            f"[{100 * (low - 1):+.1f}, {100 * (high - 1):+.1f}] ({stretch['count']} logged)"
        )
    for entry in document["grew"][:3]:
        print(f"  phase {entry['phase']}: {entry['more_s']:+.4g} s a step since")
    parts = document["parts"]
    if parts is not None and parts["grew"]:
        print(
            f"part that grew: {parts['grew'].replace('_', ' ')}, {parts['more_s']:+.4g} s a step against the "
            "claim's trace"
        )
    elif parts is not None:
        largest = sorted(parts["now_s"].items(), key=lambda pair: -pair[1])[:3]
        words = [f"{name.replace('_', ' ')} {seconds:.4g} s" for name, seconds in largest]
        print(
            f"traced now: {', '.join(words)}; the claim's own trace is not here (--claim-trace), so nothing says "
            "what grew"
        )
    sys.stdout.flush()
