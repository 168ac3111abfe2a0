"""Failure classes from real texts, and which rank is to blame."""

from __future__ import annotations

import errno
import json
from pathlib import Path
import shutil

import pytest

from trial_runner.failure import classify
from trial_runner.failure import Failure
from trial_runner.failure import find_failure
from trial_runner.failure import is_disk_full
from trial_runner.failure import perhaps_disk_full
from trial_runner.spec import rank_error
from trial_runner.spec import rank_log


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out_of_memory"),
        ("builtins.RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", "host_out_of_memory"),
        ("torch._inductor.exc.InductorError: CppCompileError", "compile_error"),
        ("builtins.RuntimeError: Loss is not finite (global_avg_loss=nan) at step 3.", "nan_loss"),
        ("builtins.RuntimeError: Connection closed by peer [127.0.0.1]:4242", "peer_lost"),
        ("torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE", "rendezvous"),
        ("builtins.OSError: [Errno 28] No space left on device", "disk_full"),
        ("builtins.RuntimeError: shape '[1, 8192, -1, 128]' is invalid for input of size 524288", "framework_invalid"),
    ],
)
def test_classes(text: str, kind: str) -> None:
    found = classify(text)
    assert found is not None and found.kind == kind


def write_error(folder: Path, rank: int, unix_s: float, module: str, name: str, text: str) -> None:
    facts = {"rank": rank, "unix_s": unix_s, "module": module, "type": name, "text": text}
    rank_error(folder, rank).write_text(json.dumps(facts))
    rank_log(folder, rank).write_text("…\nlast words")


def test_primary_error_wins_over_an_earlier_echo(tmp_path: Path) -> None:
    write_error(tmp_path, 0, 1.0, "builtins", "RuntimeError", "Connection reset by peer")
    write_error(tmp_path, 1, 2.0, "torch", "OutOfMemoryError", "CUDA out of memory")
    failure = find_failure(tmp_path, 2, "failed", {0: 1, 1: 1})
    assert (failure.kind, failure.rank) == ("out_of_memory", 1)
    assert failure.log_tail.endswith("last words")


def test_a_killed_rank_wins_over_its_peers_complaints(tmp_path: Path) -> None:
    write_error(tmp_path, 0, 2.0, "builtins", "RuntimeError", "Connection closed by peer")
    failure = find_failure(tmp_path, 2, "failed", {0: 1, 1: -9}, {0: 2.0, 1: 1.0})
    assert (failure.kind, failure.rank) == ("rank_killed", 1)
    assert "SIGKILL" in failure.text


@pytest.mark.parametrize(("ended", "kind"), [("timeout", "timeout"), ("stopped", "stopped"), ("killed", "agent_lost")])
def test_without_errors_the_gang_end_names_it(tmp_path: Path, ended: str, kind: str) -> None:
    assert find_failure(tmp_path, 2, ended, {}).kind == kind


def test_json_has_the_contract_keys(tmp_path: Path) -> None:
    facts = find_failure(tmp_path, 1, "timeout", {}).to_json()
    assert {"class", "rank", "text"} <= set(facts)


def test_a_torn_error_file_and_an_odd_signal_are_no_fault_of_ours(tmp_path: Path) -> None:
    rank_error(tmp_path, 0).write_text('{"rank": 0, "unix')
    failure = find_failure(tmp_path, 2, "failed", {0: 1, 1: -40}, {0: 2.0, 1: 1.0})
    assert failure.rank == 1 and "signal 40" in failure.text


def test_a_store_that_lost_its_peer_is_an_echo(tmp_path: Path) -> None:
    found = classify("builtins.RuntimeError: TCPStore recv failed: Connection reset by peer")
    assert found is not None and found.kind == "peer_lost" and found.secondary


def test_a_full_disk_hides_behind_no_other_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without room a rank's own error is not written; the class is the disk's, unless the reason is known."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    dead = Failure(kind="unknown", rank=1, text="exit code 1")
    assert perhaps_disk_full(dead, tmp_path).kind == "disk_full"
    assert perhaps_disk_full(Failure(kind="out_of_memory", rank=1, text="x"), tmp_path).kind == "out_of_memory"
    monkeypatch.undo()
    assert perhaps_disk_full(dead, tmp_path) is dead


def test_errors_of_a_full_disk_are_known_through_whatever_wraps_them() -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("storage") from error
    except RuntimeError as error:
        assert is_disk_full(error)
    assert is_disk_full(RuntimeError("(sqlite3.OperationalError) database or disk is full"))
    assert not is_disk_full(ValueError("x"))
