"""`tune validate`: the ledger against tables of published measurements, or against dry runs."""

from __future__ import annotations

import argparse
import json
from typing import Any

from search_space.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("validate", help="check the ledger against measurements, or against dry runs")
    parser.add_argument("tables", nargs="*", metavar="TABLE.csv", help="tables under the common header")
    parser.add_argument(
        "--against",
        choices=("tables", "dry-run"),
        default="tables",
        help="dry-run: the real torchtitan program on fake tensors, over shipped cases (default tables)",
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="with dry-run: only cases with this in their name")
    parser.add_argument(
        "--calibrate",
        default="none",
        metavar="none|loo|K",
        help="none: shipped priors; loo: fitted on the other groups of the same framework and hardware; "
        "K: those plus K rows of the group itself (default none)",
    )
    parser.add_argument(
        "--across-scale",
        action="store_true",
        help="predict each model's larger runs from its smallest ones; --calibrate none or loo says what the fit "
        "starts from",
    )
    parser.add_argument(
        "--margins",
        type=float,
        nargs="+",
        default=[0.0, 0.05, 0.1],
        metavar="M",
        help="shares of memory that a verdict leaves free; the first one decides the figures "
        "(default 0, the shipped margin, then 0.05 and 0.1)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Validate.

    Raises:
        UserError: a table cannot be read, or ``--calibrate`` is none of the three.
    """
    if args.against == "dry-run":
        from tuner.cli import validate_dry_run

        return validate_dry_run.run(args)
    if not args.tables:
        raise UserError("validate: name at least one TABLE.csv, or ask --against dry-run")
    if args.across_scale:
        return _across_scale(args)
    from pruning.validate.run import validate

    document = validate(args.tables, args.calibrate, args.margins)
    if args.json:
        print(json.dumps(document))
    else:
        _print(document)
    return 0


def _across_scale(args: argparse.Namespace) -> int:
    from rich.table import Table

    from dashboards.console import make_console
    from pruning.validate.scale import validate_across_scale

    if args.calibrate not in ("none", "loo"):
        raise UserError(f"--across-scale: --calibrate {args.calibrate!r}, needs none or loo")
    document = validate_across_scale(args.tables, args.calibrate)
    if not document["series"]:
        raise UserError("--across-scale: no model of these tables was measured at two device counts")
    if args.json:
        print(json.dumps(document))
        return 0
    console = make_console()
    table = Table("table", "model", "hardware", "seq", "from GPUs", "rows", "to GPUs: median MFU error %", "all")
    for one in document["series"]:
        larger = ", ".join(f"{scale['gpus']}: {scale['mfu_error_pct']:.1f}" for scale in one["larger"])
        first = (one["table"], one["model"], one["hardware"], str(one["seq_len"]), str(one["calibrated_on_gpus"]))
        table.add_row(*first, str(one["calibrated_on_rows"]), larger, f"{one['mfu_error_pct']:.1f}")
    console.print(table)
    overall = dict(document["overall"])
    for name, figures in overall.pop("tables").items():
        console.print(f"{name}: " + ", ".join(f"{_words(key)} {_number(value)}" for key, value in figures.items()))
    for key, value in overall.items():
        console.print(f"{_words(key)}: {_number(value)}")
    return 0


def _print(document: dict[str, Any]) -> None:
    from rich.table import Table

    from dashboards.console import make_console

    console = make_console()
    table = Table("table", "model", "GPUs", "seq", "n", "Spearman", "top-1 %", "top-3 %", "step error %", "best")
    for group in document["groups"]:
        if group["n"] < 2:
            continue
        numbers = [
            _number(group[key]) for key in ("spearman", "top1_regret_pct", "top3_regret_pct", "step_time_mape_pct")
        ]
        best = "rejected" if group["best_rejected"] else ""
        table.add_row(
            group["table"], group["model"], str(group["gpus"]), str(group["seq_len"]), str(group["n"]), *numbers, best
        )
    console.print(table)
    overall = dict(document["overall"])
    for name in ("tables", "memory_mape_pct_by_table", "feasibility_by_margin"):
        for key, value in overall.pop(name).items():
            words = value if isinstance(value, dict) else {"memory_mape_pct": value}
            console.print(f"{key}: " + ", ".join(f"{_words(k)} {_number(v)}" for k, v in words.items()))
    for key, value in overall.items():
        if value not in (None, {}):
            console.print(f"{_words(key)}: {_number(value)}")
    reasons: dict[str, int] = {}
    for row in document["unpriced"]:
        reasons[row["why"]] = reasons.get(row["why"], 0) + 1
    for why, count in sorted(reasons.items(), key=lambda pair: -pair[1]):
        console.print(f"not priced: {count} rows: {why}")


_SHORT = {
    "mape": "mean absolute error",
    "n": "rows",
    "top1": "top-1",
    "top3": "top-3",
    "mfu": "MFU",
    "spearman": "Spearman",
}


def _words(key: str) -> str:
    """A key of the document for a person: ``step_time_mape_pct`` is ``step time mean absolute error, %``."""
    parts = key.split("_")
    words = " ".join(_SHORT.get(part, part) for part in parts if part != "pct")
    return f"{words}, %" if "pct" in parts else words


def _number(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
