"""`tune init`: a commented job file for the machine it stands on."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("init", help="write a commented job file for this machine")
    parser.add_argument("path", nargs="?", default="job.toml", help="file to write (default: job.toml)")
    parser.add_argument("--model", default=None, help="torchtitan module:function (default: the llama3 debug model)")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--json", action="store_true", help="print what was found as one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the file.

    Raises:
        UserError: the file exists, or its folder does not.
    """
    from search_space.errors import UserError
    from search_space.job_file import parse_job
    from search_space.job_template import render_job
    from trial_runner import devices

    path = Path(args.path)
    if path.exists() and not args.force:
        raise UserError(f"{path} exists already; --force overwrites it, or name another file")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is no folder")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file")
    if args.model is not None:
        parse_job(f"[model]\ntorchtitan = {json.dumps(args.model)}\n", name="--model")
    names = devices.gpu_names()
    slots = devices.num_gpus() or devices.num_cpu_slots()
    text = render_job(model=args.model, gpu=names[0] if names else None, devices=slots)
    try:
        path.write_text(text)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    found = {"written": str(path), "gpus": names, "devices": slots}
    if args.json:
        print(json.dumps(found))
    else:
        what = f"{slots} × {names[0]}" if names else f"{slots} CPU slots, no GPU"
        print(
            f"wrote {path} for this machine ({what}); next: `tune plan {path}` (what fits, what to expect), then "
            f"`tune start {path} --budget 0.3-gpu-hours`"
        )
    return 0
