"""`tune diagnose`: where the missing MFU points went."""

from __future__ import annotations

import argparse
import json
from math import isfinite
from pathlib import Path
from typing import Any

from search_space.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser(
        "diagnose",
        help="where the missing MFU points went: budget against measured, in the order to fix",
        description="Compares what a configuration should take with what it takes. Traces tell every part; an "
        "MFU alone "
        "tells the gap, and where the ledger's own doubt makes it likely.",
    )
    parser.add_argument("source", metavar="STUDY|JOB.toml", help="name or folder of a study, or a job file")
    parser.add_argument(
        "--candidate", metavar="K=V,…", help="what runs (default: a study's winner, a job's [baseline])"
    )
    parser.add_argument("--measured", metavar="MFU|STEP", help="what was measured without a profiler: 32%% or 6.2s")
    parser.add_argument(
        "--trace", nargs="+", type=Path, default=[], metavar="TRACE", help="traces, one per rank, or a folder"
    )
    parser.add_argument("--parts", metavar="PART=S,…", help="parts read elsewhere, seconds a step; others as budgeted")
    parser.add_argument("--ratios", metavar="FILE", help="TOML of ratios behind the budget (as for tune extrapolate)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Diagnose.

    Raises:
        UserError: nothing was measured, or the job, candidate, trace or a figure cannot be used.
    """
    from tuner.evidence.loss_ledger import budget_of
    from tuner.evidence.loss_ledger import from_mfu
    from tuner.evidence.loss_ledger import from_parts
    from tuner.evidence.loss_ledger import from_trace
    from tuner.evidence.loss_ledger import table
    from tuner.evidence.ratios_file import load_ratios

    if args.trace and args.parts:
        raise UserError("diagnose: give --trace or --parts, not both")
    if not (args.trace or args.parts or args.measured):
        raise UserError("diagnose: nothing measured; give --measured 32%, --trace TRACE… or --parts bubble=0.23,…")
    subject, coefficients, carried = _known(args.source, args.candidate)
    given = load_ratios(args.ratios) if args.ratios else []
    ratios = [ratio for ratio in carried if ratio.name not in {g.name for g in given}] + given
    setting = subject.setting
    budget = budget_of(subject.candidate, setting, coefficients, ratios)
    step_s = parse_measured(args.measured, budget.ideal_s) if args.measured else None
    findings: Any = []
    warnings: list[str] = []
    if args.trace:
        found = _traces(args.trace, subject, budget, step_s)
        measured, findings, warnings = from_trace(budget, found, step_s), found.findings, list(found.warnings)
    elif args.parts:
        measured = from_parts(budget, parse_parts(args.parts), step_s)
    else:
        assert step_s is not None
        measured = from_mfu(budget, step_s)
    rows = table(budget, measured, findings)
    whole = budget.ideal_s + sum(measured.values())
    document = {
        "model": setting.shape.name,
        "hardware": setting.hardware.name,
        "devices": setting.num_devices,
        "candidate": subject.candidate.to_json(),
        "label": subject.candidate.label(),
        "basis": "trace" if args.trace else "parts" if args.parts else "mfu",
        "ideal_s": budget.ideal_s,
        "budget_step_s": budget.step_s,
        "budget_step_interval_s": list(budget.step_interval_s),
        "budget_mfu_pct": 100 * budget.ideal_s / budget.step_s,
        "measured_step_s": whole,
        "measured_mfu_pct": 100 * budget.ideal_s / whole,
        "gap_points": 100 * budget.ideal_s / budget.step_s - 100 * budget.ideal_s / whole,
        "inside_budget": budget.step_interval_s[0] <= whole <= budget.step_interval_s[1],
        "rows": rows,
        "at_most_s": budget.at_most_s,
        "warnings": warnings,
    }
    if args.json:
        print(json.dumps(document))
    else:
        _print(document)
    return 0


def parse_measured(text: str, ideal_s: float) -> float:
    """Step time, seconds, from ``32%`` (of the peak) or ``6.2s``.

    Raises:
        UserError: it is neither.
    """
    word = text.strip().lower()
    try:
        if word.endswith("%"):
            mfu = float(word[:-1])
            if 0 < mfu <= 100:
                return 100 * ideal_s / mfu
        elif word.endswith("s"):
            step = float(word[:-1])
            if step > 0 and isfinite(step):
                return step
    except ValueError:
        pass
    raise UserError(f"--measured {text!r}: needs an MFU such as 32% or a step time such as 6.2s")


def parse_parts(text: str) -> dict[str, float]:
    """Parts from ``bubble=0.23,straggler=0.45``.

    Raises:
        UserError: a piece is no such pair.
    """
    found: dict[str, float] = {}
    for piece in filter(None, (one.strip() for one in text.split(","))):
        name, _, value = piece.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            raise UserError(f"--parts: found {piece!r}, needs pairs such as bubble=0.23, in seconds") from None
        if not isfinite(seconds):
            raise UserError(f"--parts: found {piece!r}, needs seconds")
        found[name.strip().replace("-", "_")] = seconds
    return found


def _known(source: str, candidate: str | None) -> tuple[Any, Any, list[Any]]:
    """(what runs, the ledger's coefficients, measured ratios)."""
    from pruning.coefficients import prior
    from search_space.job_file import load_job
    from tuner.evidence.small_run import read_small_run
    from tuner.export.find import find_subject
    from tuner.records.layout import find_folder

    if source.endswith(".toml"):
        if candidate is None and not load_job(source).baseline:
            raise UserError("diagnose: the job has no [baseline]; name what runs with --candidate tp=8,pp=4,…")
        subject = find_subject(source, candidate, False)
        return subject, prior(subject.setting), []
    run_ = read_small_run(find_folder(source))
    return find_subject(source, candidate, False), run_.coefficients, list(run_.ratios)


def _traces(paths: list[Path], subject: Any, budget: Any, step_s: float | None) -> Any:
    from trial_runner.breakdown import break_down
    from trial_runner.breakdown.ideal import ideal_by_rank
    from tuner.cli.breakdown import find_traces

    setting = subject.setting
    return break_down(
        find_traces(paths),
        ideal_by_rank_s=ideal_by_rank(setting, subject.candidate),
        expected={
            part: (max(0.0, budget.low_s[part]), max(0.0, budget.high_s[part]))
            for part in budget.parts_s
            if part != "unexplained"
        },
        measured_step_s=step_s,
        peak_flops=setting.hardware.peak(setting.precision),
        memory_bandwidth=setting.hardware.memory_bandwidth,
    )


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    from dashboards.console import make_console
    from tuner.cli.extrapolate import digits_for

    console = make_console()
    low, high = found["budget_step_interval_s"]
    console.print(
        f"{found['model']} on {found['devices']} {found['hardware']}, {found['label']}: budget "
        f"{found['budget_step_s']:.3g} s "
        f"[{low:.3g}–{high:.3g}], MFU {found['budget_mfu_pct']:.1f}%; measured {found['measured_step_s']:.3g} s, MFU "
        f"{found['measured_mfu_pct']:.1f}%: {found['gap_points']:+.1f} points",
        markup=False,
    )
    if found["inside_budget"]:
        console.print("the measured step lies inside the budget's range: there may be nothing to find", markup=False)
    if found["basis"] == "mfu":
        console.print(
            "from the MFU alone: seconds per part are where the ledger's doubt makes the gap likely, not measurements; "
            "a trace tells them (--trace)",
            markup=False,
        )
    table = Table("", "part", title="In the order to fix", title_justify="left")
    for name in ("budget s", "measured s", "over s", "MFU points"):
        table.add_column(name, justify="right", no_wrap=True)
    digits = digits_for(found["measured_step_s"])
    guessed = "~" if found["basis"] == "mfu" else ""
    for number, row in enumerate(found["rows"], start=1):
        low, high = row["budget_interval_s"]
        table.add_row(
            str(number) if row["cause"] else "",
            row["part"].replace("_", " "),
            f"{row['budget_s']:.{digits}f} [{low:.{digits}f}–{high:.{digits}f}]",
            f"{guessed}{row['measured_s']:.{digits}f}" + ("" if row["outside"] else " ·"),
            f"{row['over_s']:+.{digits}f}",
            f"{row['mfu_points']:+.1f}",
        )
    total = sum(row["mfu_points"] for row in found["rows"])
    over = found["measured_step_s"] - found["budget_step_s"]
    steps = [f"{found[name]:.{digits}f}" for name in ("budget_step_s", "measured_step_s")]
    ends = (*steps, f"{over:+.{digits}f}", f"{total:+.1f}")
    table.add_row("", "all, with ideal", *ends)
    console.print(table)
    console.print("· inside its budget's range", markup=False)
    for number, row in enumerate(found["rows"], start=1):
        if row["cause"]:
            seen = f" ({row['evidence']})" if row["evidence"] else ""
            console.print(
                f"{number}. {row['part'].replace('_', ' ')}, {row['group']}: {row['cause']}{seen} → {row['remedy']}",
                markup=False,
            )
    if found["basis"] == "mfu":
        bounds = ", ".join(f"{part.replace('_', ' ')} {value:.2f} s" for part, value in found["at_most_s"].items())
        console.print(f"at most, with nothing hidden, all recomputed, nothing compiled: {bounds}", markup=False)
    for warning in found["warnings"]:
        console.print(f"note: {warning}", markup=False)
