"""What a tracking server has already taken of a study, kept beside the journal."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
import fcntl
import hashlib
import json
from pathlib import Path
from typing import Any

from tuner.records.layout import StudyFolder


@dataclass
class TrackingState:
    """``mlflow.json``: a cursor into the journal, and the names that things got on the server."""

    uri: str
    """Tracking server, without a password."""

    study_id: str = ""
    """Same for a study wherever its folder lies; every run carries it, so a run is found again."""

    offset: int = 0
    """Bytes of the journal that the server has taken."""

    experiment: str | None = None
    """Experiment's id."""

    parent: str | None = None
    """Run id of the study."""

    status: str | None = None
    """Status that the study's run was given last."""

    end: str = ""
    """Status that the journal asks for: empty while a session is open."""

    trials: dict[str, str] = field(default_factory=dict)
    """Run ids by trial number."""

    placed: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Trials that were placed and have no record yet, by number."""

    points: dict[str, int] = field(default_factory=dict)
    """Per-step points that the server has taken of a trial that is being sent, by number."""

    uploads: list[list[str]] = field(default_factory=list)
    """Files that are still to be uploaded: run id, path relative to the study's folder where it lies inside."""

    late: list[int] = field(default_factory=list)
    """Numbers of trials whose records were sent long after they were written."""

    refused: list[str] = field(default_factory=list)
    """What the server would not take, in words."""

    left_out: list[str] = field(default_factory=list)
    """Files that are larger than the cap."""


def state_path(folder: StudyFolder) -> Path:
    """``mlflow.json``."""
    return folder.root / "mlflow.json"


def read_state(folder: StudyFolder) -> TrackingState | None:
    """A study's tracking state; None when it never had one, or when the file is torn."""
    try:
        facts = json.loads(state_path(folder).read_text())
        return TrackingState(**{key: value for key, value in facts.items() if key in TrackingState.__annotations__})
    except (OSError, ValueError, TypeError):
        return None


def open_state(folder: StudyFolder, uri: str) -> TrackingState:
    """The state for a server; another server than before is told everything from the start.

    Args:
        folder: the study's folder; its journal may be empty still.
        uri: tracking server, without a password.
    """
    state = read_state(folder)
    return state if state is not None and state.uri == uri else TrackingState(uri=uri)


def write_state(folder: StudyFolder, state: TrackingState) -> None:
    """Write the state; a reader or a crash sees the old or the new one, never half of one."""
    path = state_path(folder)
    scratch = path.with_suffix(".writing")
    scratch.write_text(json.dumps(asdict(state)))
    scratch.replace(path)


def study_id(first_line: bytes) -> str:
    """A study's id: from the first line of its journal, which holds its name, folder, time and process."""
    return hashlib.sha256(first_line).hexdigest()[:16]


class JournalReader:
    """Whole lines of a journal from a byte offset on.

    Args:
        path: the journal; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def next(self, offset: int) -> tuple[dict[str, Any] | None, int]:
        """The next event at or after ``offset`` and the offset behind it; (None, offset) where there is none yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(offset)
                while line := file.readline():
                    if not line.endswith(b"\n"):
                        break
                    offset += len(line)
                    try:
                        return json.loads(line), offset
                    except ValueError:
                        continue
        except OSError:
            pass
        return None, offset

    def first_line(self) -> bytes:
        """The first whole line; empty when there is none yet."""
        try:
            with self._path.open("rb") as file:
                line = file.readline()
        except OSError:
            return b""
        return line if line.endswith(b"\n") else b""

    def waiting(self, offset: int, kinds: tuple[str, ...]) -> int:
        """Events of some kinds behind an offset (count)."""
        count = 0
        while True:
            event, offset = self.next(offset)
            if event is None:
                return count
            count += event.get("event") in kinds


class SenderLock:
    """Held by the one process that sends a study's records.

    Args:
        folder: the study's folder.
    """

    def __init__(self, folder: StudyFolder) -> None:
        self._path = folder.root / "mlflow.lock"
        self._file: Any = None

    def take(self) -> bool:
        """Whether it is ours now."""
        if self._file is None:
            file = self._path.open("a")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.close()
                return False
            self._file = file
        return True

    def free(self) -> None:
        """Let go."""
        if self._file is not None:
            self._file.close()
            self._file = None
