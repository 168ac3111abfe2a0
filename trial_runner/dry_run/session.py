"""The parent's side of the warm process: orders out, answers in."""

from __future__ import annotations

from concurrent.futures import Future
import contextlib
import itertools
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import threading
from types import TracebackType
from typing import Any


class Session:
    """One warm process that forks a child per rank; many candidates may be sent through it.

    Args:
        real: whether its children train on real tensors (the truth to check a dry run by).
        parallel: children at once.
    """

    def __init__(self, *, real: bool = False, parallel: int = 2) -> None:
        self.real = real
        self._slots = threading.BoundedSemaphore(parallel)
        self._folder = tempfile.TemporaryDirectory(prefix="tune-dry-run-")
        self._log = open(Path(self._folder.name) / "server.log", "w")  # noqa: SIM115
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", "trial_runner.dry_run.server", "real" if real else "fake"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=env, cwd=self._folder.name
        )
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def folder(self) -> Path:
        """Scratch folder that lives as long as the session."""
        return Path(self._folder.name)

    def submit(self, order: dict[str, Any]) -> Future[dict[str, Any]]:
        """Send an order; waits for a free slot. The future's result is the child's facts."""
        self._slots.acquire()
        number = next(self._numbers)
        future: Future[dict[str, Any]] = Future()
        future.add_done_callback(lambda _: self._slots.release())
        with self._lock:
            self._waiting[number] = future
        order = order | {"id": number, "real": self.real, "result": str(self.folder / f"result-{number}.json")}
        assert self._process.stdin is not None
        try:
            self._process.stdin.write((json.dumps(order) + "\n").encode())
            self._process.stdin.flush()
        except OSError:
            self._fail()
        return future

    def close(self) -> None:
        """Let running children finish, then end the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=5)
        self._log.close()
        self._folder.cleanup()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            with self._lock:
                future = self._waiting.pop(message["id"], None)
            if future is not None:
                future.set_result(message["facts"])
        self._fail()

    def _fail(self) -> None:
        """The process is gone: whoever waits gets its last words."""
        with self._lock:
            lost, self._waiting = list(self._waiting.values()), {}
        if not lost:
            return
        log = self.folder / "server.log"
        tail = log.read_text(errors="replace").strip()[-2000:] if log.exists() else ""
        for future in lost:
            future.set_result({"valid": False, "error": f"the dry run's process ended: {tail}"})
