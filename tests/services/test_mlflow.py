"""A real MLflow server: killed in the middle of a study, asking for a password, showing our charts."""

from __future__ import annotations

import json
import os
from pathlib import Path
import time
from typing import Any

import pytest

from tests.e2e.conftest import Background
from tests.e2e.conftest import tune
from tests.faults.conftest import write_job
from tests.services.conftest import Opened
from tests.services.mlflow_server import client
from tests.services.mlflow_server import Server
from tests.services.mlflow_server import serving
from tests.tuner.tracking.study import new_study
from tests.tuner.tracking.study import whole_study
from tuner.records.tracking.state import read_state
from tuner.records.tracking.tracker import Tracker
from tuner.records.tracking.views import page_urls


pytestmark = pytest.mark.services

OUTAGE_S = float(os.environ.get("LEDGERTUNE_OUTAGE_S", "8"))
"""How long the server is away, seconds."""

PASSWORD = "not-a-real-password-1"


def runs_of(server: Server) -> list[Any]:
    found = client(server)
    ids = [experiment.experiment_id for experiment in found.search_experiments()]
    return list(found.search_runs(ids, max_results=1000))


def test_killed_in_the_middle_of_a_study(tmp_path: Path) -> None:
    """Away for a while, back before the end: nothing lost, nothing twice, no trial failed, nothing left RUNNING."""
    studies = tmp_path / "studies"
    with serving(tmp_path / "server") as server:
        job = write_job(tmp_path, 8, 60)
        command = ("start", str(job), "--budget", "1-gpu-hours", "--rehearse", "--study", "s")
        run = Background(studies, *command, "--mlflow-uri", server.uri)
        run.until("trial", number=0)
        server.kill()
        away = time.monotonic()
        run.until("trial", number=2)
        while time.monotonic() - away < OUTAGE_S:
            time.sleep(0.1)
        server.start()
        assert run.finish(500) == 0
        if read_state(_folder(studies)) is None or "takes records again" not in json.dumps(run.events):
            # The study ended before the sender's next try; what waits goes now.
            sent = tune(studies, "sync", "s", "--json")
            assert sent.returncode == 0, sent.stderr
        status = json.loads(tune(studies, "status", "s", "--json").stdout)
        assert [trial["state"] for trial in status["trials"]] == ["measured"] * len(status["trials"])
        assert status["tracking"]["waiting_records"] == status["tracking"]["waiting_files"] == 0
        runs = runs_of(server)
        numbers = [int(run.data.tags["ledgertune.trial"]) for run in runs if "ledgertune.trial" in run.data.tags]
        assert sorted(numbers) == sorted(trial["number"] for trial in status["trials"])
        assert len(runs) == len(numbers) + 1 and all(run.info.status != "RUNNING" for run in runs)
        warned = [event["text"] for event in run.events if event["event"] == "warning"]
        assert sum("does not take records" in text for text in warned) == 1, warned
        last = max(runs, key=lambda one: int(one.data.tags.get("ledgertune.trial", -1)))
        history = client(server).get_metric_history(last.info.run_id, "step/step_time_s")
        assert len({metric.step for metric in history}) == len(history) == 62


def _folder(studies: Path) -> Any:
    from tuner.records.layout import StudyFolder

    return StudyFolder(studies / "s")


def test_a_wrong_password_is_said_once_and_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path / "server", PASSWORD) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "quite-wrong-password")
        folder, said = new_study(tmp_path / "s", server.uri), []
        tracker = Tracker(folder, server.uri, "e", said.append)
        whole_study(folder)
        for _ in range(20):
            tracker({"event": "trial"})
            time.sleep(0.05)
        while not said:
            time.sleep(0.1)
        tracker.close()
        clear = [text for text in said if "refuses this user or password" in text]
        assert len(clear) == 1 and "MLFLOW_TRACKING_PASSWORD" in clear[0]
        assert "quite-wrong-password" not in "".join(said)
        studies = tmp_path
        refused = tune(studies, "sync", str(folder.root), "--json")
        assert refused.returncode == 2 and "refuses this user or password" in refused.stderr
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
        sent = tune(studies, "sync", str(folder.root), "--json")
        assert sent.returncode == 0, sent.stderr
        assert json.loads(sent.stdout)["trials"] == 3 and json.loads(sent.stdout)["status"] == "FINISHED"
        assert len(runs_of(server)) == 4


def test_a_password_in_the_address_is_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    with serving(tmp_path / "server", PASSWORD) as server:
        folder = new_study(tmp_path / "s")
        whole_study(folder)
        address = server.uri.replace("http://", f"http://admin:{PASSWORD}@")
        sent = tune(tmp_path, "sync", str(folder.root), "--mlflow-uri", address, "--json")
        assert sent.returncode == 0 and PASSWORD not in sent.stdout + sent.stderr
        held = "".join(path.read_text(errors="replace") for path in folder.root.rglob("*") if path.is_file())
        assert PASSWORD not in held and len(runs_of(server)) == 4


def test_the_charts_and_the_comparison_open(opened: Opened, tmp_path: Path) -> None:
    """MLflow's own pages in Chromium: the saved view draws our charts, the comparison names every trial."""
    with serving(tmp_path / "server") as server:
        folder = new_study(tmp_path / "s")
        whole_study(folder, trials=4)
        assert tune(tmp_path, "sync", str(folder.root), "--mlflow-uri", server.uri).returncode == 0
        state = read_state(folder)
        assert state is not None
        urls = page_urls(server.uri, state.experiment, state.parent, list(state.trials.values()), state.study_id)
        page = opened.page
        page.goto(urls["charts"])
        page.wait_for_selector(".js-plotly-plot", timeout=90_000)
        page.wait_for_timeout(3000)
        if os.environ.get("LEDGERTUNE_SCREENSHOTS"):
            page.screenshot(path=os.path.join(os.environ["LEDGERTUNE_SCREENSHOTS"], "mlflow-charts.png"))
        text = page.inner_text("body")
        assert "Error loading shared view" not in text and "predicted_step_time_s" in text, text[:2000]
        assert len(page.query_selector_all(".js-plotly-plot")) >= 4
        page.goto("about:blank")
        page.goto(urls["compare"])
        page.wait_for_selector("text=/Comparing 4 Runs/i", timeout=90_000)
        if os.environ.get("LEDGERTUNE_SCREENSHOTS"):
            page.screenshot(path=os.path.join(os.environ["LEDGERTUNE_SCREENSHOTS"], "mlflow-compare.png"))
