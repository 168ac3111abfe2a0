"""The lease of a study: one process at a time runs it, on whichever machine.

Two things guard it. A file lock decides at once among processes of one machine, and ends with its process. On a network
file system such a lock may hold on its own machine only, so a record in the study's folder says who runs it and beats.
A process elsewhere honours a record that still beats; one that stays silent is taken over, by making the record of the
next generation, which only one process can (exclusive creation is atomic on network file systems too). Ages are taken
by the watcher's own clock between two changes it saw, so clocks of different machines are never compared. A holder that
finds itself taken over, or cannot reach the folder for long, stops before its successor begins.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from dataclasses import dataclass
import fcntl
import json
import os
from pathlib import Path
import secrets
import signal
import socket
import sys
import threading
import time
from typing import Any

from search_space.errors import UserError
from tuner.records.layout import StudyFolder


@dataclass(frozen=True, kw_only=True)
class LeaseTimes:
    """How often a holder beats and how long its silence is borne, seconds."""

    beat_s: float = 10.0
    """Between beats."""

    stop_s: float = 45.0
    """A holder that could not beat for so long stops in order."""

    leave_s: float = 75.0
    """A holder that could not beat for so long leaves at once."""

    expire_s: float = 90.0
    """Silence after which another process takes over."""

    settle_s: float = 15.0
    """A successor waits so long after taking over: longer than a beat, so that a holder that only slept has seen it."""


TIMES = LeaseTimes()

LEFT = 130
"""Exit code of a holder that had to leave at once: interrupted."""


def this_host() -> str:
    """This machine since its last start, this container's name included."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} {boot}".strip()


def _say(text: str) -> None:
    print(f"tune: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def lease(folder: StudyFolder, times: LeaseTimes = TIMES, say: Callable[[str], None] = _say) -> Iterator[None]:
    """Hold the study for this process; waits for a silent holder's record to run out.

    Args:
        folder: the study's folder.
        times: how often to beat, how long to wait.
        say: told once when there is something to wait for.

    Raises:
        UserError: another process holds it.
    """
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"study folder {folder.root} cannot be made: {error.strerror}") from None
    with folder.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise _running(folder, f"process {lock.read().strip() or 'unknown'}") from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        held = _Held(folder, _acquire(folder, times, say), times)
        held.start()
        try:
            yield
        finally:
            held.release()


def _running(folder: StudyFolder, holder: str) -> UserError:
    return UserError(f"study {folder.name} is running already ({holder}); `tune status` shows it")


def is_held(folder: StudyFolder) -> bool:
    """Whether a live process holds the study, here or, as far as its last beat tells, elsewhere."""
    if folder.lock.exists():
        with folder.lock.open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
    newest = _newest(folder)
    record = _read(newest) if newest is not None else None
    if record is None or record["released"] or record["host"] == this_host():
        return False
    return time.time() - float(record["unix_s"]) < TIMES.expire_s


def forget(folder: StudyFolder) -> None:
    """Remove the lease's files, of a study that came to nothing."""
    folder.lock.unlink(missing_ok=True)
    for path in _records(folder):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.leases.rmdir()


def _records(folder: StudyFolder) -> list[Path]:
    return sorted(folder.leases.glob("*.json"))


def _newest(folder: StudyFolder) -> Path | None:
    return next(reversed(_records(folder)), None)


def _path(folder: StudyFolder, generation: int) -> Path:
    return folder.leases / f"{generation:08d}.json"


def _read(path: Path) -> dict[str, Any] | None:
    """A record; None if it is gone or half written."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


def _write(file: int, record: dict[str, Any]) -> None:
    """Write a record in place: the file's identity is what exclusive creation decided about."""
    text = json.dumps(record).encode()
    os.pwrite(file, text.ljust(512), 0)
    os.fsync(file)


def _acquire(folder: StudyFolder, times: LeaseTimes, say: Callable[[str], None]) -> int:
    """Make this process the holder; returns its generation.

    Raises:
        UserError: somebody else holds it, or was quicker.
    """
    folder.leases.mkdir(exist_ok=True)
    newest = _newest(folder)
    before = int(newest.stem) if newest is not None else 0
    silent = newest is not None and not _free(newest)
    if newest is not None and silent:
        _outwait(folder, newest, times, say)
    try:
        file = os.open(_path(folder, before + 1), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        raise _running(folder, "another process took it just now") from None
    try:
        _write(file, _record())
    finally:
        os.close(file)
    if newest is not None and silent:
        _mark_taken(newest)
        time.sleep(times.settle_s)
    later = _newest(folder)
    if later is not None and int(later.stem) > before + 1:
        raise _running(folder, "another process took it just now")
    for path in _records(folder):
        if int(path.stem) <= before:
            path.unlink(missing_ok=True)
    return before + 1


def _record() -> dict[str, Any]:
    return {
        "host": this_host(),
        "pid": os.getpid(),
        "key": secrets.token_hex(8),
        "beat": 0,
        "unix_s": round(time.time(), 1),
        "released": False,
        "taken": False,
    }


def _free(path: Path) -> bool:
    """Whether a record needs no waiting for: given back, or of this machine, where the file lock has spoken."""
    record = _read(path)
    return record is not None and (record["released"] or record["host"] == this_host())


def _outwait(folder: StudyFolder, path: Path, times: LeaseTimes, say: Callable[[str], None]) -> None:
    """Return once a record was silent for long enough.

    Raises:
        UserError: it beats.
    """
    first = _read(path)
    holder = f"process {first['pid']} on {str(first['host']).split()[0]}" if first is not None else "unknown"
    say(
        f"study {folder.name} was last run by {holder}, which did not say that it ended; waiting up to "
        f"{times.expire_s:.0f} s to see whether it still runs"
    )
    until = time.monotonic() + times.expire_s
    while time.monotonic() < until:
        time.sleep(min(times.beat_s / 4, max(0.0, until - time.monotonic())))
        now = _read(path)
        if now is None:
            continue
        if now["released"]:
            return
        if first is not None and (now["key"], now["beat"]) != (first["key"], first["beat"]):
            raise _running(folder, holder)
        first = first or now


def _mark_taken(path: Path) -> None:
    """Tell the former holder in its own record, which it reads past any directory cache."""
    with contextlib.suppress(OSError):
        record = _read(path) or _record()
        file = os.open(path, os.O_WRONLY)
        try:
            _write(file, {**record, "taken": True})
        finally:
            os.close(file)


class _Held:
    """A held lease: beats until it is released, and ends its process if it is lost."""

    def __init__(self, folder: StudyFolder, generation: int, times: LeaseTimes) -> None:
        self._folder, self._path, self._times = folder, _path(folder, generation), times
        self._next = _path(folder, generation + 1)
        self._record = _read(self._path) or _record()
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"lease {target.__name__}", daemon=True)
            for target in (self._beat, self._watch)
        ]

    def start(self) -> None:
        """Begin to beat."""
        for thread in self._threads:
            thread.start()

    def release(self) -> None:
        """Stop beating and give the lease back."""
        self._ended.set()
        self._threads[0].join(timeout=self._times.beat_s)
        with contextlib.suppress(OSError):
            self._update(released=True)

    def _update(self, **facts: Any) -> None:
        """Write the record with some facts changed.

        Raises:
            OSError: it cannot be written.
        """
        file = os.open(self._path, os.O_RDWR)
        try:
            try:
                found = json.loads(os.pread(file, 4096, 0))
            except ValueError:
                found = self._record
            if found["taken"] or found["key"] != self._record["key"] or self._next.exists():
                self._leave("another process took the study over")
            self._record |= facts
            _write(file, self._record)
        finally:
            os.close(file)

    def _beat(self) -> None:
        while not self._ended.wait(self._times.beat_s):
            try:
                self._update(beat=self._record["beat"] + 1, unix_s=round(time.time(), 1))
            except FileNotFoundError:
                if not self._folder.root.exists():
                    continue
                self._leave("its lease was removed")
            except OSError:
                continue

    def _watch(self) -> None:
        """Count the silence apart from the beat, which may hang in a write; a paused process is not silent."""
        tick = self._times.beat_s / 4
        silent, beat, last, asked = 0.0, -1, time.monotonic(), False
        while not self._ended.wait(tick):
            now = time.monotonic()
            silent, last = silent + min(now - last, 2 * tick), now
            if self._record["beat"] != beat:
                silent, beat = 0.0, self._record["beat"]
            if silent > self._times.leave_s:
                self._leave(f"the study's folder could not be written for {silent:.0f} s")
            if silent > self._times.stop_s and not asked:
                asked = True
                _say(f"the folder of study {self._folder.name} cannot be written; stopping in order")
                os.kill(os.getpid(), signal.SIGTERM)

    def _leave(self, why: str) -> None:
        """End this process before it disturbs its successor; Ray and the wardens end what it started."""
        _say(f"study {self._folder.name} is lost to this process: {why}; it ends here and writes nothing more")
        os._exit(LEFT)
