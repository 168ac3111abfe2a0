"""`tune import`: another program's configuration as a job's baseline."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import sys
from typing import Any

from search_space.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser(
        "import",
        help="a Megatron command line, DeepSpeed JSON or torchtitan module as a job's baseline",
        description="Reads a file that somebody trains with today and writes a job file whose [baseline] is that "
        "configuration. Nothing in the file is run; a torchtitan module is imported in a child process.",
    )
    parser.add_argument("file", metavar="FILE", help="shell script or arguments, .json, or .py")
    parser.add_argument("--gpus", type=int, metavar="N", help="devices of the job, where the file does not say")
    parser.add_argument("--model", metavar="NAME", help="a shipped model such as llama3_70b, where the file names none")
    parser.add_argument("--function", metavar="NAME", help="config function of a torchtitan module with several")
    parser.add_argument(
        "--path", metavar="FOLDER", help="folder of modules that a torchtitan module imports (default: its own)"
    )
    parser.add_argument(
        "--framework",
        choices=("torchtitan", "megatron", "deepspeed"),
        help="whose knobs the baseline is in (default: the file's own; torchtitan to start trials from it)",
    )
    parser.add_argument("--out", metavar="JOB.toml", help="write the job file here instead of standard output")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Import.

    Raises:
        UserError: the file cannot be read as any of the three, or the job file cannot be written.
    """
    from tuner.export.read import read_file

    if args.gpus is not None and args.gpus < 1:
        raise UserError(f"--gpus {args.gpus}: needs at least 1")
    found = read_file(Path(args.file), args.gpus, args.function, args.path, args.framework, args.model)
    if args.out:
        try:
            Path(args.out).write_text(found.job_text(), encoding="utf-8")
        except OSError as error:
            raise UserError(f"--out {args.out}: cannot be written ({error.strerror})") from None
        print(f"wrote {args.out}", file=sys.stderr)
    if args.json:
        print(json.dumps(found.to_json()))
    elif not args.out:
        print(found.job_text(), end="")
    say = [f"{found.kind}: {found.candidate.label()}"]
    say += [f"ignored: {text}" for text in found.ignored]
    if args.out or args.json:
        say += [f"assumed: {text}" for text in found.assumed] + [f"to be set: {text}" for text in found.missing]
    print("\n".join(say), file=sys.stderr)
    return 0
