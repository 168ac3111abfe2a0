"""Trials on three nodes with a fault every few seconds, 200 rehearsed and ten real ones: nothing measured is lost."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import itertools
import os
from pathlib import Path
import random
import signal
import subprocess
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


pytestmark = [pytest.mark.faults, pytest.mark.timeout(1000)]

LONGEST_S = 900.0


@pytest.mark.parametrize(
    ("what", "trials", "every_s", "fewest_faults", "more"),
    [("rehearsed", 200, 6.0, 10, ["--rehearse"]), ("real", 10, 35.0, 2, [])],
)
def test_trials_with_faults(
    three_nodes: Any,
    tmp_path: Path,
    outcome: Callable[..., None],
    what: str,
    trials: int,
    every_s: float,
    fewest_faults: int,
    more: list[str],
) -> None:
    studies = tmp_path / "studies"
    job = write_job(tmp_path, trials, steps=10)
    dice = random.Random(7)
    injected: dict[str, int] = {}
    began = time.monotonic()
    done: list[dict[str, Any]] = []
    for study in itertools.count():
        left = trials - sum(map(_counts, done))
        if left <= 0 or time.monotonic() - began > LONGEST_S:
            break
        # A study ends when nothing left can beat its best; the next one goes on.
        done += _whole_study(three_nodes, studies, f"s{study}", job, dice, every_s, injected, more)
    total = sum(injected.values())
    assert sum(map(_counts, done)) >= trials and total >= fewest_faults, (len(done), injected)
    for fault, count in injected.items():
        if count:
            outcome(f"soak, {what}: {fault}", count, count)
    measured = sum(trial["state"] == "measured" for trial in done)
    assert measured >= trials // 3
    outcome(f"soak, {what}: {len(done)} trials, {measured} measured", total, total)


def _counts(trial: dict[str, Any]) -> bool:
    """Whether a trial was more than cut off from outside."""
    return (trial["failure"] or {}).get("class") not in ("interrupted", "driver_lost", "no_devices")


def _whole_study(
    cluster: Any,
    studies: Path,
    name: str,
    job: Path,
    dice: random.Random,
    every_s: float,
    injected: dict[str, int],
    more: list[str],
) -> list[dict[str, Any]]:
    """Run one study under faults, resumed until it ends by itself; its trials."""
    seen: dict[int, str] = {}
    verb = ["start", str(job), "--budget", "10-gpu-hours", "--study", name, *more]
    began = time.monotonic()
    while time.monotonic() - began < LONGEST_S:
        with (studies.parent / "out.txt").open("ab") as out:
            driver = subprocess.Popen(
                tune_command(*verb, "--address", cluster.address, "--plain"),
                env=environment(studies), cwd=studies.parent, stdout=out, stderr=out,
            )  # fmt: skip
        # Here, not in a thread: Ray starts nodes in the main thread only.
        _throw(driver, cluster, studies, name, dice, every_s, injected)
        code = driver.wait(LONGEST_S)
        events = journal(studies, name) if (studies / name / "journal.jsonl").exists() else []
        for event in events:
            if event["event"] == "trial" and event["state"] == "measured":
                seen.setdefault(event["number"], event["label"])
        reason = next((e.get("reason", "") for e in reversed(events) if e["event"] == "study_end"), "")
        if code == 0 and ("max_trials" in reason or "no candidate left" in reason or "was measured" in reason):
            break
        if (studies / name / "study.json").exists():
            verb = ["resume", name]
    facts = check_books(studies, name, 36000)
    known = {trial["number"]: trial["label"] for trial in facts["trials"] if trial["state"] == "measured"}
    assert all(known.get(number) == label for number, label in seen.items()), "a measured trial was lost"
    return list(facts["trials"])


def _ended(driver: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait so long; whether the driver ended meanwhile."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        driver.wait(seconds)
        return True
    return False


def _baseline_measured(studies: Path, name: str) -> bool:
    if not (studies / name / "journal.jsonl").exists():
        return False
    trials = [event for event in journal(studies, name) if event["event"] == "trial"]
    return any(trial["role"] == "baseline" and trial["state"] == "measured" for trial in trials)


def _throw(
    driver: subprocess.Popen[bytes],
    cluster: Any,
    studies: Path,
    name: str,
    dice: random.Random,
    every_s: float,
    injected: dict[str, int],
) -> None:
    """A random fault every few seconds until the driver is gone; the baseline, which runs alone, is let be."""
    while not _baseline_measured(studies, name):
        if _ended(driver, 0.5):
            return
    while not _ended(driver, dice.uniform(0.5, 1.5) * every_s):
        kind = dice.choices(["rank", "agent", "node", "driver", "interrupt"], [6, 3, 1, 1, 1])[0]
        done = False
        if kind == "rank":
            done = kill_one(ranks(studies), dice)
        elif kind == "agent":
            done = kill_one(agents(studies), dice)
        elif kind == "node":
            cluster.remove_node(dice.choice(list(cluster.worker_nodes)), allow_graceful=False)
            cluster.add_node(num_cpus=2, resources={"tune_slot": 1})
            done = True
        else:
            with contextlib.suppress(ProcessLookupError):
                os.kill(driver.pid, signal.SIGKILL if kind == "driver" else signal.SIGINT)
            injected[kind] = injected.get(kind, 0) + 1
            return
        injected[kind] = injected.get(kind, 0) + done
