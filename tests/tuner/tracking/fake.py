"""A tracking server that lives in memory and can be told to fail: what is behind a Remote, without HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuner.records.tracking.runs import ID_TAG
from tuner.records.tracking.runs import Point
from tuner.records.tracking.runs import RunFacts


class Down(ConnectionError):
    """The server does not answer."""


class FakeRemote:
    """The calls of :class:`tuner.records.tracking.remote.Remote` on a dict.

    ``fails`` is asked before (``"before"``) and after (``"after"``) every call: an error after it is a lost answer.
    """

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.calls: Counter[str] = Counter()
        self.points_sent = 0
        self.fails: Any = lambda when, name: False

    def _call(self, name: str, act: Any) -> Any:
        self.calls[name] += 1
        if self.fails("before", name):
            raise Down(name)
        answer = act()
        if self.fails("after", name):
            raise Down(name)
        return answer

    def experiment(self) -> str:
        return str(self._call("experiment", lambda: "1"))

    def exists(self, run: str) -> bool:
        return bool(self._call("exists", lambda: run in self.runs))

    def ensure_run(self, experiment: str, facts: RunFacts) -> str:
        def act() -> str:
            for run, held in self.runs.items():
                if held["tags"][ID_TAG] == facts.tags[ID_TAG]:
                    return run
            run = f"run{len(self.runs)}"
            self.runs[run] = {"tags": dict(facts.tags), "params": {}, "points": {}, "files": {}, "status": "RUNNING"}
            return run

        return str(self._call("ensure_run", act))

    def open_runs(self, experiment: str, study_id: str) -> list[str]:
        return [run for run, held in self.runs.items() if held["status"] == "RUNNING"]

    def log_points(self, run: str, points: Sequence[Point]) -> None:
        def act() -> None:
            self.points_sent += len(points)
            for point in points:
                held = self.runs[run]["points"].setdefault((point.key, point.step, point.unix_ms), point.value)
                assert held == point.value

        self._call("log_points", act)

    def log_params(self, run: str, params: dict[str, str]) -> list[str]:
        self._call("log_params", lambda: self.runs[run]["params"].update(params))
        return []

    def set_tags(self, run: str, tags: dict[str, str]) -> None:
        self._call("set_tags", lambda: self.runs[run]["tags"].update(tags))

    def set_view(self, experiment: str, tag: str, text: str) -> None:
        self._call("set_view", lambda: None)

    def upload(self, run: str, path: Path) -> None:
        self._call("upload", lambda: self.runs[run]["files"].update({path.name: path.read_bytes()}))

    def upload_text(self, run: str, text: str, name: str) -> None:
        self._call("upload_text", lambda: self.runs[run]["files"].update({name: text.encode()}))

    def end(self, run: str, status: str, ended_ms: int | None = None) -> None:
        self._call("end", lambda: self.runs[run].update({"status": status}))

    def of_trials(self) -> dict[int, dict[str, Any]]:
        """Runs of trials by number."""
        found = [held for held in self.runs.values() if held["tags"]["ledgertune.kind"] == "trial"]
        numbers = [int(held["tags"]["ledgertune.trial"]) for held in found]
        assert len(set(numbers)) == len(numbers), "a trial has two runs"
        return dict(zip(numbers, found))

    def of_study(self) -> dict[str, Any]:
        """The study's run."""
        (found,) = [held for held in self.runs.values() if held["tags"]["ledgertune.kind"] == "study"]
        return found
