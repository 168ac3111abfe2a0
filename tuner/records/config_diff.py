"""The difference between two trials' generated config functions."""

from __future__ import annotations

import difflib
from pathlib import Path


BODY = "    config = base()"
"""First line of a generated function's body; what stands above it is the same in all of them but for a header."""


def config_diff(baseline: Path, winner: Path) -> list[str]:
    """Unified diff of two trials' config functions, without their headers; an absent file counts as empty.

    Args:
        baseline: folder of the baseline trial.
        winner: folder of the winning trial.
    """
    texts = []
    for folder in (baseline, winner):
        source = next(iter(sorted(folder.glob("*.py"))), None)
        text = source.read_text() if source else ""
        body = text[text.index(BODY) :] if BODY in text else text
        texts.append(body.splitlines())
    before, after = texts
    return list(difflib.unified_diff(before, after, "baseline", "winner", lineterm="", n=2))
