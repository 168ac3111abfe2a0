"""Real studies: torchtitan ranks on CPU slots through a real Ray, driven by the command as a user types it."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import json
import os
from pathlib import Path
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest


JOB = """
[model]
torchtitan = "llama3:llama3_debugmodel"
[cluster]
gpu = "cpu"
gpus_per_node = {slots}
[recipe]
seq_len = 64
global_batch_seqs = 4
precision = "fp32"
data = "synthetic"
[search]
compile = false
activation_checkpoint = ["none", "full"]
max_trials = {trials}
[measure]
probe = false
control = false
steps = 4
warmup_steps = 2
[budget]
confirm_share = 0.0
"""


def tune_command(*args: str) -> list[str]:
    """The command line of `tune`, as the running interpreter has it."""
    return [sys.executable, "-P", "-c", "import sys; from tuner.cli import main; sys.exit(main())", *args]


def environment(studies: Path) -> dict[str, str]:
    """A user's environment, with studies in the test's folder."""
    root = str(Path(__file__).resolve().parents[2])
    return os.environ | {"LEDGERTUNE_STUDIES": str(studies), "PYTHONPATH": root}


def tune(studies: Path, *args: str, cwd: Path | None = None, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run `tune` to its end."""
    return subprocess.run(
        tune_command(*args),
        env=environment(studies),
        cwd=cwd or studies.parent,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def write_job(folder: Path, trials: int = 2, slots: int = 2, extra: str = "") -> Path:
    """A job file of a few seconds a trial."""
    path = folder / "job.toml"
    path.write_text(JOB.format(trials=trials, slots=slots) + extra)
    return path


@contextlib.contextmanager
def raylets(nodes: int, *, loses_head: bool = False) -> Iterator[Any]:
    """A Ray of several nodes on this machine, one CPU slot each; the first is the head, which a test may kill."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "resources": {"tune_slot": 1}, "include_dashboard": False},
    )
    try:
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=2, resources={"tune_slot": 1})
        cluster.wait_for_nodes()
        yield cluster
    finally:
        with contextlib.suppress(Exception) if loses_head else contextlib.nullcontext():
            cluster.shutdown()


class Background:
    """A `tune` that runs while the test does something to it; its events are read as they come."""

    def __init__(self, studies: Path, *args: str) -> None:
        self.process = subprocess.Popen(
            tune_command(*args, "--json"),
            env=environment(studies),
            cwd=studies.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.events: list[dict[str, Any]] = []

    def until(self, kind: str, **wanted: Any) -> dict[str, Any]:
        """Read events up to the first one of this kind with these values."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            self.events.append(event)
            if event["event"] == kind and all(event.get(key) == value for key, value in wanted.items()):
                return event
        assert self.process.stderr is not None
        raise AssertionError(f"no {kind} {wanted}: {self.process.stderr.read()}\n{self.events[-3:]}")

    def finish(self, timeout: float = 240) -> int:
        """Read to the end; returns the exit code."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
        return self.process.wait(timeout)


def rank_pids(folder: Path) -> list[int]:
    """Live rank processes of the trials under ``folder``."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(folder) in line and "trial_runner.rank" in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.info["pid"])
    return found


def wait_for_steps(trial: Path, steps: int = 1, seconds: float = 90) -> None:
    """Wait until rank 0 of a trial has recorded so many steps."""
    until = time.monotonic() + seconds
    path = trial / "rank0.jsonl"
    while time.monotonic() < until:
        if path.exists() and path.read_text().count('"step":') >= steps:
            return
        time.sleep(0.1)
    raise AssertionError(f"{trial} recorded no {steps} steps in {seconds} s")


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """One finished study of two trials, and its events."""
    root = tmp_path_factory.mktemp("finished")
    studies = root / "studies"
    job = write_job(root)
    job.write_text(job.read_text().replace("control = false\n", ""))
    done = tune(studies, "start", str(job), "--budget", "0.2-gpu-hours", "--study", "done", "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    yield studies, [json.loads(line) for line in done.stdout.splitlines()]
