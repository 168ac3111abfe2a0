"""What a run says: a study's records as tags, parameters and metrics. Knows no server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
import getpass
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from search_space.redact import redact_value


SUMMARY = (
    "step_time_s",
    "step_time_p95_s",
    "tokens_per_s_per_device",
    "mfu_pct",
    "hfu_pct",
    "peak_allocated_gib",
    "peak_reserved_gib",
    "device_s",
    "wall_s",
    "loss_first",
    "loss_last",
)
"""Figures of a trial's record that become metrics."""

PREDICTED = {
    "step_time_s": "predicted_step_time_s",
    "mfu_pct": "predicted_mfu_pct",
    "memory_gib": "predicted_memory_gib",
}
"""Predictions that become metrics, by key of the record."""

FACTS = ("model", "function", "hardware", "num_devices", "seq_len", "global_batch_seqs", "precision")
"""Facts of a study that become its run's parameters."""

STATUS = {"measured": "FINISHED", "stopped": "KILLED"}
"""A run's status by its trial's state; every other state failed."""

ID_TAG = "ledgertune.id"
"""Tag by which a run is found again: the study's id, with the trial's number behind a slash for a trial."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One metric's value."""

    key: str
    value: float
    unix_ms: int
    """When it was measured, milliseconds since 1970."""

    step: int = 0


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What one run holds beside its files."""

    name: str
    started_ms: int
    ended_ms: int | None = None
    status: str = "RUNNING"
    tags: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    points: tuple[Point, ...] = ()


def study_run(study_id: str, name: str, facts: dict[str, Any], session: dict[str, Any]) -> RunFacts:
    """The run of a study, from its facts and its first session's event."""
    params = {key: str(facts[key]) for key in FACTS if key in facts}
    params["budget_device_s"] = str(round(session["budget_device_s"], 1))
    tags = {ID_TAG: study_id, "ledgertune.kind": "study", "mlflow.source.name": "tune start"}
    return RunFacts(
        name=name,
        started_ms=_ms(session["unix_s"]),
        tags=_common_tags(name, study_id, facts) | tags,
        params=params,
    )


def trial_run(study_id: str, study: str, facts: dict[str, Any], record: dict[str, Any], parent: str) -> RunFacts:
    """The run of a trial, from its record in the journal."""
    number = int(record["number"])
    ended = _ms(record["unix_s"])
    tags = {
        ID_TAG: f"{study_id}/{number}",
        "ledgertune.kind": "trial",
        "ledgertune.trial": str(number),
        "ledgertune.role": str(record.get("role")),
        "ledgertune.state": record["state"],
        "mlflow.parentRunId": parent,
        "mlflow.source.name": f"trials/{number:04d}",
    }
    failure = record.get("failure")
    if failure:
        tags |= {"ledgertune.failure.class": failure["class"], "ledgertune.failure.text": failure["text"][:1000]}
    if record.get("flags"):
        tags["ledgertune.flags"] = ", ".join(record["flags"])
    candidate = record["candidate"]
    points = [Point(key=k, value=float(record[k]), unix_ms=ended) for k in SUMMARY if record.get(k) is not None]
    predicted = record.get("predicted") or {}
    points += [Point(key=n, value=float(predicted[k]), unix_ms=ended) for k, n in PREDICTED.items() if k in predicted]
    return RunFacts(
        name=f"{number:03d} {record.get('label', '')}".strip(),
        started_ms=ended - int(1000 * record.get("wall_s", 0.0)),
        ended_ms=ended,
        status=STATUS.get(record["state"], "FAILED"),
        tags=_common_tags(study, study_id, facts) | tags,
        params={key: str(value) for key, value in candidate.items()} | {"config_sha256": config_hash(candidate)},
        points=tuple(points + _parts(record, ended)),
    )


def lost_trial(placed: dict[str, Any], unix_s: float) -> dict[str, Any]:
    """The record of a trial that was running when the tuner died."""
    return {
        "number": placed["number"],
        "role": placed.get("role"),
        "state": "failed",
        "candidate": placed["candidate"],
        "label": placed.get("label", ""),
        "unix_s": unix_s,
        "wall_s": max(0.0, unix_s - placed["unix_s"]),
        "failure": {"class": "driver_lost", "rank": None, "text": "the tuner died while this trial ran"},
    }


def config_hash(candidate: dict[str, Any]) -> str:
    """Hash of a whole candidate: it differs where two shortened parameters look the same."""
    return hashlib.sha256(json.dumps(candidate, sort_keys=True).encode()).hexdigest()


def step_points(folder: Path, record: dict[str, Any]) -> list[Point]:
    """Step time of the slowest rank, and loss, of every step, in an order that never changes.

    Args:
        folder: the trial's folder.
        record: its record; its start and wall time date the steps.
    """
    slowest: dict[int, tuple[float, float]] = {}
    losses: dict[int, tuple[float, float]] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        for facts in _lines(path):
            if "step" not in facts or facts.get("phase") == "trace":
                continue
            step, at = int(facts["step"]), float(facts.get("at_s") or 0.0)
            slowest[step] = max(slowest.get(step, (0.0, at)), (float(facts["step_time_s"]), at))
            if facts.get("loss") is not None:
                losses.setdefault(step, (float(facts["loss"]), at))
    began = record["unix_s"] - record.get("wall_s", 0.0)
    return [
        Point(key=key, value=value, unix_ms=_ms(began + at), step=step)
        for key, found in (("step/step_time_s", slowest), ("step/loss", losses))
        for step, (value, at) in sorted(found.items())
        if math.isfinite(value)
    ]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(errors="replace").splitlines():
        try:
            facts = json.loads(line)
        except ValueError:
            continue
        if isinstance(facts, dict):
            yield facts


def _parts(record: dict[str, Any], unix_ms: int) -> list[Point]:
    """The traced step's breakdown as metrics ``part/NAME_s``."""
    found = record.get("breakdown")
    if not found:
        return []
    values = {**found["parts_s"], "useful": found["useful_s"], "unexplained": found["unexplained_s"]}
    return [Point(key=f"part/{name}_s", value=float(value), unix_ms=unix_ms) for name, value in values.items()]


def _common_tags(study: str, study_id: str, facts: dict[str, Any]) -> dict[str, str]:
    """Tags of a study's run and its trials: who, versions, commit, and whether anything was trained at all."""
    tags = {f"version.{name}": str(version) for name, version in facts.get("versions", {}).items()}
    tags |= {"ledgertune.study": study, "ledgertune.study_id": study_id, "mlflow.source.type": "LOCAL"}
    try:
        tags["mlflow.user"] = getpass.getuser()
    except (KeyError, OSError):
        # A container's user need not have a name.
        tags["mlflow.user"] = "unknown"
    if facts.get("git_head"):
        tags["mlflow.source.git.commit"] = facts["git_head"]
    if facts.get("rehearsal"):
        tags["ledgertune.rehearsal"] = "true"
    redacted: dict[str, str] = redact_value(tags)
    return redacted


def _ms(unix_s: float) -> int:
    return int(1000 * unix_s)
