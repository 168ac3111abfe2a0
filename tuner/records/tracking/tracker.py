"""The background thread that keeps a tracking server up to the journal, and what it says when it cannot."""

from __future__ import annotations

from collections.abc import Callable
import os
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from search_space.redact import password_of
from search_space.redact import redact
from search_space.redact import without_password
from tuner.records.layout import StudyFolder
from tuner.records.tracking.files import MIB
from tuner.records.tracking.remote import what_kind
from tuner.records.tracking.sender import Sender
from tuner.records.tracking.sender import SENT
from tuner.records.tracking.state import SenderLock
from tuner.records.tracking.views import page_urls


FLUSH_S = 60.0
"""Longest wait for the last records at the end of a session, seconds, while the server takes them."""

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Waits between tries while a server is down, seconds."""

AUTH_PAUSE_S = 300.0
"""Wait after a server refused the user, seconds: trying a wrong password often locks accounts."""

FOREGROUND_TRIES = 2
"""Tries more of a server that does not answer, while somebody waits (count)."""

CAP_MIB = 200.0
"""Largest file that is uploaded unless the job says otherwise, MiB."""


def local_uri(folder: StudyFolder) -> str:
    """Tracking URI of the study's own store."""
    return f"sqlite:///{folder.mlflow / 'mlflow.db'}"


def take_credentials(uri: str) -> str:
    """A server's address without user and password, which move to the variables that MLflow reads."""
    user, password = password_of(uri)
    if user is None or not uri.startswith("http"):
        return uri
    if password is None:
        # A job file keeps the name only; the rest is in the environment.
        os.environ.setdefault("MLFLOW_TRACKING_USERNAME", user)
    else:
        os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"] = user, password
    return urlsplit(uri)._replace(netloc=urlsplit(uri).netloc.rpartition("@")[2]).geturl()


def describe_trouble(uri: str, kind: str, error: BaseException, waiting: int, study: str) -> str:
    """What is wrong, where the records are meanwhile, and what to do."""
    shown = without_password(uri)
    kept = f"{waiting} records wait in the study's folder"
    if kind == "auth":
        return (
            f"MLflow at {shown} refuses this user or password: set MLFLOW_TRACKING_USERNAME and "
            f"MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN); {kept}, `tune sync {study}` sends them"
        )
    text = redact(str(error).split("\n")[0])[:200]
    if kind == "down":
        return f"MLflow at {shown} does not take records ({text}); {kept} and are sent when it does"
    return f"MLflow at {shown}: {text}; {kept}"


class Tracker:
    """A listener that mirrors a study into MLflow, from the journal and in the background.

    Args:
        folder: the study's folder.
        uri: tracking server; None for the study's own SQLite store.
        experiment: experiment name.
        warn: called with a text when tracking fails, once for each kind of trouble, and once when it is over.
        cap_mib: largest file that is uploaded (MiB).
    """

    def __init__(
        self,
        folder: StudyFolder,
        uri: str | None,
        experiment: str,
        warn: Callable[[str], None],
        cap_mib: float = CAP_MIB,
    ) -> None:
        self._folder, self._warn = folder, warn
        self.uri = take_credentials(uri) if uri else local_uri(folder)
        self._experiment, self._cap = experiment, int(cap_mib * MIB)
        self._sender: Sender | None = None
        self._said: set[str] = set()
        self._wake, self._closing, self._ended = threading.Event(), threading.Event(), threading.Event()
        self._trouble = ""
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)
        self._thread.start()

    def __call__(self, event: dict[str, Any]) -> None:
        """Hear of an event of the study; it is in the journal already. Returns at once."""
        if event["event"] in SENT:
            self._wake.set()

    def close(self) -> dict[str, str]:
        """Wait for what is not sent yet, at most :data:`FLUSH_S`, and not at all for a server that is down.

        Returns:
            Addresses of the study's pages, where a server has them.
        """
        self._closing.set()
        self._wake.set()
        self._ended.wait(FLUSH_S)
        sender = self._sender
        waiting = sender.waiting if sender is not None else 0
        if waiting:
            shown = without_password(self.uri)
            self._warn(
                f"MLflow at {shown} has not taken {waiting} records; they wait in the study's folder: "
                f"`tune sync {self._folder.handle}` sends them, and so does `tune resume`"
            )
        if sender is None or not self.uri.startswith("http"):
            return {}
        state = sender.state
        return page_urls(self.uri, state.experiment, state.parent, list(state.trials.values()), state.study_id)

    def _work(self) -> None:
        lock = SenderLock(self._folder)
        try:
            while not lock.take():
                if self._closing.wait(0.5):
                    return
            self._run()
        finally:
            lock.free()
            self._ended.set()

    def _run(self) -> None:
        tries = 0
        if self.uri.startswith("sqlite:"):
            self._folder.mlflow.mkdir(parents=True, exist_ok=True)
        self._sender = Sender(self._folder, without_password(self.uri), self._experiment, self._cap)
        while True:
            self._wake.clear()
            closing = self._closing.is_set()
            try:
                while self._sender.step(live=not closing):
                    tries = 0
                self._over()
            except Exception as error:
                kind = what_kind(error)
                self._say(kind, error)
                # One try more at the end, then the next session's turn.
                if closing:
                    return
                pause = AUTH_PAUSE_S if kind == "auth" else PAUSES_S[min(tries, len(PAUSES_S) - 1)]
                tries += 1
                self._closing.wait(pause)
                continue
            if closing:
                return
            self._wake.wait()

    def _say(self, kind: str, error: BaseException) -> None:
        self._trouble = kind
        if kind not in self._said:
            self._said.add(kind)
            waiting = self._sender.waiting if self._sender is not None else 0
            self._warn(describe_trouble(self.uri, kind, error, waiting, self._folder.handle))

    def _over(self) -> None:
        if self._trouble == "down":
            self._warn(f"MLflow at {without_password(self.uri)} takes records again; it has all of them now")
            self._said.discard("down")
        self._trouble = ""
        if self._sender is not None and self._sender.state.refused and "refused" not in self._said:
            self._said.add("refused")
            self._warn(f"MLflow would not take: {self._sender.state.refused[-1]}; the journal has it")


def send_now(folder: StudyFolder, uri: str, experiment: str, cap_mib: float, timeout_s: float) -> Sender:
    """Send what waits, in the foreground, of a study that no process runs.

    Raises:
        TimeoutError: it took longer than ``timeout_s`` seconds; what was sent stays sent.
        BlockingIOError: another process sends.
        Exception: the server's own.
    """
    address = take_credentials(uri)
    lock = SenderLock(folder)
    if not lock.take():
        raise BlockingIOError("another process sends this study's records")
    try:
        if address.startswith("sqlite:"):
            folder.mlflow.mkdir(parents=True, exist_ok=True)
        sender = Sender(folder, without_password(address), experiment, int(cap_mib * MIB))
        until, tries = time.monotonic() + timeout_s, 0
        while True:
            try:
                if not sender.step(live=False):
                    return sender
                tries = 0
            except Exception as error:
                # A busy server answers late; one that is away is said soon.
                if what_kind(error) != "down" or tries >= FOREGROUND_TRIES:
                    raise
                time.sleep(PAUSES_S[tries])
                tries += 1
            if time.monotonic() > until:
                raise TimeoutError(f"{sender.waiting} records still wait after {timeout_s:.0f} s")
    finally:
        lock.free()
