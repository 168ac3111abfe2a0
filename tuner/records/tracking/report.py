"""What a study's records say about tracking: what waits, what came late, what a server would not take."""

from __future__ import annotations

from typing import Any

from tuner.records.layout import StudyFolder
from tuner.records.tracking.sender import SENT
from tuner.records.tracking.state import JournalReader
from tuner.records.tracking.state import read_state


def tracking_facts(folder: StudyFolder) -> dict[str, Any] | None:
    """The ``tracking`` key of `tune status --json`; None for a study that was never tracked.

    Returns:
        ``server``, ``waiting_records``, ``waiting_files``, ``late_trials``, ``refused``, ``left_out``.
    """
    state = read_state(folder)
    if state is None:
        return None
    return {
        "server": state.uri,
        "waiting_records": JournalReader(folder.journal).waiting(state.offset, SENT),
        "waiting_files": len(state.uploads),
        "late_trials": sorted(state.late),
        "refused": state.refused,
        "left_out": state.left_out,
    }


def waiting_in(folder: StudyFolder) -> int:
    """Records and files that no server has taken yet (count)."""
    state = read_state(folder)
    offset, files = (state.offset, len(state.uploads)) if state is not None else (0, 0)
    return JournalReader(folder.journal).waiting(offset, SENT) + files


def tracking_lines(folder: StudyFolder) -> list[str]:
    """The same as lines for a person; empty where there is nothing unusual."""
    facts = tracking_facts(folder)
    if facts is None:
        return []
    lines = []
    waiting = facts["waiting_records"] + facts["waiting_files"]
    if waiting:
        lines.append(f"MLflow ({facts['server']}): {waiting} records wait; `tune sync {folder.handle}` sends them")
    if facts["late_trials"]:
        numbers = ", ".join(map(str, facts["late_trials"]))
        lines.append(f"MLflow ({facts['server']}): trials {numbers} were sent late; nothing is missing")
    lines += [f"MLflow would not take: {text}" for text in facts["refused"]]
    lines += [f"MLflow: {text}" for text in facts["left_out"]]
    return lines
