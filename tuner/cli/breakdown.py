"""`tune breakdown`: where the time of a traced step went, in seven parts that add up."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
import sys
from typing import Any

from search_space.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser(
        "breakdown",
        help="where the missing MFU of a profiler trace went",
        description="Reads traces of torch.profiler (JSON, also .gz) or Nsight Systems (SQLite export), one per rank, "
        "and gives every microsecond of a step to useful work or to one of seven losses.",
    )
    parser.add_argument(
        "traces", nargs="+", metavar="TRACE", type=Path, help="trace of one rank, or a folder with one trace per rank"
    )
    ideal = parser.add_mutually_exclusive_group()
    ideal.add_argument("--job", metavar="JOB.toml", help="job file: ideal time and expected parts come from it")
    ideal.add_argument("--ideal-s", type=float, metavar="S", help="ideal time of a rank: model FLOP / peak, seconds")
    parser.add_argument("--candidate", metavar="K=V,…", help="what the job ran with (default: its baseline)")
    parser.add_argument("--step", default="all", metavar="N|all|median", help="which steps (default: all)")
    parser.add_argument("--measured-step-s", type=float, metavar="S", help="step time without the profiler, seconds")
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="peak of the device, for GEMM efficiency")
    parser.add_argument("--expected", metavar="FILE", type=Path, help='expected parts: JSON {"bubble": [low, high], …}')
    parser.add_argument("--clocks", metavar="FILE", type=Path, help="samples of the clock sidecar (JSONL) of the node")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write a self-contained page as well")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Break the traces down and show it.

    Raises:
        UserError: a trace, the job or an option cannot be used.
    """
    from trial_runner.breakdown import break_down

    options: dict[str, Any] = {"ideal_s": args.ideal_s, "measured_step_s": args.measured_step_s}
    if args.job is not None:
        options |= from_job(args.job, args.candidate)
    elif args.candidate is not None:
        raise UserError("--candidate belongs to a job; give --job too")
    if args.expected is not None:
        options["expected"] = read_expected(args.expected)
    if args.peak_tflops is not None:
        if not 0 < args.peak_tflops < math.inf:
            raise UserError(f"--peak-tflops {args.peak_tflops}: give a positive number of TFLOP/s")
        options["peak_flops"] = args.peak_tflops * 1e12
    if args.clocks is not None:
        from trial_runner.clocks import read_clocks

        options["clocks"] = read_clocks(args.clocks)
    result = break_down(find_traces(args.traces), step=args.step, **options)
    if args.html is not None:
        from trial_runner.breakdown.html import page

        try:
            args.html.write_text(page(result), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--html {args.html}: it cannot be written ({error.strerror})") from None
        print(f"wrote {args.html}", file=sys.stderr)
    if args.json:
        json.dump(result.to_json(), sys.stdout, allow_nan=False)
        print()
        return 0
    from dashboards.console import make_console
    from trial_runner.breakdown.render import show

    show(result, make_console())
    return 0


def find_traces(paths: list[Path]) -> list[Path]:
    """The given files, and the traces in the given folders.

    Raises:
        UserError: a folder holds no trace.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(file for kind in ("*.json", "*.json.gz", "*.sqlite") for file in path.glob(kind))
        inside = [file for file in inside if "trace" in file.name or "rank" in file.name]
        if not inside:
            raise UserError(f"{path}: no trace in this folder; names such as rank0_trace.json.gz are looked for")
        found += inside
    return found


def read_expected(path: Path) -> dict[str, tuple[float, float]]:
    """Expected ranges from a JSON object of part to [low, high], seconds.

    Raises:
        UserError: no such file, or something else in it.
    """
    try:
        values = json.loads(path.read_text())
        return {str(part): (float(low), float(high)) for part, (low, high) in values.items()}
    except OSError as error:
        raise UserError(f"--expected {path}: it cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UserError(f'--expected {path}: it needs JSON such as {{"bubble": [0.1, 0.3]}}, in seconds') from None


def from_job(path: str, candidate: str | None) -> dict[str, Any]:
    """Ideal time by rank, peak and the ledger's expected parts for a job.

    A part's range is its price times and over the 90% factor of the step time. A job that is a bare shape and names
    neither a baseline nor a candidate gives the ideal time alone.

    Raises:
        UserError: the job cannot be used, or the candidate is none.
    """
    import numpy as np

    from pruning.ledger.prices import price
    from search_space.job_file import load_job
    from search_space.pool import Pool
    from trial_runner.breakdown.ideal import ideal_by_rank

    setting, ran = _resolve(load_job(path), candidate)
    roof = {
        "peak_flops": setting.hardware.peak(setting.precision),
        "memory_bandwidth": setting.hardware.memory_bandwidth,
    }
    if ran is None:
        return {"ideal_s": setting.ideal_s, **roof}
    prices = price(Pool.from_candidates([ran]), setting)
    spread = float(np.exp(1.645 * prices.log_sigma[0]))
    return {
        "ideal_by_rank_s": ideal_by_rank(setting, ran),
        **roof,
        "expected": {part: (float(row[0]) / spread, float(row[0]) * spread) for part, row in prices.parts_s.items()},
    }


def _resolve(job: Any, candidate: str | None) -> tuple[Any, Any]:
    """Setting of a job and what ran: the candidate asked for, else the baseline, else None.

    What the job file does not say (the kind of device, the user's own model) is found on this machine, as for a study.
    """
    from search_space.resolve import setting_from_job
    from tuner.cli.explain import candidate_from

    text = candidate or ",".join(f"{knob}={value}" for knob, value in job.baseline.items())
    plan = None
    try:
        setting = setting_from_job(job)
    except UserError:
        if job.model.torchtitan is None:
            raise
        plan = _plan(job)
        setting = plan.setting
    if text:
        return setting, candidate_from(text, setting.framework, setting.num_devices)
    if job.model.torchtitan is None:
        return setting, None
    return setting, (plan or _plan(job)).baseline


def _plan(job: Any) -> Any:
    from tuner.study.plan import make_plan

    return make_plan(job)
