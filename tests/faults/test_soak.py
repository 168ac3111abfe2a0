"""200 short trials on three nodes with a fault every few seconds: nothing measured is lost."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import os
from pathlib import Path
import random
import signal
import subprocess
import threading
import time
from typing import Any

import pytest

from tests.e2e.conftest import environment
from tests.e2e.conftest import tune_command
from tests.faults.conftest import agents
from tests.faults.conftest import check_books
from tests.faults.conftest import journal
from tests.faults.conftest import kill_one
from tests.faults.conftest import ranks
from tests.faults.conftest import write_job


pytestmark = pytest.mark.faults

TRIALS = 200
FAULT_EVERY_S = 6.0
LONGEST_S = 1000.0


def test_two_hundred_trials_with_faults(three_nodes: Any, tmp_path: Path, outcome: Callable[..., None]) -> None:
    studies = tmp_path / "studies"
    job = write_job(tmp_path, TRIALS, steps=10)
    dice = random.Random(7)
    injected: dict[str, int] = {}
    seen: dict[int, str] = {}
    verb = ["start", str(job), "--budget", "10-gpu-hours", "--rehearse", "--study", "s"]
    began = time.monotonic()
    while time.monotonic() - began < LONGEST_S:
        with (tmp_path / "out.txt").open("ab") as out:
            driver = subprocess.Popen(
                tune_command(*verb, "--address", three_nodes.address, "--plain"),
                env=environment(studies), cwd=tmp_path, stdout=out, stderr=out,
            )  # fmt: skip
        stop = threading.Event()
        threading.Thread(target=_throw, args=(driver, three_nodes, studies, dice, injected, stop), daemon=True).start()
        code = driver.wait(LONGEST_S)
        stop.set()
        events = journal(studies, "s")
        for event in events:
            if event["event"] == "trial" and event["state"] == "measured":
                seen.setdefault(event["number"], event["label"])
        reason = next((e.get("reason", "") for e in reversed(events) if e["event"] == "study_end"), "")
        if code == 0 and "max_trials" in reason:
            break
        verb = ["resume", "s"]
    facts = check_books(studies, "s", 36000)
    known = {trial["number"]: trial["label"] for trial in facts["trials"] if trial["state"] == "measured"}
    assert all(known.get(number) == label for number, label in seen.items()), "a measured trial was lost"
    counted = [t for t in facts["trials"] if (t["failure"] or {}).get("class") not in ("interrupted", "driver_lost")]
    assert len(counted) >= TRIALS and sum(injected.values()) >= 10, (len(counted), injected)
    for fault, count in injected.items():
        outcome(f"soak: {fault}", count, count)
    outcome(f"soak: {len(facts['trials'])} trials, {len(known)} measured", sum(injected.values()),
            sum(injected.values()))  # fmt: skip


def _throw(
    driver: subprocess.Popen[bytes],
    cluster: Any,
    studies: Path,
    dice: random.Random,
    injected: dict[str, int],
    stop: threading.Event,
) -> None:
    """A random fault every few seconds until the driver is gone."""
    while not stop.wait(dice.uniform(0.5, 1.5) * FAULT_EVERY_S):
        kind = dice.choices(["rank", "agent", "node", "driver", "interrupt"], [6, 3, 1, 1, 1])[0]
        done = False
        with contextlib.suppress(Exception):
            if kind == "rank":
                done = kill_one(ranks(studies), dice)
            elif kind == "agent":
                done = kill_one(agents(studies), dice)
            elif kind == "node" and cluster.worker_nodes:
                cluster.remove_node(dice.choice(list(cluster.worker_nodes)), allow_graceful=False)
                cluster.add_node(num_cpus=2, resources={"tune_slot": 1})
                done = True
            elif (studies / "s" / "study.json").exists():
                os.kill(driver.pid, signal.SIGKILL if kind == "driver" else signal.SIGINT)
                injected[kind] = injected.get(kind, 0) + 1
                return
        injected[kind] = injected.get(kind, 0) + done
