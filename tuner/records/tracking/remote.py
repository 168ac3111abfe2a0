"""The MLflow server: connect, find or make a run, log in legal pieces; its errors told apart."""

from __future__ import annotations

from collections.abc import Sequence
import logging
import os
from pathlib import Path
import re
from typing import Any

from search_space.redact import redact
from tuner.records.tracking.limits import batches
from tuner.records.tracking.limits import legal_name
from tuner.records.tracking.limits import OLDER_VALUE_LENGTHS
from tuner.records.tracking.limits import read_limits
from tuner.records.tracking.limits import shorten
from tuner.records.tracking.runs import ID_TAG
from tuner.records.tracking.runs import Point
from tuner.records.tracking.runs import RunFacts


KIND = {"mlflow.experimentKind": "custom_model_development"}
"""Tag of an experiment. Without it MLflow 3 opens its pages for language-model applications, which show no run."""


TEXTS = (".json", ".jsonl", ".log", ".txt", ".py", ".toml")
"""Files that a training program may have written secrets into."""


class NotNow(Exception):
    """The server could take records once somebody mends something there."""


def what_kind(error: BaseException) -> str:
    """``auth`` (who are you), ``refused`` (this record, never), ``gone`` (no such run) or ``down`` (try later)."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, NotNow):
        return "down"
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status is None and isinstance(error, MlflowException):
        told = re.search(r"failed with error code (\d{3})", str(error))
        status = int(told.group(1)) if told else _status_of(error)
    if status in (401, 403):
        return "auth"
    if status == 404:
        return "gone"
    if status is not None and 400 <= status < 500 and status not in (408, 409, 425, 429):
        return "refused"
    if status is not None or isinstance(error, OSError) or "sqlalchemy" in type(error).__module__:
        return "down"
    return "refused"


def _status_of(error: Any) -> int:
    """The HTTP status that an MLflow error stands for; connection errors count as a server's fault."""
    if "failed with exception" in str(error) or "Timeout" in str(error):
        return 503
    return int(error.get_http_status_code())


class Remote:
    """A connected tracking server. Every call raises MLflow's, requests' or the system's own errors.

    Every call names its run; nothing relies on an active run, which belongs to a thread.

    Args:
        uri: tracking server.
        experiment: experiment name.
        artifacts: folder for artifacts, for a store that is a file; None where the server has a place of its own.
    """

    def __init__(self, uri: str, experiment: str, artifacts: Path | None) -> None:
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # The sender tries again by itself; its thread must not sit in MLflow's own, much longer, retries.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        # Standard output belongs to the verb.
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        self._experiment, self._artifacts = experiment, artifacts
        self._client = MlflowClient(tracking_uri=uri)
        self._limits = read_limits()
        self._value_length = self._limits.param_value

    def experiment(self) -> str:
        """Id of the experiment, made if there is none.

        Raises:
            NotNow: somebody deleted it.
        """
        found = self._client.get_experiment_by_name(self._experiment)
        if found is None:
            location = self._artifacts.as_uri() if self._artifacts is not None else None
            try:
                return str(self._client.create_experiment(self._experiment, artifact_location=location, tags=KIND))
            except Exception:
                # Another study made it meanwhile, or the answer was lost.
                found = self._client.get_experiment_by_name(self._experiment)
                if found is None:
                    raise
        if found.lifecycle_stage == "deleted":
            raise NotNow(f"experiment {self._experiment!r} was deleted on the server; restore it or name another")
        return str(found.experiment_id)

    def exists(self, run: str) -> bool:
        """Whether a run is there."""
        try:
            return bool(self._client.get_run(run).info.lifecycle_stage == "active")
        except Exception as error:
            if what_kind(error) == "gone":
                return False
            raise

    def ensure_run(self, experiment: str, facts: RunFacts) -> str:
        """Id of the run with these facts' :data:`ID_TAG`; made if there is none.

        A lost answer or a retry below us can leave several; the oldest stays, the others are deleted.
        """
        found = self._runs_of(experiment, facts.tags[ID_TAG])
        if not found:
            tags = {legal_name(k, self._limits.key): shorten(v, self._limits.tag_value) for k, v in facts.tags.items()}
            self._client.create_run(experiment, start_time=facts.started_ms, run_name=facts.name, tags=tags)
            found = self._runs_of(experiment, facts.tags[ID_TAG])
        for ghost in found[1:]:
            self._client.delete_run(ghost)
        return found[0]

    def _runs_of(self, experiment: str, identity: str) -> list[str]:
        found = self._client.search_runs(
            [experiment],
            filter_string=f"tags.`{ID_TAG}` = '{identity}'",
            max_results=20,
            order_by=["attributes.start_time ASC"],
        )
        return [run.info.run_id for run in found]

    def open_runs(self, experiment: str, study_id: str) -> list[str]:
        """Runs of a study that are still RUNNING."""
        text = f"tags.`ledgertune.study_id` = '{study_id}' and attributes.status = 'RUNNING'"
        return [run.info.run_id for run in self._client.search_runs([experiment], filter_string=text, max_results=1000)]

    def log_points(self, run: str, points: Sequence[Point]) -> None:
        """Log metrics; the same ones again change nothing."""
        from mlflow.entities import Metric

        rows = [Metric(legal_name(p.key, self._limits.key), p.value, p.unix_ms, p.step) for p in points]
        for part in batches(rows, self._limits.metrics_per_call):
            self._client.log_batch(run, metrics=list(part))

    def log_params(self, run: str, params: dict[str, str]) -> list[str]:
        """Log parameters, always by the same call, shortened with a mark; returns names that the server would not take.

        A server older than the installed client takes shorter values; its limit is found by trying and kept.
        """
        refused: list[str] = []
        for part in batches(list(params.items()), self._limits.params_per_call):
            refused += self._log_part(run, part)
        return refused

    def _log_part(self, run: str, part: Sequence[tuple[str, str]]) -> list[str]:
        lengths = [self._value_length, *(n for n in OLDER_VALUE_LENGTHS if n < self._value_length)]
        for length in lengths:
            try:
                self._log_at(run, part, length)
            except Exception as error:
                if what_kind(error) != "refused":
                    raise
                continue
            self._value_length = length
            return []
        refused = []
        for name, value in part:
            # One bad parameter must not take the others along.
            try:
                self._log_at(run, [(name, value)], self._value_length)
            except Exception as error:
                if what_kind(error) != "refused":
                    raise
                refused.append(name)
        return refused

    def _log_at(self, run: str, part: Sequence[tuple[str, str]], length: int) -> None:
        from mlflow.entities import Param

        rows = [Param(legal_name(name, self._limits.key), shorten(value, length)) for name, value in part]
        self._client.log_batch(run, params=rows)

    def set_tags(self, run: str, tags: dict[str, str]) -> None:
        """Set tags, values shortened with a mark."""
        from mlflow.entities import RunTag

        rows = [RunTag(legal_name(k, self._limits.key), shorten(v, self._limits.tag_value)) for k, v in tags.items()]
        for part in batches(rows, self._limits.params_per_call):
            self._client.log_batch(run, tags=list(part))

    def set_view(self, experiment: str, tag: str, text: str) -> None:
        """Write a saved view of charts."""
        self._client.set_experiment_tag(experiment, tag, text)

    def upload(self, run: str, path: Path) -> None:
        """Upload one file, a text without its secrets; the same again replaces it."""
        if path.suffix in TEXTS:
            text = path.read_text(errors="replace")
            clean = redact(text)
            if clean != text:
                self.upload_text(run, clean, path.name)
                return
        self._client.log_artifact(run, str(path))

    def upload_text(self, run: str, text: str, name: str) -> None:
        """Upload a text as a file."""
        self._client.log_text(run, text, name)

    def end(self, run: str, status: str, ended_ms: int | None = None) -> None:
        """Give a run its status; RUNNING opens it again."""
        if status == "RUNNING":
            self._client.update_run(run, status=status)
        else:
            self._client.set_terminated(run, status, end_time=ended_ms)
