"""`tune commit`: a study's winner, with its evidence, as a branch of your repository."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from search_space.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser(
        "commit",
        help="commit a study's winner with its evidence",
        description="Writes branch tune/STUDY: the config function, its claim, the report, a row in the change table. "
        "Working tree, index and other branches stay as they are; the same claim is not committed twice.",
    )
    parser.add_argument("study", nargs="?", help="name or folder (default: the newest)")
    parser.add_argument("--to", metavar="REPO", help="repository (default: the job's, else the study's own)")
    parser.add_argument("--approve", metavar="NAME", help="who approves it; goes into file, table and commit message")
    parser.add_argument("--pr-body", action="store_true", help="print the text of a pull request; commits nothing")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Commit, or print the pull request's text.

    Raises:
        UserError: no such study, it has no winner, or git refuses.
    """
    from search_space.job import Job
    from tuner.evidence.claim import Claim
    from tuner.evidence.commit import commit_claim
    from tuner.evidence.wording import report
    from tuner.records.layout import find_folder

    folder = find_folder(args.study)
    if not folder.claim.exists():
        if json.loads(folder.facts.read_text()).get("rehearsal"):
            raise UserError(f"study {folder.name} is a rehearsal: nothing was measured, so there is nothing to commit")
        raise UserError(
            f"study {folder.name} has no winner to commit; `tune status {folder.handle}` says how far it came"
        )
    claim = Claim.read(folder.claim)
    if args.approve:
        claim = claim.approved(args.approve.strip())
    if args.pr_body:
        print(json.dumps({"body": report(claim)}) if args.json else report(claim))
        return 0
    job = Job.model_validate_json(folder.job.read_text())
    named = args.to or job.records.commit_to
    done = commit_claim(claim, Path(named).expanduser() if named else folder.repository, create=named is None)
    if args.approve:
        folder.claim.write_text(claim.to_json())
    if args.json:
        print(json.dumps(done | {"approved_by": claim.approved_by}))
        return 0
    print(f"committed {done['hash']} on branch {done['branch']} of {done['repo']}")
    print(f"  git -C {done['repo']} show {done['branch']}")
    return 0
