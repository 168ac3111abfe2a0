"""The journal: every event of a study as one JSON line; resume file, status and report are read from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
import time
from typing import Any


class Journal:
    """An append-only file of events. A line is on disk before :meth:`write` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _heal(path)
        self._file = path.open("a")

    def write(self, event: str, **facts: Any) -> dict[str, Any]:
        """Append one event; returns it as written, with its time."""
        line = {"event": event, "unix_s": round(time.time(), 3), **facts}
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
