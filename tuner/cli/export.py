"""`tune export`: a candidate in another program's own words."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import sys
from typing import Any

from search_space.errors import UserError


TARGETS = ("torchtitan", "megatron", "deepspeed", "torchrun", "slurm", "kuberay")
"""What ``--to`` takes."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser(
        "export",
        help="a candidate as torchtitan function, Megatron flags, DeepSpeed JSON or a launch file",
        description="Writes a study's winner, or another candidate, for another program. Knobs that the target "
        "cannot say "
        "stand in comments at the top.",
    )
    parser.add_argument("source", metavar="STUDY|JOB.toml", help="name or folder of a study, or a job file")
    parser.add_argument("--to", required=True, choices=TARGETS, help="what to write")
    parser.add_argument(
        "--candidate",
        metavar="K=V,…",
        help="which one (default: a study's winner; a job's [baseline], else its fastest predicted)",
    )
    parser.add_argument("--out", metavar="FILE", help="write here instead of standard output")
    parser.add_argument("--no-comments", action="store_true", help="leave the comments out")
    parser.add_argument(
        "--json", action="store_true", help="one JSON document: text, file, candidate, what has no counterpart"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export.

    Raises:
        UserError: source or candidate cannot be used, or the file cannot be written.
    """
    from tuner.export.find import find_subject
    from tuner.export.targets import NEEDS_FUNCTION
    from tuner.export.targets import TARGETS as WRITERS
    from tuner.export.targets import without_comments

    subject = find_subject(args.source, args.candidate, args.to in NEEDS_FUNCTION)
    export = WRITERS[args.to](subject)
    text = without_comments(args.to, export.text) if args.no_comments else export.text
    if args.out:
        try:
            Path(args.out).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out {args.out}: cannot be written ({error.strerror})") from None
        print(f"wrote {args.out}: {subject.candidate.label()} ({subject.why})", file=sys.stderr)
        for gap in export.gaps:
            print(gap.line(), file=sys.stderr)
    if args.json:
        document = {
            "target": args.to,
            "source": subject.source,
            "why": subject.why,
            "candidate": subject.candidate.to_json(),
            "label": subject.candidate.label(),
            "file": args.out or export.file,
            "text": text,
            "without_counterpart": [{"knob": g.knob, "value": g.value, "why": g.why} for g in export.gaps],
        }
        print(json.dumps(document))
    elif not args.out:
        print(text, end="")
    return 0
