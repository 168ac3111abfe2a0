"""`tune budget`: where every device-second of a study went."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("budget", help="where every device-second of a study went")
    parser.add_argument("study", nargs="?", help="name or folder (default: the newest)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the account.

    Raises:
        UserError: no such study.
    """
    from dashboards.console import make_console
    from dashboards.tables import spending_tables
    from tuner.records.layout import find_folder
    from tuner.records.spending import spending

    document = spending(find_folder(args.study))
    if args.json:
        print(json.dumps(document))
        return 0
    console = make_console()
    for part in spending_tables(document):
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
    return 0
