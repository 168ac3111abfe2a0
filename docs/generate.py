"""Writes the pages that are made from the code: cli.md, job_file.md, and the table of troubleshooting.md.

Run `make docs` after a change of verbs, job sections or failure classes; a test compares the pages with the code.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
import sys
from typing import Any
from typing import get_args


HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

BEGIN, END = "<!-- made by docs/generate.py -->", "<!-- end -->"


def cell(text: str) -> str:
    """A text in a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def parsers(verb: str) -> list[tuple[str, argparse.ArgumentParser]]:
    """A verb's parser, or those of its own verbs, by their full names."""
    name = f"{verb}_" if verb in ("list", "import") else verb.replace("-", "_")
    module = importlib.import_module(f"tuner.cli.{name}")
    root = argparse.ArgumentParser(prog="tune").add_subparsers()
    module.add_parser(root)
    found: list[tuple[str, argparse.ArgumentParser]] = []
    for name, parser in root.choices.items():
        inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        found += [(f"{name} {k}", p) for a in inner for k, p in a.choices.items()] or [(name, parser)]
    return found


def words(action: argparse.Action) -> str:
    """An argument as it is typed."""
    value = action.metavar or (
        "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    )
    shown = str(value if not isinstance(value, tuple) else " ".join(value))
    if action.nargs in ("+", "*"):
        shown += "…"
    if not action.option_strings:
        return f"`{shown}`" if action.nargs not in ("?", "*") else f"`[{shown}]`"
    takes = action.nargs != 0
    return ", ".join(f"`{name}{' ' + shown if takes else ''}`" for name in action.option_strings)


def cli() -> str:
    """docs/cli.md."""
    from tuner.cli import VERBS

    lines = [
        "# Commands",
        "",
        "Made from the code by `make docs`. `--json` prints one JSON document on standard output (`start` and",
        "`resume`: one a line); everything else goes to standard error. Exit codes: 0 done, 2 the request cannot be",
        "served, 3 the budget ended before anything was measured, 130 interrupted, 1 a fault of ours (`--debug` shows",
        "where).",
        "",
    ]
    for verb, text in VERBS.items():
        for name, parser in parsers(verb):
            lines += [f"## tune {name}", "", f"{text[0].upper()}{text[1:]}.", ""]
            rows = [a for a in parser._actions if not isinstance(a, argparse._HelpAction)]
            if rows:
                lines += ["| argument | what it does |", "|---|---|"]
                lines += [f"| {cell(words(action))} | {cell(_help(action))} |" for action in rows]
                lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _help(action: argparse.Action) -> str:
    return (action.help or "") % {"default": action.default} if "%(" in (action.help or "") else action.help or ""


def kind(annotation: Any) -> str:
    """A field's type in a few words."""
    if annotation is None or annotation is type(None):
        return ""
    choices = get_args(annotation)
    if str(annotation).startswith("typing.Literal"):
        return " or ".join(f'"{choice}"' for choice in choices)
    if choices and type(None) in choices:
        return " or ".join(filter(None, (kind(choice) for choice in choices)))
    names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return names.get(annotation, "table")


def default(value: Any) -> str:
    """A default as TOML shows it."""
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def job_file() -> str:
    """docs/job_file.md."""
    from search_space.job import Job
    from search_space.knobs import KNOBS

    lines = [
        "# Job file",
        "",
        "Made from the code by `make docs`. `tune init job.toml` writes one with every key in it, commented. An",
        "unknown key or a value that is not allowed is refused with its line, what was found and what is allowed.",
        "",
        "```toml",
        "[model]",
        'torchtitan = "llama3:llama3_8b"',
        "[recipe]",
        "seq_len = 8192",
        "global_batch_seqs = 64",
        "[budget]",
        "gpu_hours = 40",
        "```",
        "",
    ]
    for name, section in Job.model_fields.items():
        fields = getattr(section.annotation, "model_fields", None)
        title = f"[{name}]" if name != "env" else "[env.NAME]"
        lines += [f"## {title}", "", f"{section.description[0].upper()}{section.description[1:]}.", ""]  # type: ignore[index]
        if name == "baseline":
            lines += ["Keys are the knobs below, long or short.", ""]
        if name == "env":
            lines += [
                "Variables of one list; the `env` knob chooses among lists. Secrets are refused here: a job is written",
                "into records, the environment of `tune` is not, and the ranks inherit it.",
                "",
            ]
        if fields:
            lines += ["| key | value | default | what it is |", "|---|---|---|---|"]
            for key, field in fields.items():
                if key == "knobs":
                    continue
                shown = default(field.default)
                lines.append(
                    f"| `{key}` | {cell(kind(field.annotation))} | {shown} | {cell(field.description or '')} |"
                )
            lines.append("")
        if name == "search":
            lines += [
                "Each knob may stand here too, with the list of values that it may take; an absent one may take every",
                "legal value:",
                "",
                "| knob | short | values | what it is |",
                "|---|---|---|---|",
            ]
            for knob in KNOBS:
                values = ", ".join(map(str, knob.choices)) if knob.choices else getattr(knob.kind, "__name__", "")
                lines.append(f"| `{knob.name}` | `{knob.short}` | {cell(values)} | {cell(knob.help)} |")
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def failures() -> str:
    """The table of failure classes in docs/troubleshooting.md."""
    from trial_runner.failure.classes import CLASSES

    lines = ["| class | why | what to do |", "|---|---|---|"]
    lines += [f"| `{c.kind}` | {cell(c.why)} | {cell(c.advice)} |" for c in CLASSES]
    return "\n".join(lines)


def filled(page: str, made: str) -> str:
    """A page with its made part replaced."""
    head, _, rest = page.partition(BEGIN)
    return f"{head}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}"


def pages() -> dict[str, str]:
    """Every made page by its name."""
    troubles = (HERE / "troubleshooting.md").read_text()
    return {"cli.md": cli(), "job_file.md": job_file(), "troubleshooting.md": filled(troubles, failures())}


def main() -> None:
    """Write them."""
    for name, text in pages().items():
        (HERE / name).write_text(text)


if __name__ == "__main__":
    main()
