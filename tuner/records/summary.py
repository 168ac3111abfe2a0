"""A study as its journal tells it: trials, budget, winner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
import json
from typing import Any

from tuner.records.journal import read_journal
from tuner.records.layout import StudyFolder
from tuner.records.lease import is_held


MEASURED = (
    "step_time_s",
    "step_time_ci_s",
    "tokens_per_s_per_device",
    "mfu_pct",
    "hfu_pct",
    "peak_reserved_gib",
)
"""Keys of a trial that only a measurement fills."""


@dataclass
class Summary:
    """What `tune status` says."""

    study: str
    """Name."""

    folder: str
    """Folder."""

    state: str
    """``running``, ``done``, ``interrupted`` or ``new``."""

    facts: dict[str, Any]
    """The study's fixed facts."""

    trials: list[dict[str, Any]] = field(default_factory=list)
    """Finished trials, keys as in the command-line contract."""

    running: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Trials that started and have not ended, by number."""

    budget_device_s: float = 0.0
    """Device-seconds allowed."""

    spent_device_s: float = 0.0
    """Device-seconds charged, lost trials up to their last heartbeat."""

    probe_device_s: float = 0.0
    """What of it the probe at the start took."""

    baseline: int | None = None
    """Number of the baseline trial."""

    winner: int | None = None
    """Number of the winner."""

    commit: dict[str, Any] | None = None
    """Where the winner was committed."""

    ended: str | None = None
    """Why the search ended."""

    counts: dict[str, Any] = field(default_factory=dict)
    """Enumerated, feasible and rejected candidates."""

    comparison: dict[str, Any] | None = None
    """Winner against baseline."""

    evidence: dict[str, Any] = field(default_factory=dict)
    """What the winner rests on: ``why``, ``parity``, ``changes``, and the run-to-run ``noise``."""

    near_misses: list[dict[str, Any]] = field(default_factory=list)
    """Where nothing is feasible: the refused candidates nearest to it, with their reasons."""

    @property
    def given_back_device_s(self) -> float:
        """What a study that is over did not need of its budget, device-seconds."""
        return max(0.0, self.budget_device_s - self.spent_device_s) if self.state == "done" else 0.0

    def to_json(self) -> dict[str, Any]:
        """The keys of the command-line contract."""
        return {
            "study": self.study,
            "folder": self.folder,
            "state": self.state,
            "ended": self.ended,
            "trials": self.trials,
            "running": list(self.running.values()),
            "baseline": self.baseline,
            "winner": self.winner,
            "comparison": self.comparison,
            **{key: self.evidence.get(key) for key in ("why", "parity", "changes", "noise")},
            "commit": self.commit,
            "budget_device_s": self.budget_device_s,
            "spent_device_s": round(self.spent_device_s, 3),
            "given_back_device_s": round(self.given_back_device_s, 3),
            "probe_device_s": round(self.probe_device_s, 3),
            **self.counts,
            "near_misses": self.near_misses,
        }


def summarise(folder: StudyFolder, events: Sequence[dict[str, Any]] | None = None) -> Summary:
    """Read a study's journal; ``events`` are its events where they have been read already."""
    facts = json.loads(folder.facts.read_text())
    summary = Summary(study=folder.name, folder=str(folder.root), state="new", facts=facts)
    for event in read_journal(folder.journal) if events is None else events:
        _apply(summary, event)
    for trial in summary.running.values():
        summary.spent_device_s += trial["device_s"]
    if summary.state == "running" and not is_held(folder):
        summary.state = "interrupted"
    return summary


def _apply(summary: Summary, event: dict[str, Any]) -> None:
    kind = event["event"]
    if kind == "session":
        _charge_lost(summary)
        summary.budget_device_s = event["budget_device_s"]
        summary.state = "running"
    elif kind == "pool":
        summary.counts = {key: event[key] for key in ("enumerated", "feasible", "rejected")}
    elif kind == "trial_placed":
        summary.running[event["number"]] = {**event, "device_s": 0.0}
    elif kind == "heartbeat":
        for number, device_s in event["running"].items():
            if int(number) in summary.running:
                summary.running[int(number)]["device_s"] = device_s
    elif kind == "trial":
        summary.running.pop(event["number"], None)
        trial = {key: value for key, value in event.items() if key not in ("event", "unix_s")}
        summary.trials.append(trial)
        summary.spent_device_s += event["device_s"]
        if event.get("role") == "baseline":
            summary.baseline = event["number"]
    elif kind in ("probe", "probe_failed"):
        summary.spent_device_s += event["device_s"]
        summary.probe_device_s += event["device_s"]
    elif kind == "winner":
        summary.winner, summary.comparison = event["number"], event.get("comparison")
        summary.evidence |= {key: event[key] for key in ("why", "parity", "changes") if key in event}
    elif kind == "noise":
        summary.evidence["noise"] = {key: value for key, value in event.items() if key not in ("event", "unix_s")}
    elif kind == "commit":
        summary.commit = {key: event[key] for key in ("repo", "branch", "hash")}
    elif kind == "study_end":
        summary.state, summary.ended = event["state"], event["reason"]
        summary.near_misses = event.get("near_misses", [])


def _charge_lost(summary: Summary) -> None:
    """A driver that died left trials running: charge them up to their last heartbeat, as failed trials."""
    for number, trial in sorted(summary.running.items()):
        summary.spent_device_s += trial["device_s"]
        summary.trials.append(
            {
                "number": number,
                "role": trial.get("role"),
                "state": "failed",
                "candidate": trial["candidate"],
                "label": trial.get("label", ""),
                **dict.fromkeys(MEASURED),
                "device_s": trial["device_s"],
                "failure": {"class": "driver_lost", "rank": None, "text": "the tuner died while this trial ran"},
            }
        )
    summary.running.clear()
