"""The steps of a running job: torchtitan's console log, its structured JSON log, or an MLflow run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field
from datetime import datetime
import json
from pathlib import Path
import re
from typing import Any

from search_space.errors import UserError


CONSOLE = re.compile(r"step:\s*([\d,]+)\b.*?\btps:\s*([\d,.]+)")
"""A step line of torchtitan's console log; lines of validation have ``validate step`` and no ``tps`` that counts."""

STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)")
"""Time stamp of a line."""

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Terminal colours."""

TIMES = ("step/step_time_s", "step_time_s", "time_metrics/end_to_end_s", "time_metrics/end_to_end", "end_to_end_s")
"""MLflow metrics that are seconds a step."""

RATES = ("tokens_per_s_per_device", "throughput_tps", "throughput", "tps")
"""MLflow metrics that are tokens a second and device."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One logged step."""

    step: int
    """Number of the step."""

    unix_s: float | None
    """When, as far as the log says it."""

    step_time_s: float | None = None
    """Seconds of the step."""

    rate: float | None = None
    """Tokens a second and device."""

    spans: dict[str, float] = field(default_factory=dict)
    """Seconds of named phases of the step, where the log has them."""


def read_run(source: str, tracking_uri: str | None = None, metric: str | None = None) -> list[Point]:
    """The points of a log file, a folder of logs, or an MLflow run (``mlflow:RUN_ID``, ``runs:/RUN_ID`` or its id).

    Raises:
        UserError: there is no such log or run, or no step is in it.
    """
    path = Path(source).expanduser()
    if path.exists():
        points = read_file(log_of(path))
    else:
        run_id = re.sub(r"^(?:mlflow:|runs:/)", "", source)
        if not re.fullmatch(r"[0-9a-f]{32}", run_id):
            raise UserError(f"watch {source}: no such file or folder, and no MLflow run id (32 hexadecimal digits)")
        points = _from_mlflow(run_id, tracking_uri, metric)
    if not points:
        raise UserError(
            f"watch {source}: no step in it; torchtitan's console log, its structured log or MLflow is read"
        )
    return points


def log_of(path: Path) -> Path:
    """The log in a folder: rank 0 of the structured log, else the newest text log.

    Raises:
        UserError: the folder holds none.
    """
    if not path.is_dir():
        return path
    structured = sorted(path.rglob("*global_rank_0.*.jsonl")) or sorted(path.rglob("rank0*.jsonl"))
    logs = structured or sorted(path.rglob("*.log"))
    if not logs:
        raise UserError(f"watch {path}: no *.jsonl and no *.log in this folder")
    return max(logs, key=lambda log: log.stat().st_mtime)


def read_file(path: Path) -> list[Point]:
    """The points of one log file, whatever its kind.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return parse(lines)
    except OSError as error:
        raise UserError(f"watch {path}: cannot be read ({error.strerror})") from None


def parse(lines: Iterable[str]) -> list[Point]:
    """The points of lines; what is no step is passed over, a torn last line too."""
    points: list[Point] = []
    spans: dict[str, float] = {}
    for line in lines:
        text = line.strip()
        if text.startswith("{"):
            try:
                values = json.loads(text)
            except json.JSONDecodeError:
                continue
            if isinstance(values, dict):
                point = _structured(values, spans)
                if point is not None:
                    points.append(point)
                    spans = {}
            continue
        found = CONSOLE.search(COLOUR.sub("", text))
        if found and "validate step" not in text:
            stamp = STAMP.search(text)
            rate = float(found[2].replace(",", "") or 0)
            if rate > 0:
                step = int(found[1].replace(",", ""))
                points.append(Point(step=step, unix_s=_unix(stamp[1]) if stamp else None, rate=rate))
    return points


def _unix(stamp: str) -> float | None:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None


def _structured(values: dict[str, Any], spans: dict[str, float]) -> Point | None:
    """A step from a record of torchtitan's structured log (milliseconds) or of our own ranks (seconds)."""
    step = values.get("step")
    if not isinstance(step, int) or isinstance(step, bool):
        return None
    name, value = values.get("log_type_name"), values.get("value")
    when = values.get("time_us")
    unix_s = when / 1e6 if isinstance(when, (int, float)) else None
    if isinstance(name, str) and name.endswith("_end") and isinstance(value, (int, float)):
        if name == "step_end":
            return Point(step=step, unix_s=unix_s, step_time_s=value / 1e3, spans=dict(spans)) if value > 0 else None
        spans[name.removesuffix("_end")] = spans.get(name.removesuffix("_end"), 0.0) + value / 1e3
        return None
    seconds = values.get("step_time_s")
    if isinstance(seconds, (int, float)) and seconds > 0 and values.get("phase", "measured") == "measured":
        return Point(step=step, unix_s=values.get("unix_s"), step_time_s=float(seconds))
    return None


def _from_mlflow(run_id: str, uri: str | None, metric: str | None) -> list[Point]:
    import logging

    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    logging.getLogger("alembic").setLevel(logging.ERROR)
    try:
        client = MlflowClient(tracking_uri=uri)
        known = client.get_run(run_id).data.metrics
        names = [metric] if metric else [name for name in (*TIMES, *RATES) if name in known]
        if not names or names[0] not in known:
            shown = ", ".join(sorted(known)[:12]) or "none"
            wanted = metric or "of step time or throughput"
            raise UserError(f"watch {run_id}: no metric {wanted}; it has {shown} (--metric)")
        # A summary has one value; what was logged step by step is the longest.
        histories = {name: client.get_metric_history(run_id, name) for name in names}
        name = max(names, key=lambda one: len(histories[one]))
        history = histories[name]
    except MlflowException as error:
        raise UserError(f"watch {run_id}: MLflow: {str(error)[:200]}; --tracking-uri names the server") from None
    rate = name in RATES or bool(re.search(r"tps|tokens|throughput", name))
    points = []
    for entry in sorted(history, key=lambda entry: (entry.timestamp, entry.step)):
        if entry.value > 0:
            values = {"rate": entry.value} if rate else {"step_time_s": entry.value}
            points.append(Point(step=entry.step, unix_s=entry.timestamp / 1e3, **values))
    return points
