"""What the report page shows, as one JSON document: figures of the records, nothing computed anew but sums."""

from __future__ import annotations

from collections.abc import Sequence
import json
import math
from typing import Any

from search_space.candidate import Candidate
from search_space.knobs import KNOBS
from tuner.records.config_diff import config_diff
from tuner.records.layout import StudyFolder
from tuner.records.refused import refused
from tuner.records.spending import KINDS
from tuner.records.spending import spending
from tuner.records.summary import summarise
from tuner.records.summary import Summary
from tuner.records.timeline import timeline


TRIAL_KEYS = (
    "number",
    "role",
    "state",
    "label",
    "step_time_s",
    "step_time_ci_s",
    "tokens_per_s_per_device",
    "mfu_pct",
    "hfu_pct",
    "peak_reserved_gib",
    "device_s",
    "flags",
    "hopeless_part",
    "move",
)
"""Keys of a trial's record that the page shows as they are."""

PREDICTED_KEYS = ("step_time_s", "step_time_interval_s", "mfu_pct", "memory_gib")
"""What of a prediction the page shows."""

MAX_TEXT = 2000
"""Longest failure text on the page, characters; the trial's folder has it whole."""

MAX_REASON = 300
"""Longest text of a reason on the page, characters."""


def page_document(
    folder: StudyFolder,
    events: Sequence[dict[str, Any]],
    summary: Summary | None = None,
    *,
    now_s: float | None = None,
    skip_trials: int = 0,
) -> dict[str, Any]:
    """Everything on the page.

    Args:
        folder: the study's folder.
        events: its journal.
        summary: what it comes to, if that was read already.
        now_s: present Unix time where the study runs; absent: running trials end at the last event.
        skip_trials: leave out the first so many trials (a page that has them asks for the rest).

    Returns:
        A document without NaN or infinity, safe for any JSON reader.
    """
    summary = summary or summarise(folder, events)
    by_number = {trial["number"]: trial for trial in summary.trials}
    winner = by_number.get(summary.winner) if summary.winner is not None else None
    baseline = by_number.get(summary.baseline) if summary.baseline is not None else None
    changed, diff = _changes(folder, winner, baseline)
    account = spending(folder, events, summary)
    kept = {key: value for key, value in summary.to_json().items() if key not in ("trials", "running")}
    document = {
        **kept,
        "knobs": [{"name": knob.name, "short": knob.short, "help": knob.help} for knob in KNOBS],
        "facts": {key: value for key, value in summary.facts.items() if key not in ("base", "workdir")},
        "notes": _notes(events),
        "warnings": _unique(event["text"] for event in events if event["event"] == "warning"),
        "trials_from": skip_trials,
        "trials": [_trial(trial) for trial in summary.trials[skip_trials:]],
        "running": [_running(trial) for trial in summary.running.values()],
        "changed": [[knob, (baseline or {}).get("candidate", {}).get(knob), value] for knob, value in changed.items()],
        "diff": diff,
        "spending": {key: account[key] for key in ("by_kind_s", "measured_share_pct", "saved_device_s", "idle_wall_s")},
        "timeline": timeline(events, int(summary.facts.get("num_devices") or 1), now_s),
    }
    return _finite(document)


def refused_rows(folder: StudyFolder, events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Refused candidates for the page: knobs as a list in the order of :data:`KNOBS`, reasons with their numbers."""
    rows = []
    for entry in refused(folder, events):
        reasons = [
            [r.get("code"), r.get("required"), r.get("available"), r.get("unit"), str(r.get("text", ""))[:MAX_REASON]]
            for r in entry.get("reasons", [])
        ]
        predicted = entry.get("predicted") or {}
        rows.append(
            {
                "label": entry.get("label", ""),
                "knobs": _knobs(entry["candidate"]),
                "reasons": reasons,
                "mfu_pct": predicted.get("mfu_pct"),
                "memory_gib": predicted.get("memory_gib"),
            }
        )
    return list(_finite(rows))


def _knobs(candidate: dict[str, Any]) -> list[Any]:
    whole = Candidate.from_json(candidate).to_json()
    return [whole[knob.name] for knob in KNOBS]


def _trial(trial: dict[str, Any]) -> dict[str, Any]:
    shown = {key: trial[key] for key in TRIAL_KEYS if trial.get(key) not in (None, [])}
    predicted = trial.get("predicted") or {}
    shown["predicted"] = {key: predicted[key] for key in PREDICTED_KEYS if key in predicted}
    shown["knobs"] = _knobs(trial["candidate"])
    failure = trial.get("failure")
    if failure:
        shown["failure"] = {
            key: failure.get(key) for key in ("class", "rank", "advice") if failure.get(key) is not None
        }
        shown["failure"]["text"] = str(failure.get("text") or "")[:MAX_TEXT]
    broken = trial.get("breakdown")
    if broken:
        shown["breakdown"] = {key: broken.get(key) for key in ("step_s", "useful_s", "parts_s", "unexplained_s")}
        shown["breakdown"]["warnings"] = [str(text)[:MAX_TEXT] for text in (broken.get("warnings") or [])[:4]]
    kinds = trial.get("by_kind_s") or {}
    shown["by_kind_s"] = [round(kinds.get(kind, 0.0), 3) for kind in KINDS]
    return shown


def _running(trial: dict[str, Any]) -> dict[str, Any]:
    shown = {key: trial.get(key) for key in ("number", "role", "label", "device_s", "allowance_device_s", "devices")}
    predicted = trial.get("predicted") or {}
    return {
        **shown,
        "knobs": _knobs(trial["candidate"]),
        "predicted": {key: predicted[key] for key in PREDICTED_KEYS if key in predicted},
    }


def _changes(
    folder: StudyFolder, winner: dict[str, Any] | None, baseline: dict[str, Any] | None
) -> tuple[dict[str, Any], list[str]]:
    if winner is None or baseline is None:
        return {}, []
    changed = Candidate.from_json(winner["candidate"]).changed(Candidate.from_json(baseline["candidate"]))
    return changed, config_diff(folder.trial(baseline["number"]), folder.trial(winner["number"]))


def _notes(events: Sequence[dict[str, Any]]) -> list[str]:
    return _unique(note for event in events if event["event"] == "session" for note in event.get("notes") or [])


def _unique(texts: Any) -> list[str]:
    return list(dict.fromkeys(str(text)[:MAX_TEXT] for text in texts))


def _finite(value: Any) -> Any:
    """The value with None for every number that JSON has no word for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return value


def embed(document: Any) -> str:
    """JSON that may stand inside a script element: no text in it can end the element or open a comment."""
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
