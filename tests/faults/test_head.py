"""The head of a cluster dies and is started again: the study ends in order, and goes on."""

from __future__ import annotations

from collections.abc import Callable
import json
from pathlib import Path
import time
from typing import Any

import pytest

from tests.e2e.conftest import Background
from tests.e2e.conftest import rank_pids
from tests.e2e.conftest import raylets
from tests.e2e.conftest import tune
from tests.e2e.conftest import wait_for_steps
from tests.e2e.conftest import write_job
from tests.faults.conftest import check_books
from tests.faults.conftest import journal


pytestmark = pytest.mark.faults

LONGER = {
    "gpus_per_node = 1": "gpus_per_node = 1\nnodes = 2",
    "steps = 4": "steps = 40\ntrace = false\nstop_confidence = 1.0",
}
"""What differs from the end-to-end tests' job: gangs of two nodes, trials that still run when it happens."""


def gangs_at_once(events: list[dict[str, Any]]) -> int:
    """The most gangs that held devices at the same time."""
    running, most = set(), 0
    for event in events:
        if event["event"] == "trial_placed":
            running.add(event["number"])
        elif event["event"] == "trial":
            running.discard(event["number"])
        most = max(most, len(running))
    return most


def test_the_head_dies_under_two_gangs_of_two_nodes(tmp_path: Path, outcome: Callable[..., None]) -> None:
    studies = tmp_path / "studies"
    job = write_job(tmp_path, trials=5, slots=1)
    for old, new in LONGER.items():
        assert old in job.read_text()
        job.write_text(job.read_text().replace(old, new))
    with raylets(4, loses_head=True) as cluster:
        run = Background(
            studies, "start", str(job), "--budget", "1-gpu-hours", "--study", "s", "--address", cluster.address
        )
        run.until("trial", number=0)
        run.until("trial_placed", number=2)
        for number in (1, 2):
            wait_for_steps(studies / "s" / "trials" / f"{number:04}", 2)
            orders = sorted((studies / "s" / "trials" / f"{number:04}").glob("order-node*.json"))
            assert len(orders) == 2, "a gang did not lie on two nodes"
        killed = time.monotonic()
        cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        code = run.finish(120)
        assert run.process.stderr is not None
        said = run.process.stderr.read()
        assert code == 2 and "Ray's head at" in said and "tune resume" in said, (code, said[-2000:])
        assert time.monotonic() - killed < 60
        until = time.monotonic() + 60
        while rank_pids(studies) and time.monotonic() < until:
            time.sleep(0.5)
        assert not rank_pids(studies), "ranks outlived the study"
    before = check_books(studies, "s", 3600)
    assert before["state"] != "running" and gangs_at_once(journal(studies, "s")) == 2
    measured = {str(trial["candidate"]) for trial in before["trials"] if trial["state"] == "measured"}
    assert measured
    with raylets(4) as cluster:
        resumed = tune(studies, "resume", "s", "--json", "--address", cluster.address, timeout=600)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    after = json.loads(resumed.stdout.splitlines()[-1])["trials"]
    # A trial whose rank died with the head may have failed of that before the tuner knew; it is one of the five then.
    early = sum(trial["state"] == "failed" for trial in before["trials"])
    assert sum(trial["state"] == "measured" for trial in after) == 5 - early, after
    for candidate in measured:
        assert sum(str(trial["candidate"]) == candidate for trial in after) == 1, "a measured candidate ran again"
    check_books(studies, "s", 3600)
    outcome("kill -9 of the head, two gangs of two nodes")
