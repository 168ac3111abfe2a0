"""Where device-seconds went, by kind; the kinds of a trial add up to what it was charged."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from tuner.records.journal import read_journal
from tuner.records.layout import StudyFolder
from tuner.records.summary import summarise
from tuner.records.summary import Summary


KINDS = ("startup", "compile", "warmup", "measured", "profile", "failed", "stopped_early", "cleanup")
"""Kinds of a trial's spending, in its order; a study has ``probe`` beside them."""


def split(
    device_s: float,
    wall_s: float,
    state: str,
    *,
    compile_s: float = 0.0,
    warmup_s: float = 0.0,
    measured_s: float = 0.0,
    profile_s: float = 0.0,
    cleanup_s: float = 0.0,
) -> dict[str, float]:
    """A trial's charge by kind, device-seconds.

    Start-up is what nothing else explains. A trial without a result is failed as a whole; the measured steps of one
    that was stopped as a loser count as stopped early.

    Args:
        device_s: what the trial was charged.
        wall_s: its wall time.
        state: its state.
        compile_s: wall seconds of each kind, as the ranks recorded them; shrunk together where they exceed the wall.
        warmup_s: the same.
        measured_s: the same.
        profile_s: the same.
        cleanup_s: from the last record to the release.
    """
    found = dict.fromkeys(KINDS, 0.0)
    if state == "failed" or wall_s <= 0:
        return found | {"failed": device_s}
    window = "stopped_early" if state == "stopped" else "measured"
    parts = {"compile": compile_s, "warmup": warmup_s, window: measured_s, "profile": profile_s, "cleanup": cleanup_s}
    parts = {kind: max(0.0, seconds) for kind, seconds in parts.items()}
    known = sum(parts.values())
    scale = device_s / max(wall_s, known)
    found |= {kind: seconds * scale for kind, seconds in parts.items()}
    return found | {"startup": max(0.0, device_s - known * scale)}


def spending(
    folder: StudyFolder, events: Sequence[dict[str, Any]] | None = None, summary: Summary | None = None
) -> dict[str, Any]:
    """The document of `tune budget`: where every device-second of a study went.

    Args:
        folder: the study's folder.
        events: its journal, where it has been read already.
        summary: what that comes to, likewise.
    """
    events = read_journal(folder.journal) if events is None else events
    summary = summary or summarise(folder, events)
    by_kind = dict.fromkeys(KINDS, 0.0)
    for trial in summary.trials:
        for kind, seconds in _kinds_of(trial).items():
            by_kind[kind] += seconds
    running = sum(trial["device_s"] for trial in summary.running.values())
    # What runs, or was lost with the tuner, has no result yet.
    by_kind["failed"] += running
    by_kind["probe"] = summary.probe_device_s
    spent = sum(by_kind.values())
    saved = sum(trial.get("saved_device_s") or 0.0 for trial in summary.trials)
    return {
        "study": summary.study,
        "budget_device_s": summary.budget_device_s,
        "spent_device_s": round(spent, 3),
        "left_device_s": round(summary.budget_device_s - spent, 3),
        "by_kind_s": {kind: round(seconds, 3) for kind, seconds in by_kind.items()},
        "measured_share_pct": 100 * by_kind["measured"] / spent if spent else 0.0,
        "saved_device_s": round(saved, 3),
        "idle_wall_s": round(idle_wall_s(events), 3),
        "trials": [
            {
                "number": trial["number"],
                "state": trial["state"],
                "label": trial.get("label", ""),
                "device_s": trial["device_s"],
                "by_kind_s": {kind: round(seconds, 3) for kind, seconds in _kinds_of(trial).items()},
                "saved_device_s": trial.get("saved_device_s") or 0.0,
            }
            for trial in summary.trials
        ],
        "ended": summary.ended,
        "startup_median_s": startup(summary.trials),
        "compile_cache": {
            key: sum((trial.get("compile_cache") or {}).get(key, 0) for trial in summary.trials)
            for key in ("hits", "misses")
        },
    }


def startup(trials: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median seconds of each phase of the measured trials' start: to imports done, trainer built, seed weights and
    data ready, first step done. Empty where nothing was measured."""
    known = [trial["startup_s"] for trial in trials if trial.get("startup_s")]
    if not known:
        return {}
    names = ("imported", "built", "training", "first_step")
    ends = {name: median(one[name] for one in known) for name in names}
    before = dict(zip(names, (0.0, *(ends[name] for name in names[:-1])), strict=True))
    return {name: round(max(0.0, ends[name] - before[name]), 3) for name in names}


def _kinds_of(trial: dict[str, Any]) -> dict[str, float]:
    """A trial's charge by kind; one without a split (lost with its tuner) is failed as a whole."""
    kinds = trial.get("by_kind_s")
    if not kinds:
        return split(trial["device_s"], 1.0, "failed")
    return {kind: float(kinds.get(kind, 0.0)) for kind in KINDS}


def idle_wall_s(events: Sequence[dict[str, Any]]) -> float:
    """Wall seconds of a study's sessions in which no trial held devices: planning, choosing, committing."""
    idle, since = 0.0, None
    running: set[int] = set()
    last = 0.0
    for event in events:
        now, kind = float(event["unix_s"]), event["event"]
        if kind == "session":
            # A session that died left its last trial behind; the time until this one began is nobody's.
            running.clear()
            since = now
        elif since is not None or running:
            if kind == "trial_placed":
                if not running and since is not None:
                    idle += now - since
                running.add(event["number"])
                since = None
            elif kind == "trial":
                running.discard(event["number"])
                since = now if not running else None
            elif kind == "study_end" and since is not None:
                idle += now - since
                since = None
        last = now
    return idle if since is None else idle + last - since
