"""MLflow: one parent run per study, one child per trial, written in the background.

Tracking trouble never stops a trial: whatever fails here is reported as one ``tracking`` warning, and the journal
holds everything that MLflow would.
"""

from __future__ import annotations

from collections.abc import Callable
import json
import logging
import os
from pathlib import Path
import queue
import threading
from typing import Any

from tuner.records.layout import StudyFolder


FLUSH_S = 60.0
"""Longest wait for the last records at the end of a study, seconds."""

BATCH = 500
"""Metrics per request; MLflow takes at most 1,000."""

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


def local_uri(folder: StudyFolder) -> str:
    """Tracking URI of the study's own store."""
    return f"sqlite:///{folder.mlflow / 'mlflow.db'}"


class MlflowSink:
    """A listener that mirrors a study into MLflow.

    Args:
        folder: the study's folder.
        uri: tracking server; None for the study's own SQLite store.
        experiment: experiment name.
        warn: called once with a text when tracking fails.
    """

    def __init__(self, folder: StudyFolder, uri: str | None, experiment: str, warn: Callable[[str], None]) -> None:
        self._folder, self._experiment, self._warn = folder, experiment, warn
        self.uri = uri or local_uri(folder)
        self._local = uri is None
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._warned = False
        self._client: Any = None
        self._ids_path = folder.root / "mlflow.json"
        self._ids: dict[str, Any] = {"parent": None, "experiment": None, "trials": {}}
        if self._ids_path.exists():
            self._ids = json.loads(self._ids_path.read_text())
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def __call__(self, event: dict[str, Any]) -> None:
        """Take an event of the study; returns at once."""
        if event["event"] in ("session", "trial", "winner", "commit", "study_end"):
            self._queue.put(event)

    def close(self) -> None:
        """Wait for what is queued, at most :data:`FLUSH_S`."""
        self._queue.put(None)
        self._thread.join(FLUSH_S)
        if self._thread.is_alive():
            self._report(f"MLflow at {self.uri} did not take all records within {FLUSH_S:.0f} s")

    def _work(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._handle(event)
            except Exception as error:
                self._report(f"MLflow at {self.uri}: {type(error).__name__}: {str(error)[:300]}")

    def _report(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(text)

    def _handle(self, event: dict[str, Any]) -> None:
        if self._client is None:
            self._connect()
        kind = event["event"]
        if kind == "session":
            self._open_parent(event)
        elif kind == "trial":
            self._log_trial(event)
        elif kind == "winner":
            self._log_winner(event)
        elif kind == "commit":
            for key in ("repo", "branch", "hash"):
                self._client.set_tag(self._ids["parent"], f"ledgertune.commit.{key}", event[key])
        elif kind == "study_end" and "state" in event:
            status = "KILLED" if event["state"] == "interrupted" else "FINISHED"
            self._client.set_terminated(self._ids["parent"], status)

    def _connect(self) -> None:
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.ERROR)
        if self._local:
            self._folder.mlflow.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(tracking_uri=self.uri)

    def _open_parent(self, event: dict[str, Any]) -> None:
        if self._ids["parent"] is not None:
            self._client.update_run(self._ids["parent"], status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        if found is not None:
            self._ids["experiment"] = found.experiment_id
        else:
            location = (self._folder.mlflow / "artifacts").as_uri() if self._local else None
            self._ids["experiment"] = self._client.create_experiment(
                self._experiment,
                artifact_location=location,
                # Without it MLflow 3 opens its pages for language-model applications, which show nothing of a run.
                tags={"mlflow.experimentKind": "custom_model_development"},
            )
        facts = json.loads(self._folder.facts.read_text())
        tags = {"ledgertune.study": self._folder.name, "ledgertune.kind": "study"}
        tags |= _common_tags(facts)
        run = self._client.create_run(self._ids["experiment"], run_name=self._folder.name, tags=tags)
        self._ids["parent"] = run.info.run_id
        self._save()
        for key in ("model", "function", "hardware", "num_devices", "seq_len", "global_batch_seqs", "precision"):
            self._client.log_param(self._ids["parent"], key, facts[key])
        self._client.log_param(self._ids["parent"], "budget_device_s", round(event["budget_device_s"], 1))
        for path in (self._folder.job, self._folder.rejected):
            if path.exists():
                self._client.log_artifact(self._ids["parent"], str(path))

    def _log_trial(self, record: dict[str, Any]) -> None:
        from mlflow.entities import Metric
        from mlflow.entities import Param

        number = str(record["number"])
        if number in self._ids["trials"]:
            return
        facts = json.loads(self._folder.facts.read_text())
        tags = {
            "mlflow.parentRunId": self._ids["parent"],
            "ledgertune.study": self._folder.name,
            "ledgertune.kind": "trial",
            "ledgertune.trial": number,
            "ledgertune.role": record["role"],
            "ledgertune.state": record["state"],
        }
        tags |= _common_tags(facts)
        failure = record.get("failure")
        if failure:
            tags |= {"ledgertune.failure.class": failure["class"], "ledgertune.failure.text": failure["text"][:1000]}
        name = f"{int(number):03d} {record['label']}"
        ended = int(record["unix_s"] * 1000)
        started = ended - int(record["wall_s"] * 1000)
        experiment = self._ids["experiment"]
        run_id = self._client.create_run(experiment, start_time=started, run_name=name, tags=tags).info.run_id
        params = [Param(key, str(value)) for key, value in record["candidate"].items()]
        metrics = [Metric(key, float(record[key]), ended, 0) for key in SUMMARY if record.get(key) is not None]
        metrics += self._predicted(record, Metric)
        metrics += _parts(record, Metric)
        self._client.log_batch(run_id, metrics=metrics, params=params)
        steps = _step_metrics(Path(record["folder"]), Metric)
        for first in range(0, len(steps), BATCH):
            self._client.log_batch(run_id, metrics=steps[first : first + BATCH])
        for path in sorted(Path(record["folder"]).iterdir()):
            if path.is_file():
                self._client.log_artifact(run_id, str(path))
        status = {"measured": "FINISHED", "stopped": "KILLED"}.get(record["state"], "FAILED")
        self._client.set_terminated(run_id, status, end_time=ended)
        self._ids["trials"][number] = run_id
        self._save()
        if record.get("mfu_pct") is not None:
            self._client.log_metric(self._ids["parent"], "trial_mfu_pct", record["mfu_pct"], step=record["number"])

    def _predicted(self, record: dict[str, Any], metric: Any) -> list[Any]:
        predicted = record.get("predicted") or {}
        names = {
            "step_time_s": "predicted_step_time_s",
            "mfu_pct": "predicted_mfu_pct",
            "memory_gib": "predicted_memory_gib",
        }
        stamp = int(record["unix_s"] * 1000)
        return [metric(name, float(predicted[key]), stamp, 0) for key, name in names.items() if key in predicted]

    def _log_winner(self, event: dict[str, Any]) -> None:
        comparison = event["comparison"]
        parent = self._ids["parent"]
        self._client.set_tag(parent, "ledgertune.winner", event["label"])
        self._client.log_metric(parent, "winner_step_time_change_pct", comparison["step_time_change_pct"])
        self._client.log_metric(parent, "winner_mfu_points", comparison["mfu_points"])
        run_id = self._ids["trials"].get(str(event["number"]))
        if run_id is not None:
            self._client.set_tag(run_id, "ledgertune.winner", "true")

    def _save(self) -> None:
        self._ids_path.write_text(json.dumps(self._ids))


def _parts(record: dict[str, Any], metric: Any) -> list[Any]:
    """The traced step's breakdown as metrics ``part/NAME_s``."""
    found = record.get("breakdown")
    if not found:
        return []
    stamp = int(record["unix_s"] * 1000)
    values = {**found["parts_s"], "useful": found["useful_s"], "unexplained": found["unexplained_s"]}
    return [metric(f"part/{name}_s", float(value), stamp, 0) for name, value in values.items()]


def _step_metrics(folder: Path, metric: Any) -> list[Any]:
    """Step time of the slowest rank, and loss, of every step."""
    slowest: dict[int, float] = {}
    losses: dict[int, float] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                facts = json.loads(line)
            except json.JSONDecodeError:
                continue
            if "step" in facts and facts["phase"] != "trace":
                slowest[facts["step"]] = max(slowest.get(facts["step"], 0.0), facts["step_time_s"])
                if facts["loss"] is not None:
                    losses.setdefault(facts["step"], facts["loss"])
    rows = [metric("step/step_time_s", value, 0, step) for step, value in slowest.items()]
    return rows + [metric("step/loss", value, 0, step) for step, value in losses.items()]


def _common_tags(facts: dict[str, Any]) -> dict[str, str]:
    """Tags of a study's run and its trials: versions, commit, and whether anything was trained at all."""
    tags = {f"version.{name}": version for name, version in facts["versions"].items()}
    if facts.get("git_head"):
        tags["mlflow.source.git.commit"] = facts["git_head"]
    if facts.get("rehearsal"):
        tags["ledgertune.rehearsal"] = "true"
    return tags
