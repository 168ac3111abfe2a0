"""What the installed MLflow takes: lengths and batch sizes are read from it at run time."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
import hashlib
import re
from typing import Any


OLDER_VALUE_LENGTHS = (500, 250)
"""Lengths of a parameter's value that older servers take; tried in turn when a server refuses the installed one's."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a call may hold."""

    param_value: int
    """Characters of a parameter's value."""

    tag_value: int
    """Characters of a tag's value."""

    key: int
    """Characters of a name."""

    params_per_call: int
    """Parameters, or tags, in one call."""

    metrics_per_call: int
    """Metrics in one call."""


def read_limits(module: Any = None) -> Limits:
    """The limits of the installed MLflow; where a version does not state one, the lowest that any ever had.

    Args:
        module: where to read them; None for ``mlflow.utils.validation``.
    """
    if module is None:
        from mlflow.utils import validation

        module = validation
    return Limits(
        param_value=int(getattr(module, "MAX_PARAM_VAL_LENGTH", 250)),
        tag_value=int(getattr(module, "MAX_TAG_VAL_LENGTH", 250)),
        key=int(getattr(module, "MAX_ENTITY_KEY_LENGTH", 250)),
        params_per_call=int(getattr(module, "MAX_PARAMS_TAGS_PER_BATCH", 100)),
        metrics_per_call=int(getattr(module, "MAX_METRICS_PER_BATCH", 500)),
    )


def shorten(text: str, limit: int) -> str:
    """A text within a limit; a cut one ends with a mark that holds its length and hash, so two never look equal."""
    if len(text) <= limit:
        return text
    mark = f" …[{len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}]"
    return text[: max(0, limit - len(mark))] + mark[-limit:]


def legal_name(name: str, limit: int) -> str:
    """A name that every store takes: letters, digits and ``_-. /``, no empty or dotted path parts, within the limit."""
    plain = re.sub(r"[^\w\-. /]", "_", name, flags=re.ASCII)
    parts = [part.strip(". ") or "_" for part in plain.split("/")]
    return shorten_name("/".join(parts), limit)


def shorten_name(name: str, limit: int) -> str:
    """A name within a limit; a cut one ends with a hash of the whole."""
    if len(name) <= limit:
        return name
    return f"{name[: limit - 13]}_{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    """Items in slices of at most ``size``."""
    for first in range(0, len(items), size):
        yield items[first : first + size]
