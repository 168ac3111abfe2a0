"""Faults during a real study: kill -9 of a rank, Ctrl-C, death of the tuner."""

from __future__ import annotations

import json
import os
from pathlib import Path
import signal
import time
import urllib.request

import pytest

from tests.e2e.conftest import Background
from tests.e2e.conftest import rank_pids
from tests.e2e.conftest import tune
from tests.e2e.conftest import wait_for_steps
from tests.e2e.conftest import write_job


pytestmark = pytest.mark.e2e


def test_kill_9_of_a_rank_then_ctrl_c_then_resume(tmp_path: Path) -> None:
    """One study lives through all of it: nothing measured is lost, nothing is left running."""
    studies = tmp_path / "studies"
    job = write_job(tmp_path, trials=4)
    run = Background(studies, "start", str(job), "--budget", "0.5-gpu-hours", "--study", "s")
    dashboard = run.until("ray")["dashboard"]
    assert dashboard.startswith("http://127.0.0.1:")
    with urllib.request.urlopen(dashboard, timeout=20) as page:
        assert page.status == 200
    run.until("trial", number=0, state="measured")

    run.until("trial_placed", number=1)
    wait_for_steps(studies / "s" / "trials" / "0001")
    killed_at = time.time()
    os.kill(rank_pids(studies)[0], signal.SIGKILL)
    failed = run.until("trial", number=1)
    assert failed["state"] == "failed" and failed["failure"]["class"] == "rank_killed"
    assert "SIGKILL" in failed["failure"]["text"] and failed["failure"]["rank"] in (0, 1)
    assert failed["unix_s"] - killed_at < 30

    run.until("trial_placed", number=2)
    wait_for_steps(studies / "s" / "trials" / "0002")
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 130
    assert not rank_pids(studies)
    end = run.events[-1]
    assert end["event"] == "study_end" and end["state"] == "interrupted"
    assert [trial["state"] for trial in end["trials"]] == ["measured", "failed", "stopped"]

    resumed = tune(studies, "resume", "s", "--json")
    assert resumed.returncode == 0, resumed.stderr
    last = json.loads(resumed.stdout.splitlines()[-1])
    keys = [str(trial["candidate"]) for trial in last["trials"] if trial["state"] == "measured"]
    assert len(keys) == len(set(keys)) >= 2
    assert last["spent_device_s"] > end["spent_device_s"]
    assert last["winner"] is not None and not rank_pids(studies)


def test_kill_9_of_the_tuner_leaves_no_rank_and_loses_nothing(tmp_path: Path) -> None:
    studies = tmp_path / "studies"
    run = Background(studies, "start", str(write_job(tmp_path)), "--budget", "0.5-gpu-hours", "--study", "s")
    run.until("trial", number=0, state="measured")
    run.until("trial_placed", number=1)
    wait_for_steps(studies / "s" / "trials" / "0001")
    run.process.kill()
    run.process.wait()
    until = time.monotonic() + 40
    while rank_pids(studies) and time.monotonic() < until:
        time.sleep(0.2)
    assert not rank_pids(studies)
    status = json.loads(tune(studies, "status", "s", "--json").stdout)
    assert status["state"] == "interrupted"
    assert [trial["number"] for trial in status["trials"]] == [0]
    assert status["running"][0]["number"] == 1
    assert status["spent_device_s"] > status["trials"][0]["device_s"]
