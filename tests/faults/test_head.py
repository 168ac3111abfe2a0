"""The head of a cluster dies and is started again: the study ends in order, and goes on."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import json
from pathlib import Path
import time
from typing import Any

import pytest

from tests.e2e.conftest import Background
from tests.e2e.conftest import rank_pids
from tests.e2e.conftest import tune
from tests.e2e.conftest import wait_for_steps
from tests.faults.conftest import check_books
from tests.faults.conftest import journal


pytestmark = pytest.mark.faults

JOB = """
[model]
torchtitan = "llama3:llama3_debugmodel"
[cluster]
gpu = "cpu"
gpus_per_node = 1
nodes = 2
[recipe]
seq_len = 64
global_batch_seqs = 4
precision = "fp32"
data = "synthetic"
[search]
compile = false
activation_checkpoint = ["none", "full"]
max_trials = 5
[measure]
probe = false
trace = false
stop_confidence = 1.0
steps = 40
warmup_steps = 2
[budget]
confirm_share = 0.0
"""


@contextlib.contextmanager
def four_nodes() -> Any:
    """Four raylets on this machine, one CPU slot each; the first is the head."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "resources": {"tune_slot": 1}, "include_dashboard": False},
    )
    try:
        for _ in range(3):
            cluster.add_node(num_cpus=2, resources={"tune_slot": 1})
        cluster.wait_for_nodes()
        yield cluster
    finally:
        with contextlib.suppress(Exception):
            cluster.shutdown()


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
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    with four_nodes() as cluster:
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
    with four_nodes() as cluster:
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
