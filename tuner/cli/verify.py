"""`tune verify`: does a committed configuration still hold its claim?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from search_space.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser(
        "verify",
        help="measure a committed configuration again: does its claim hold?",
        description="Runs the committed config function on the claim's devices with today's code and software.",
        epilog="exit codes: 0 the claim holds, 4 it has regressed, 5 cannot tell within runs and budget, "
        "2 bad input or other devices, 130 interrupted",
    )
    parser.add_argument("commit", nargs="?", default="HEAD", help="commit that holds the claim (default: HEAD)")
    parser.add_argument(
        "--repo", help="repository of the commit (default: this folder, or the study's own for tune/STUDY)"
    )
    parser.add_argument("--name", help="which claim, where a commit holds several: the function's name")
    parser.add_argument("--path", help="folder of your own modules to measure with (default: where the study had it)")
    parser.add_argument("--runs", type=int, default=5, help="most runs (default: 5)")
    parser.add_argument(
        "--budget", help="device-hours that it may spend (default: thrice what so many runs cost before)"
    )
    parser.add_argument("--study", help="name or folder for the records (default: verify and time)")
    parser.add_argument("--address", help="address of a running Ray cluster, or auto (default: a local Ray)")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and judge.

    Raises:
        UserError: no such commit or claim, other devices, no fitting cluster.
    """
    import contextlib
    import sys

    from dashboards.live import choose_display
    from tuner.budget import parse_budget
    from tuner.evidence.commit import committed_claim
    from tuner.evidence.holding import CANNOT_TELL
    from tuner.evidence.holding import EXIT_CODES
    from tuner.evidence.holding import HOLDS
    from tuner.records.layout import new_folder
    from tuner.records.lease import lease
    from tuner.study.run import RunOptions
    from tuner.study.verify import default_budget
    from tuner.study.verify import verification_plan
    from tuner.study.verify import verify

    if args.runs < 1:
        raise UserError(f"verify: --runs {args.runs}; it needs at least one")
    repository = Path(args.repo).expanduser() if args.repo else _repository(args.commit)
    claim, module, commit = committed_claim(repository, args.commit, args.name)
    budget = parse_budget(args.budget) if args.budget else default_budget(claim, args.runs)
    folder = new_folder(args.study, f"verify-{commit[:8]}")
    display = choose_display(as_json=False, plain=True)
    # Everything but the one document goes to standard error.
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        plan = verification_plan(claim, module, args.path)
        with lease(folder):
            options = RunOptions(budget_device_s=budget, address=args.address)
            found, facts = verify(folder, plan, claim, options, args.runs, [display])
    if args.json:
        print(json.dumps({"commit": commit, "study": folder.handle, **facts}))
    elif found is None:
        why = (facts["failure"] or {}).get("text", "the budget does not cover one run; raise --budget")
        print(f"cannot tell: nothing was measured: {why}")
    else:
        runs = f"{found.runs} run{'s' * (found.runs != 1)}"
        verdict = {HOLDS: "holds"}.get(found.verdict, found.verdict.replace("_", " "))
        print(f"{verdict}: {found.why} ({runs}, {facts['spent_device_s']} device-s)")
    if facts["interrupted"]:
        return 130
    return EXIT_CODES[found.verdict if found is not None else CANNOT_TELL]


def _repository(commit: str) -> Path:
    """Where a commit lies: this folder's repository, or the one in the study's folder for its branch."""
    from tuner.records.layout import studies_root
    from tuner.records.layout import StudyFolder
    from tuner.repository import git

    here = Path()
    try:
        git(here, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    except UserError:
        own = StudyFolder(studies_root() / commit.removeprefix("tune/")).repository
        if commit.startswith("tune/") and own.is_dir():
            return own
    return here
