"""Gangs of real processes: they end, they are killed, and nothing of them is left."""

from __future__ import annotations

import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import psutil
import pytest

from trial_runner.gang import free_port
from trial_runner.gang import group_alive
from trial_runner.gang import KILL_GRACE_S
from trial_runner.gang import NodeShare
from trial_runner.spec import rank_log
from trial_runner.spec import TrialSpec


STUB = Path(__file__).with_name("stub_rank.py")


def share(folder: Path, behaviour: str, ranks: int = 2, deadline_s: float = 60, **env: str) -> NodeShare:
    spec = TrialSpec(
        study="s",
        trial=0,
        folder=str(folder),
        config_file="",
        config_function="",
        world_size=ranks,
        device="cpu",
        warmup_steps=1,
        steps=1,
        env=env,
        header={"behaviour": behaviour},
    )
    return NodeShare(
        spec,
        ranks=list(range(ranks)),
        node=0,
        master=("127.0.0.1", free_port()),
        deadline_s=deadline_s,
        program=(str(STUB),),
    )


def wait_end(gang: NodeShare, seconds: float) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended = gang.poll().ended
        if ended is not None:
            return ended
        time.sleep(0.02)
    raise AssertionError("the gang did not end in time")


def wait_started(gang: NodeShare, ranks: int = 2) -> None:
    until = time.monotonic() + 20
    while len(gang.poll().pids) < ranks and time.monotonic() < until:
        time.sleep(0.02)
    assert len(gang.state.pids) == ranks


def test_all_ranks_done(tmp_path: Path) -> None:
    gang = share(tmp_path, "quick", CANDIDATE_ENV="yes")
    assert wait_end(gang, 20) == "done"
    assert gang.state.exit_codes == {0: 0, 1: 0}
    assert "rank 1 of 2 yes" in rank_log(tmp_path, 1).read_text()
    assert not group_alive(gang.group)


def test_one_failed_rank_ends_the_gang(tmp_path: Path) -> None:
    gang = share(tmp_path, "fail")
    assert wait_end(gang, 30) == "failed"
    assert gang.state.exit_codes[1] == 3
    assert not group_alive(gang.group)


def test_deadline_kills_even_stubborn_ranks(tmp_path: Path) -> None:
    started = time.monotonic()
    gang = share(tmp_path, "stubborn", deadline_s=1.0)
    assert wait_end(gang, 30) == "timeout"
    assert time.monotonic() - started < 1.0 + KILL_GRACE_S
    assert not group_alive(gang.group)


def test_stop_takes_grandchildren_along(tmp_path: Path) -> None:
    gang = share(tmp_path, "grandchild")
    wait_started(gang)
    until = time.monotonic() + 20
    while len(list(tmp_path.glob("grandchild*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    pids = [int(path.read_text()) for path in tmp_path.glob("grandchild*")]
    started = time.monotonic()
    gang.stop()
    assert gang.poll().ended in ("stopped", "killed")
    assert time.monotonic() - started < KILL_GRACE_S
    assert len(pids) == 2 and not any(_lives(pid) for pid in pids)


def test_kill_9_of_one_rank_is_seen(tmp_path: Path) -> None:
    gang = share(tmp_path, "sleep")
    wait_started(gang)
    os.kill(gang.state.pids[1], signal.SIGKILL)
    assert wait_end(gang, 30) == "failed"
    assert gang.state.exit_codes[1] == -9
    assert not group_alive(gang.group)


def test_kill_9_of_the_warden_is_seen_and_cleaned(tmp_path: Path) -> None:
    gang = share(tmp_path, "sleep")
    wait_started(gang)
    os.kill(gang.group, signal.SIGKILL)
    time.sleep(0.5)
    gang.stop()
    assert gang.poll().ended == "killed"
    assert not group_alive(gang.group)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_death_of_the_agent_takes_the_ranks_along(tmp_path: Path, how: signal.Signals) -> None:
    """The agent is a process that holds a node-share; killed hard, its ranks must not survive it."""
    program = (
        "import sys, time; sys.path[:0] = sys.argv[2:4]\n"
        "from pathlib import Path\n"
        "from test_gang import share, wait_started\n"
        "gang = share(Path(sys.argv[1]), 'grandchild'); wait_started(gang)\n"
        "print(gang.group, flush=True); time.sleep(600)\n"
    )
    here = Path(__file__).parent
    agent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), str(here), str(here.parent.parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    group = int(agent.stdout.readline())
    agent.send_signal(how)
    agent.wait()
    until = time.monotonic() + KILL_GRACE_S
    while group_alive(group) and time.monotonic() < until:
        time.sleep(0.05)
    assert not group_alive(group)


def _lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
