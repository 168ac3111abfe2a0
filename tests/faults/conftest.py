"""Faults thrown at studies that run for real over simulated nodes; what survived is printed as a table at the end."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from dataclasses import dataclass
import json
from pathlib import Path
import random
import time
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Background
from tests.e2e.conftest import raylets
from tests.e2e.conftest import tune
from tuner.records.roles import searched


JOB = """
[model]
torchtitan = "llama3:llama3_debugmodel"
[cluster]
gpu = "cpu"
gpus_per_node = 1
[recipe]
seq_len = 64
global_batch_seqs = 64
precision = "fp32"
data = "synthetic"
[search]
compile = false
micro_batch = [1, 2, 4, 8, 16, 32, 64]
activation_checkpoint = ["none", "selective", "full", "first_n"]
first_n = [1, 2, 3, 4, 5]
nosync = [false, true]
fsdp_bucket = [1, 2, 3]
max_trials = {trials}
[measure]
steps = {steps}
warmup_steps = 2
trace = false
probe = false
control = false
[budget]
confirm_share = 0.0
"""


@dataclass
class Outcome:
    """One kind of fault."""

    fault: str
    injected: int
    survived: int
    lost: str


OUTCOMES: list[Outcome] = []


@pytest.fixture
def outcome(record_property: Callable[[str, object], None]) -> Callable[[str, int, int, str], None]:
    """Call with (fault, injected, survived, what was lost) at the end of a test; the table shows it."""

    def note(fault: str, injected: int = 1, survived: int = 1, lost: str = "nothing") -> None:
        record_property("outcome", [fault, injected, survived, lost])

    return note


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect outcomes where the table is printed, whichever worker ran the test."""
    if report.when == "call":
        OUTCOMES.extend(Outcome(*value) for key, value in report.user_properties if key == "outcome")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The table: fault, injected, survived, lost."""
    if OUTCOMES:
        terminalreporter.write_line(f"{'fault':44} {'injected':>8} {'survived':>8}  lost")
        for row in OUTCOMES:
            terminalreporter.write_line(f"{row.fault:44} {row.injected:8} {row.survived:8}  {row.lost}")


def write_job(folder: Path, trials: int, steps: int = 20, extra: str = "") -> Path:
    """A job whose trials take a second or two in a rehearsal."""
    path = folder / "job.toml"
    path.write_text(JOB.format(trials=trials, steps=steps) + extra)
    return path


@pytest.fixture
def three_nodes() -> Iterator[Any]:
    """Three raylets on this machine; the first is the head and is never killed."""
    with raylets(3) as cluster:
        yield cluster


def processes(folder: Path, *words: str) -> list[psutil.Process]:
    """Live processes whose command line names a folder and some words."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if alive and str(folder) in line and all(word in line for word in words):
            found.append(process)
    return found


def ranks(folder: Path) -> list[psutil.Process]:
    """Live ranks of trials under a folder, rehearsing or training."""
    return processes(folder, "trial_runner.r")


def agents(folder: Path) -> list[psutil.Process]:
    """Ray's worker processes that hold the agent of a gang whose trial lies under a folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if "ray::Agent" in " ".join(process.info["cmdline"] or []) and any(
                child.cwd().startswith(str(folder)) for child in process.children()
            ):
                found.append(process)
    return found


def kill_one(found: list[psutil.Process], dice: random.Random) -> bool:
    """Kill -9 one of some processes; whether there was one."""
    if not found:
        return False
    with contextlib.suppress(psutil.Error):
        dice.choice(found).kill()
        return True
    return False


def journal(studies: Path, name: str) -> list[dict[str, Any]]:
    """Every whole line of a study's journal."""
    lines = []
    for line in (studies / name / "journal.jsonl").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def status(studies: Path, name: str) -> dict[str, Any]:
    """What `tune status --json` says."""
    facts: dict[str, Any] = json.loads(tune(studies, "status", name, "--json").stdout)
    return facts


def check_books(studies: Path, name: str, budget_device_s: float) -> dict[str, Any]:
    """What must hold after anything: books that add up, every measured trial known, nothing left running.

    Returns:
        The study's status.
    """
    until = time.monotonic() + 30
    while ranks(studies) and time.monotonic() < until:
        time.sleep(0.2)
    assert not ranks(studies), "ranks were left behind"
    facts = status(studies, name)
    events = journal(studies, name)
    written = {event["number"]: event for event in events if event["event"] == "trial"}
    assert set(written) <= {trial["number"] for trial in facts["trials"]}
    charged = sum(trial["device_s"] for trial in facts["trials"])
    lost = sum(trial.get("device_s", 0.0) for trial in facts.get("running", []))
    assert facts["spent_device_s"] <= budget_device_s + 1e-6
    assert abs(facts["spent_device_s"] - charged - lost) < 0.5 + 0.01 * charged
    # A run that something outside disturbed may be repeated.
    counted = [t for t in facts["trials"] if t["state"] == "measured" and searched(t) and not t.get("undisturbed_s")]
    keys = [json.dumps(trial["candidate"], sort_keys=True) for trial in counted]
    assert len(keys) == len(set(keys)), "a measured candidate was measured again"
    every = [
        json.dumps(t["candidate"], sort_keys=True) for t in facts["trials"] if t["state"] == "measured" and searched(t)
    ]
    assert all(every.count(key) <= 2 for key in every), "a disturbed candidate was repeated more than once"
    return facts


__all__ = ["Background", "check_books", "journal", "kill_one", "ranks", "status", "tune", "write_job"]
