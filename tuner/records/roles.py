"""Roles of trials: what each was run for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


BASELINE = "baseline"
"""The configuration run today, measured first."""

SEARCH = "search"
"""Proposed by the search."""

RATIO = "ratio"
"""A designed contrast, whose ratios carry over to another scale."""

CANARY = "canary"
"""The baseline again, because an hour has passed: has the machine changed?"""

CONFIRM = "confirm"
"""A repeat of the best or of the baseline, in turns, after the search."""

ABLATE = "ablate"
"""The winner with one change undone."""

REPEATS = (CANARY, CONFIRM, ABLATE)
"""Roles whose trials the search neither proposed nor counts."""

COMPARED = (BASELINE, *REPEATS)
"""Roles whose step times stand against those of another hour: their trials run the control, too."""


def searched(record: Mapping[str, Any]) -> bool:
    """Whether a trial belongs to the search, the baseline counted."""
    return record.get("role") not in REPEATS
