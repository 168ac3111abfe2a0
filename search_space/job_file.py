"""Job files: TOML to a typed job, with errors that name the line."""

from __future__ import annotations

import difflib
from pathlib import Path
import re
import tomllib
from typing import Any

from pydantic import ValidationError

from search_space.errors import JobError
from search_space.job import Job
from search_space.knobs import BY_NAME


def load_job(path: str | Path) -> Job:
    """Read a job file.

    Raises:
        JobError: there is no such file, it is no TOML, a key is unknown, or a value is not allowed. The message
            names the line, what was found and what is allowed.
    """
    file = Path(path)
    if not file.is_file():
        raise JobError(f"job file {str(path)!r} does not exist; `tune init` writes one")
    try:
        return parse_job(file.read_text(), name=str(path))
    except UnicodeDecodeError:
        raise JobError(f"job file {str(path)!r} is no text file") from None


def parse_job(text: str, name: str = "job") -> Job:
    """A job from TOML text; see :func:`load_job`."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise JobError(f"{name}: {error}") from None
    try:
        return Job(**values)
    except ValidationError as error:
        lines = [_explain(text, name, fault) for fault in error.errors()]
        raise JobError("\n".join(lines)) from None


def _explain(text: str, name: str, fault: Any) -> str:
    where = [part for part in fault["loc"] if isinstance(part, str)]
    line = line_of(text, where)
    place = f"{name}:{line}" if line else name
    key = ".".join(part for part in where if part != "knobs") or "job"
    if fault["type"] == "extra_forbidden":
        allowed = allowed_keys(where)
        close = difflib.get_close_matches(where[-1], allowed, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        return f"{place}: unknown key {key!r}; {hint}allowed are {', '.join(allowed)}"
    if fault["type"] == "missing":
        return f"{place}: [{key}] is missing; every job needs it"
    found = fault["input"]
    message = fault["msg"].removeprefix("Value error, ").replace("Input should be", "needs to be")
    if isinstance(found, dict):
        return f"{place}: [{key}]: {message}" if key != "job" else f"{place}: {message}"
    return f"{place}: {key}: {message}, found {found!r}" + _unit(where)


def allowed_keys(where: list[str]) -> list[str]:
    """The keys that may stand where an unknown one was found."""
    fields: Any = Job.model_fields
    for part in where[:-1]:
        annotation = fields[part].annotation if part in fields else None
        fields = getattr(annotation, "model_fields", {})
    keys = [key for key in fields if key != "knobs"]
    if where[:1] == ["search"]:
        keys += sorted({knob.name for knob in BY_NAME.values()})
    return keys


def _unit(where: list[str]) -> str:
    """The field's description, which carries its unit."""
    fields: Any = Job.model_fields
    description = None
    for part in where:
        if part not in fields:
            return ""
        description = fields[part].description
        fields = getattr(fields[part].annotation, "model_fields", {})
    return f" ({description})" if description else ""


def line_of(text: str, where: list[str]) -> int | None:
    """Line number (from 1) of the deepest part of ``where`` that the text names; None when it names none."""
    section: list[str] = []
    best: int | None = None
    depth = 0
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]", line)
        if header:
            section = [part.strip().strip("\"'") for part in header[1].split(".")]
            path = section
        else:
            key = re.match(r"\s*([A-Za-z0-9_.\-\"']+)\s*=", line)
            if not key:
                continue
            path = section + [part.strip("\"'") for part in key[1].split(".")]
        if path == where[: len(path)] and len(path) > depth:
            best, depth = number, len(path)
    return best
