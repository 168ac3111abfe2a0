"""The command line: one module a verb, imported only when its verb is asked for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import importlib
import json
import re
import sys
import traceback

from search_space.errors import UserError


VERBS = {
    "start": "find the fastest configuration within a budget",
    "resume": "go on with a study",
    "plan": "price every candidate of a job without running any",
    "explain": "the whole account of one candidate, term by term",
    "dry-run": "one candidate's real program on fake tensors: valid or not, memory by rank",
    "probe": "what devices, links and nodes really give, and which of them lag",
    "smaller": "a trial on fewer replicas, corrected to the job's full scale",
    "extrapolate": "what a small run means at another scale, with ranges and what stays unknown",
    "validate": "check the ledger against measured tables, or against dry runs",
    "replay": "search strategies against measured tables, at no device's cost",
    "breakdown": "where the time of a traced step went, in seven parts",
    "export": "a candidate as torchtitan function, Megatron flags, DeepSpeed JSON or a launch file",
    "import": "a Megatron command line, DeepSpeed JSON or torchtitan module as a job's baseline",
    "diagnose": "where the missing MFU points went: budget against measured, in the order to fix",
    "watch": "a live job against its committed claim: holds, regressed and since when, or cannot tell",
    "status": "what a study has done and spent",
    "budget": "where every device-second of a study went",
    "list": "studies in this folder",
    "report": "a study's trials, winner and the winner's diff",
    "commit": "commit a study's winner with its evidence",
    "verify": "measure a committed configuration again: does its claim hold?",
    "serve": "the report page, live while the study runs",
    "ui": "open the MLflow pages of a study",
    "k8s": "a study on Kubernetes: render, submit, status, logs, stop",
    "sync": "send a study's waiting records to MLflow",
    "init": "write a commented job file for this machine",
    "doctor": "what is installed, what is found, what would fail",
}
"""Verbs and their one-line helps; ``x-y`` is module ``tuner.cli.x_y`` (``list`` is ``list_``, so is ``import``)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code of the command-line contract."""
    arguments = _values_joined(list(sys.argv[1:] if argv is None else argv))
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        parser, args = _parse(arguments)
        if args.verb is None:
            parser.print_help()
            return 2
        return int(args.run(args))
    except UserError as error:
        return _fail(str(error), 2, "--json" in arguments, debug)
    except KeyboardInterrupt:
        return _fail("interrupted", 130, "--json" in arguments, False)
    except BrokenPipeError:
        return 0
    except Exception as error:
        from trial_runner.failure.disk import is_disk_full

        if is_disk_full(error):
            text = "the disk is full: free some room; what was measured is kept, and `tune resume` goes on"
            return _fail(text, 2, "--json" in arguments, debug)
        hint = "" if debug else "; --debug shows where"
        return _fail(f"a fault of ours: {type(error).__name__}: {error}{hint}", 1, "--json" in arguments, debug)


def _values_joined(arguments: list[str]) -> list[str]:
    """``--budget -1-gpu-hours`` as ``--budget=-1-gpu-hours``: a value that begins like a negative number is a value, so
    that the verb can say what is wrong with it."""
    joined: list[str] = []
    for argument in arguments:
        follows = bool(joined) and joined[-1].startswith("--") and "=" not in joined[-1]
        if follows and re.match(r"-[\d.]", argument):
            joined[-1] += f"={argument}"
        else:
            joined.append(argument)
    return joined


def _fail(text: str, code: int, as_json: bool, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"tune: {text}", file=sys.stderr)
    if as_json:
        print(json.dumps({"event": "error", "error": text, "exit_code": code}))
    return code


def _parse(arguments: list[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Parse the arguments; only the asked verb's module is imported."""
    parser = argparse.ArgumentParser(
        prog="tune",
        description="Finds the fastest correct training configuration inside a GPU-hour budget.",
        epilog="`tune VERB --help` explains one. --debug anywhere shows where an error of ours came from.",
    )
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for verb, text in VERBS.items():
        if verb == asked:
            name = f"{verb}_" if verb in ("list", "import") else verb.replace("-", "_")
            module = importlib.import_module(f"tuner.cli.{name}")
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(verb, help=text, add_help=False)
    return parser, parser.parse_args(arguments)
