"""Refused candidates with the numbers against them, wherever a study's files tell of them."""

from __future__ import annotations

from collections.abc import Sequence
import json
from typing import Any

from tuner.records.layout import StudyFolder


def refused(folder: StudyFolder, events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Candidates that were refused before they cost anything, each once.

    Sources, in this order: ``rejected.jsonl`` (the ledger's refusals, as many as the study wrote), the near misses of
    a study without feasible candidates, and what the framework refused on fake tensors.

    Args:
        folder: the study's folder.
        events: its journal.

    Returns:
        One entry a candidate: ``label``, ``candidate``, ``reasons`` (``code``, ``required``, ``available``, ``unit``,
        ``text``), and ``predicted`` (``mfu_pct``, ``memory_gib`` as the ledger would price it) where it was written.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in _lines(folder):
        try:
            entry = json.loads(line)
            found.setdefault(_key(entry["candidate"]), entry)
        except (ValueError, KeyError, TypeError):
            continue
    for event in events:
        if event["event"] == "study_end":
            for miss in event.get("near_misses") or []:
                found.setdefault(_key(miss["candidate"]), miss)
        elif event["event"] == "dry_run" and event.get("error"):
            reason = {"code": "refused_by_framework", "required": None, "available": None, "unit": ""}
            entry = {"label": event["label"], "candidate": event["candidate"]}
            found.setdefault(
                _key(event["candidate"]), {**entry, "reasons": [reason | {"text": str(event["error"])[:2000]}]}
            )
    return list(found.values())


def _lines(folder: StudyFolder) -> list[str]:
    try:
        return folder.rejected.read_text().splitlines()
    except OSError:
        return []


def _key(candidate: dict[str, Any]) -> str:
    return json.dumps(candidate, sort_keys=True)
