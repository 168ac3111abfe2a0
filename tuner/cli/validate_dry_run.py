"""`tune validate --against dry-run`: the ledger against the real program on fake tensors."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from search_space.errors import UserError


def run(args: argparse.Namespace) -> int:
    """Compare and show; a case that the framework refuses is shown as such.

    Raises:
        UserError: no case's name contains the asked text, or a table cannot be read.
    """
    if args.tables:
        return _tables(args)
    from tuner.referee.cases import cases
    from tuner.referee.compare import compare

    chosen = [case for case in cases() if args.only in case.name()]
    if not chosen:
        models = sorted({case.model.partition(":")[2] for case in cases()})
        raise UserError(f"--only {args.only}: no case is called so; models are {', '.join(models)}")
    told = None if args.json else lambda line: print(line, file=sys.stderr)
    document = compare(chosen, told=told)
    if args.json:
        print(json.dumps(document))
    else:
        _print(document)
    return 0


def _print(document: dict[str, Any]) -> None:
    from rich.table import Table

    from dashboards.console import make_console

    console = make_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("case", "allocated, ledger over dry run", "FLOP", "collectives"):
        table.add_column(name)
    for row in document["cases"]:
        ranks = row["ranks"]
        if not ranks:
            table.add_row(row["label"], f"refused: {row['error']}", "", "")
            continue
        off = ", ".join(f"{rank['allocated_difference_pct']:+.1f}%" for rank in ranks)
        flop = "equal" if all(rank["flop_equal"] for rank in ranks) else "differ"
        calls = "equal" if all(rank["collectives_equal"] for rank in ranks) else "differ"
        table.add_row(row["label"], off + (" *" if row["unmodelled"] else ""), flop, calls)
    console.print(table)
    for why in sorted({row["unmodelled"] for row in document["cases"] if row["unmodelled"]}):
        console.print(f"* kept apart: {why}", markup=False)
    for key, value in document["overall"].items():
        console.print(f"{key}: {value:.2f}" if isinstance(value, float) else f"{key}: {value}", markup=False)


def _tables(args: argparse.Namespace) -> int:
    """Published memory figures against dry run plus allowance."""
    from rich.table import Table

    from dashboards.console import make_console
    from tuner.referee.measured import compare_tables

    told = None if args.json else lambda line: print(line, file=sys.stderr)
    document = compare_tables(args.tables, told=told)
    if args.json:
        print(json.dumps(document))
        return 0
    console = make_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("row", "version", "program", "rows", "measured GiB", "dry run", "+ allowance", "off"):
        table.add_column(name)
    for row in document["programs"]:
        figures = ["", "", row["error"] or ""]
        if row["error"] is None:
            figures = [f"{row[key]:.1f}" for key in ("dry_run_allocated_gib", "predicted_reserved_gib")]
            figures.append(f"{row['difference_pct']:+.1f}%")
        measured = f"{row['measured_reserved_gib']:.1f}"
        table.add_row(row["row_id"], row["version"][:24], row["label"], str(row["rows"]), measured, *figures)
    console.print(table)
    for why, count in sorted(document["left_out"].items(), key=lambda pair: -pair[1]):
        console.print(f"left out: {count} rows: {why}", markup=False)
    for key, value in document["overall"].items():
        console.print(f"{key}: {value:.2f}" if isinstance(value, float) else f"{key}: {value}", markup=False)
    return 0
