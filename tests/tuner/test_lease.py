"""The lease of a study: one process runs it, whether or not file locks reach the other's machine."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import json
from pathlib import Path
import signal
import subprocess
import sys
import time

import pytest

from search_space.errors import UserError
from tuner.records import lease as module
from tuner.records.layout import StudyFolder
from tuner.records.lease import forget
from tuner.records.lease import is_held
from tuner.records.lease import lease
from tuner.records.lease import LeaseTimes


QUICK = LeaseTimes(beat_s=0.1, stop_s=1.0, leave_s=1.5, expire_s=2.0, settle_s=0.5)

HOLDER = """
import signal, sys, time
from pathlib import Path
from tuner.records import lease as module
from tuner.records.layout import StudyFolder
from tuner.records.lease import lease, LeaseTimes

folder, host, seconds = StudyFolder(Path(sys.argv[1])), sys.argv[2], float(sys.argv[3])
# Another machine on a file system whose locks end at the machine.
module.fcntl.flock = lambda *args: None
module.this_host = lambda: host
signal.signal(signal.SIGTERM, lambda *args: print("asked to stop", flush=True))
with lease(folder, LeaseTimes(beat_s=0.1, stop_s=1.0, leave_s=1.5, expire_s=2.0, settle_s=0.5)):
    print("holds", flush=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)
print("gave back", flush=True)
"""


@contextlib.contextmanager
def elsewhere(folder: StudyFolder, seconds: float = 60, host: str = "node-b boot-b") -> Iterator[subprocess.Popen[str]]:
    """A process on another machine that holds the study."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder.root), host, str(seconds)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def folder(tmp_path: Path) -> StudyFolder:
    return StudyFolder(tmp_path / "study")


def test_a_process_elsewhere_that_beats_is_honoured(folder: StudyFolder) -> None:
    said: list[str] = []
    with elsewhere(folder) as process:
        assert is_held(folder)
        with (
            pytest.raises(UserError, match=f"running already.*process {process.pid} on node-b"),
            lease(folder, QUICK, said.append),
        ):
            raise AssertionError("two hold it")
        assert process.poll() is None
    assert len(said) == 1


def test_a_study_that_was_given_back_is_taken_at_once(folder: StudyFolder) -> None:
    with elsewhere(folder, seconds=0.3) as process:
        assert process.wait(timeout=20) == 0
    assert not is_held(folder)
    began = time.monotonic()
    with lease(folder, LeaseTimes(expire_s=600)):
        assert time.monotonic() - began < 5
        assert is_held(folder)


def test_a_dead_holder_elsewhere_is_outwaited(folder: StudyFolder) -> None:
    with elsewhere(folder) as process:
        process.kill()
        process.wait(timeout=20)
    began, said = time.monotonic(), []
    with lease(folder, QUICK, said.append):
        assert time.monotonic() - began >= QUICK.expire_s + QUICK.settle_s
        assert [path.stem for path in folder.leases.iterdir()] == ["00000002"]
    assert "did not say that it ended" in said[0]


def test_a_dead_holder_of_this_machine_is_not_waited_for(folder: StudyFolder) -> None:
    with elsewhere(folder, host=module.this_host()) as process:
        process.kill()
        process.wait(timeout=20)
    assert not is_held(folder)
    with lease(folder, LeaseTimes(expire_s=600)):
        pass


def test_a_holder_that_slept_while_it_was_taken_over_ends_before_its_successor_begins(folder: StudyFolder) -> None:
    with elsewhere(folder) as process:
        process.send_signal(signal.SIGSTOP)
        waker = subprocess.Popen(["sh", "-c", f"sleep {QUICK.expire_s + 0.2}; kill -CONT {process.pid}"])
        with lease(folder, QUICK, lambda text: None):
            assert process.wait(timeout=5) == module.LEFT
        waker.wait(timeout=20)


def test_a_pause_that_nobody_used_ends_nothing(folder: StudyFolder) -> None:
    with elsewhere(folder, seconds=5) as process:
        process.send_signal(signal.SIGSTOP)
        time.sleep(QUICK.leave_s + 0.5)
        process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        assert process.stdout.read() == "gave back\n"
        assert process.wait(timeout=20) == 0


def test_a_holder_that_cannot_reach_the_folder_stops_in_order_then_leaves(folder: StudyFolder) -> None:
    with elsewhere(folder) as process:
        folder.root.rename(folder.root.with_name("unmounted"))
        assert process.wait(timeout=20) == module.LEFT
        assert process.stdout is not None
        assert process.stdout.read() == "asked to stop\n"


def test_of_two_successors_one_wins(folder: StudyFolder) -> None:
    with elsewhere(folder) as process:
        process.kill()
        process.wait(timeout=20)
    command = [sys.executable, "-c", HOLDER, str(folder.root)]
    both = [
        subprocess.Popen(
            [*command, f"node-{name} boot", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name in "cd"
    ]
    found = sorted((*process.communicate(timeout=60), process.returncode) for process in both)
    assert [(out, code) for out, _, code in found] == [("", 1), ("holds\ngave back\n", 0)]
    assert "is running already" in found[0][1]


def test_a_half_written_record_is_outwaited(folder: StudyFolder) -> None:
    folder.leases.mkdir(parents=True)
    (folder.leases / "00000004.json").write_text('{"host": "node-b')
    with lease(folder, QUICK, lambda text: None):
        [path] = folder.leases.iterdir()
        assert path.stem == "00000005"
        assert json.loads(path.read_text())["host"] == module.this_host()


def test_forgetting_leaves_nothing(folder: StudyFolder) -> None:
    with lease(folder, QUICK):
        pass
    forget(folder)
    assert list(folder.root.iterdir()) == []
