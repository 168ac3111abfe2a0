"""One fault at a time, each on a study of its own."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import json
import os
from pathlib import Path
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tests.e2e.conftest import environment
from tests.e2e.conftest import tune_command
from tests.e2e.conftest import wait_for_steps
from tests.faults.conftest import agents
from tests.faults.conftest import Background
from tests.faults.conftest import check_books
from tests.faults.conftest import journal
from tests.faults.conftest import processes
from tests.faults.conftest import ranks
from tests.faults.conftest import tune
from tests.faults.conftest import write_job


pytestmark = pytest.mark.faults

BUDGET = ("--budget", "1-gpu-hours")
Note = Callable[..., None]


def started(tmp_path: Path, trials: int = 4, steps: int = 60, *more: str) -> tuple[Path, Background]:
    """A rehearsed study whose first trial after the baseline runs."""
    studies = tmp_path / "studies"
    job = write_job(tmp_path, trials, steps)
    run = Background(studies, "start", str(job), *BUDGET, "--rehearse", "--study", "s", *more)
    run.until("trial", number=0)
    run.until("trial_placed", number=1)
    wait_for_steps(studies / "s" / "trials" / "0001", 3)
    return studies, run


def test_rank_killed(tmp_path: Path, outcome: Note) -> None:
    studies, run = started(tmp_path)
    ranks(studies)[0].kill()
    failed = run.until("trial", number=1)
    assert failed["failure"]["class"] == "rank_killed"
    assert run.finish() == 0
    facts = check_books(studies, "s", 3600)
    again = [trial for trial in facts["trials"] if trial["candidate"] == failed["candidate"]]
    assert [trial["state"] for trial in again] == ["failed", "measured"], "the killed candidate was not tried again"
    outcome("kill -9 of a rank")


def test_agent_killed(tmp_path: Path, outcome: Note) -> None:
    studies, run = started(tmp_path)
    agents(studies)[0].kill()
    failed = run.until("trial", number=1)
    assert failed["failure"]["class"] in ("agent_lost", "node_lost", "rank_killed"), failed["failure"]
    assert run.finish() == 0
    check_books(studies, "s", 3600)
    outcome("kill -9 of a node's agent")


def on_three_nodes(cluster: Any, tmp_path: Path, trials: int, until: int) -> tuple[Path, Background]:
    """A rehearsed study over three nodes, once trial ``until`` was placed."""
    studies = tmp_path / "studies"
    job = write_job(tmp_path, trials, 100)
    run = Background(studies, "start", str(job), *BUDGET, "--rehearse", "--study", "s", "--address", cluster.address)
    run.until("trial", number=0)
    run.until("trial_placed", number=until)
    return studies, run


def measured_trials(facts: dict[str, Any]) -> int:
    """Trials of a study's status that measured something."""
    return sum(trial["state"] == "measured" for trial in facts["trials"])


def test_raylet_killed(three_nodes: Any, tmp_path: Path, outcome: Note) -> None:
    studies, run = on_three_nodes(three_nodes, tmp_path, 8, 3)
    three_nodes.remove_node(three_nodes.worker_nodes.copy().pop(), allow_graceful=False)
    three_nodes.add_node(num_cpus=2, resources={"tune_slot": 1})
    assert run.finish() == 0
    facts = check_books(studies, "s", 3600)
    assert measured_trials(facts) >= 6
    outcome("kill -9 of a node (raylet)")


def test_raylet_stopped_answering(three_nodes: Any, tmp_path: Path, outcome: Note) -> None:
    """A node that hangs, as one does behind a cut cable: its processes live, nothing of it answers."""
    studies, run = on_three_nodes(three_nodes, tmp_path, 6, 2)
    node = three_nodes.worker_nodes.copy().pop()
    stopped = [info.process for infos in node.all_processes.values() for info in infos]
    for process in stopped:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        assert run.finish(400) == 0
    finally:
        for process in stopped:
            os.kill(process.pid, signal.SIGCONT)
    facts = check_books(studies, "s", 3600)
    assert measured_trials(facts) >= 4
    outcome("a node that no longer answers")


def test_RAY_18_a_lost_node_ends_its_gang_within_seconds(three_nodes: Any, tmp_path: Path, outcome: Note) -> None:
    """One of a gang's two nodes dies in the middle of the steps: the other's ranks are killed long before a collective
    would time out, the class is the node's, and the candidate runs again on the nodes that are left."""
    studies = tmp_path / "studies"
    job = write_job(tmp_path, 3, 300)
    job.write_text(job.read_text().replace("gpus_per_node = 1", "gpus_per_node = 1\nnodes = 2"))
    verb = ("start", str(job), *BUDGET, "--rehearse", "--study", "s", "--address", three_nodes.address)
    run = Background(studies, *verb)
    run.until("trial", number=0)
    placed = run.until("trial_placed", number=1)
    wait_for_steps(studies / "s" / "trials" / "0001", 30)
    lies_on = {node.node_id: node for node in three_nodes.worker_nodes}
    began = time.monotonic()
    gone = [key for key in lies_on if key in _nodes_of(studies, placed["number"])][:1]
    three_nodes.remove_node(lies_on[gone[0]], allow_graceful=False)
    failed = run.until("trial", number=1)
    assert time.monotonic() - began < 90
    assert failed["failure"]["class"] in ("node_lost", "agent_lost"), failed["failure"]
    lost = _nodes_of(studies, 1).index(gone[0])
    trial = studies / "s" / "trials" / "0001"
    assert not processes(trial, "trial_runner.r", f"order-node{1 - lost}.json"), "the other node's rank lives on"
    # The lost node's own ranks end with its agent, a moment later; on a real node they went with the machine.
    until = time.monotonic() + 15
    while processes(trial, "trial_runner.r") and time.monotonic() < until:
        time.sleep(0.2)
    assert not processes(trial, "trial_runner.r")
    assert run.finish() == 0
    facts = check_books(studies, "s", 3600)
    again = [trial["state"] for trial in facts["trials"] if trial["candidate"] == failed["candidate"]]
    assert again == ["failed", "measured"]
    outcome("one of a gang's two nodes is lost")


def _nodes_of(studies: Path, number: int) -> list[str]:
    """Ray's ids of the nodes that a running trial lies on."""
    return next(e["nodes"] for e in journal(studies, "s") if e["event"] == "trial_placed" and e["number"] == number)


def test_driver_killed(tmp_path: Path, outcome: Note) -> None:
    studies, run = started(tmp_path)
    measured = [event["number"] for event in journal(studies, "s") if event["event"] == "trial"]
    run.process.kill()
    run.process.wait()
    facts = check_books(studies, "s", 3600)
    assert [trial["number"] for trial in facts["trials"] if trial["state"] == "measured"] == measured
    resumed = tune(studies, "resume", "s", "--json")
    assert resumed.returncode == 0, resumed.stderr
    facts = check_books(studies, "s", 3600)
    assert measured_trials(facts) == 4
    outcome("kill -9 of the tuner")


@pytest.mark.parametrize("moment", range(3))
def test_interrupted_at_any_moment(tmp_path: Path, outcome: Note, moment: int) -> None:
    studies = tmp_path / "studies"
    run = Background(studies, "start", str(write_job(tmp_path, 3, 30)), *BUDGET, "--rehearse", "--study", "s")
    if moment:
        run.until(("", "ray", "trial_placed")[moment])
    time.sleep(random.Random(moment).uniform(0, 1.5) + (0 if moment else 1.5))
    run.process.send_signal(signal.SIGINT)
    code = run.finish()
    assert code == 130 or (code == 0 and moment), code
    assert not ranks(studies)
    if (studies / "s" / "study.json").exists():
        resumed = tune(studies, "resume", "s", "--json")
        assert resumed.returncode == 0, resumed.stderr
        facts = check_books(studies, "s", 3600)
        assert measured_trials(facts) == 3
    outcome(f"Ctrl-C ({('planning', 'joining Ray', 'a trial runs')[moment]})")


def test_second_resume_is_refused(tmp_path: Path, outcome: Note) -> None:
    studies, run = started(tmp_path)
    second = tune(studies, "resume", "s", "--json")
    assert second.returncode == 2 and "running already" in second.stderr
    assert run.finish() == 0
    check_books(studies, "s", 3600)
    outcome("a second resume of a running study")


def test_sqlite_locked(tmp_path: Path, outcome: Note) -> None:
    studies, run = started(tmp_path)
    (database,) = [path for path in (studies / "s").glob("*.db") if "optuna" in path.name]
    held = sqlite3.connect(database, timeout=30, isolation_level=None, check_same_thread=False)
    held.execute("BEGIN EXCLUSIVE")
    threading.Timer(8, lambda: (held.execute("ROLLBACK"), held.close())).start()
    assert run.finish() == 0
    facts = check_books(studies, "s", 3600)
    assert measured_trials(facts) == 4
    outcome("Optuna's database locked for 8 s")


def test_mlflow_server_killed(tmp_path: Path, outcome: Note) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", "18417", "--workers", "1",
         "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db", "--artifacts-destination", str(tmp_path / "files")],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        _wait_for_port(18417)
        studies, run = started(tmp_path, 3, 40, "--mlflow-uri", "http://127.0.0.1:18417")
        os.killpg(server.pid, signal.SIGKILL)
        assert run.finish(500) == 0
        facts = check_books(studies, "s", 3600)
        assert measured_trials(facts) == 3 and facts["tracking"]["waiting_records"] > 0
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
    outcome("kill -9 of the MLflow server", lost="nothing (records wait on disk)")


def _wait_for_port(port: int, seconds: float = 60) -> None:
    import socket

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.3)
    raise AssertionError(f"nothing listens on {port}")


CLOCK = """
import sys, time
real, began = time.time, time.monotonic()
time.time = lambda: real() - (7200 if time.monotonic() - began > {after} else 0)
from tuner.cli import main
sys.exit(main())
"""


def test_clock_step(tmp_path: Path, outcome: Note) -> None:
    """The wall clock jumps back by two hours in the middle; charges rest on the monotonic one."""
    studies = tmp_path / "studies"
    job = write_job(tmp_path, 4, 30)
    command = [*tune_command()[:2], "-c", CLOCK.format(after=14)]
    done = subprocess.run(
        [*command, "start", str(job), *BUDGET, "--rehearse", "--study", "s", "--json"],
        env=environment(studies), cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    facts = check_books(studies, "s", 3600)
    end = json.loads(done.stdout.splitlines()[-1])
    assert 0 < end["spent_device_s"] < 200 and len(facts["trials"]) == 4
    assert all(0 < trial["device_s"] < 100 for trial in facts["trials"])
    outcome("the clock steps back by two hours")


def test_hung_rank(tmp_path: Path, outcome: Note) -> None:
    """A rank that stops in the middle of a step: the gang is ended after its patience, the search goes on."""
    studies, run = started(tmp_path, 3, 400)
    ranks(studies)[0].send_signal(signal.SIGSTOP)
    failed = run.until("trial", number=1)
    assert failed["failure"]["class"] in ("hang", "timeout"), failed["failure"]
    assert not processes(studies / "s" / "trials" / "0001", "trial_runner.r")
    assert run.finish() == 0
    check_books(studies, "s", 3600)
    outcome("a rank that stops in a step")


def test_disk_full(tmp_path: Path, outcome: Note) -> None:
    """The disk of the studies runs full in the middle of a trial: the tuner ends and says so, and goes on once there is
    room again."""
    studies = tmp_path / "studies"
    studies.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(studies)]).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        _, run = started(tmp_path)
        measured = [event["number"] for event in journal(studies, "s") if event["event"] == "trial"]
        filler = studies / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 65536)
        assert run.finish(200) == 2
        assert not ranks(studies)
        filler.unlink()
        facts = check_books(studies, "s", 3600)
        assert set(measured) <= {trial["number"] for trial in facts["trials"] if trial["state"] == "measured"}
        resumed = tune(studies, "resume", "s", "--json")
        assert resumed.returncode == 0, resumed.stderr
        # The trial that met the full disk counts as one of the four, but is held against no candidate.
        assert measured_trials(check_books(studies, "s", 3600)) >= 3
    finally:
        subprocess.run(["umount", "-l", str(studies)], check=True)
    outcome("the disk runs full")
