"""The journal: every event of a study as one JSON line; resume file, status and report are read from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
import time
from typing import Any

from search_space.redact import redact_value


class Journal:
    """An append-only file of events. A line is on disk before :meth:`write` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _heal(path)
        self._file = path.open("a")

    def write(self, event: str, **facts: Any) -> dict[str, Any]:
        """Append one event; returns it as written: with its time, without secrets."""
        line = {"event": event, "unix_s": round(time.time(), 3), **redact_value(facts)}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        return line

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _heal(path: Path) -> None:
    """Drop a torn last line that a killed writer left, so that appending starts on a fresh one."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All whole events, in order; a torn last line is skipped."""
    if not path.exists():
        return []
    events = []
    for line in path.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events


class JournalFollower:
    """Follows a journal that another process writes; each look reads only what was added since the last one.

    Args:
        path: the journal; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.events: list[dict[str, Any]] = []
        """All whole events so far; of heartbeats that follow each other only the last, which tells all they told."""
        self.version = 0
        """Grows with every change."""

    def look(self) -> bool:
        """Read what is new; True when there was something."""
        try:
            size = self._path.stat().st_size
        except OSError:
            return False
        if size < self._offset:
            # A torn last line was dropped, or the study was begun anew.
            self._offset, self.events = 0, []
        if size == self._offset:
            return False
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            beats = self.events and event["event"] == "heartbeat" == self.events[-1]["event"]
            if beats:
                self.events[-1] = event
            else:
                self.events.append(event)
        self.version += bool(whole)
        return bool(whole)
