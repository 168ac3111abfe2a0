"""Sends a study's journal to a tracking server, one event at a time, each exactly once as far as the server shows."""

from __future__ import annotations

from collections.abc import Callable
import json
from pathlib import Path
import time
from typing import Any

from tuner.records.layout import StudyFolder
from tuner.records.tracking.files import note_left_out
from tuner.records.tracking.files import sort_files
from tuner.records.tracking.remote import Remote
from tuner.records.tracking.remote import what_kind
from tuner.records.tracking.runs import lost_trial
from tuner.records.tracking.runs import Point
from tuner.records.tracking.runs import step_points
from tuner.records.tracking.runs import study_run
from tuner.records.tracking.runs import trial_run
from tuner.records.tracking.state import JournalReader
from tuner.records.tracking.state import open_state
from tuner.records.tracking.state import study_id
from tuner.records.tracking.state import TrackingState
from tuner.records.tracking.state import write_state
from tuner.records.tracking.views import chart_view
from tuner.records.tracking.views import view_key
from tuner.records.tracking.views import VIEW_TAG


SENT = ("session", "trial", "winner", "commit", "study_end", "session_failed")
"""Events that become something on the server."""

BATCH = 500
"""Per-step points between two notes of how far a trial was sent (count)."""

KEPT = (*SENT, "trial_placed")
"""Events behind which the cursor is written down; the others cost nothing to read again."""

LATE_S = 60.0
"""A record sent so long after it was written is marked as late, seconds."""

ENDS = {"done": "FINISHED", "interrupted": "KILLED"}
"""Status of a study's run by the state that its last session ended with."""


class Sender:
    """Moves what the journal holds to the server. Not safe for two threads; the caller holds the sender's lock.

    Args:
        folder: the study's folder.
        uri: tracking server, without a password.
        experiment: experiment name.
        cap_bytes: largest file that is uploaded (bytes).
        remote: makes the connection; it is asked again after every error.
    """

    def __init__(
        self,
        folder: StudyFolder,
        uri: str,
        experiment: str,
        cap_bytes: int,
        remote: Callable[[], Remote] | None = None,
    ) -> None:
        self._folder, self._cap = folder, cap_bytes
        # A study's own store moves with its folder.
        self.state: TrackingState = open_state(folder, "local" if uri.startswith("sqlite:") else uri)
        self._journal = JournalReader(folder.journal)
        local = folder.mlflow / "artifacts" if uri.startswith("sqlite:") else None
        self._connect = remote or (lambda: Remote(uri, experiment, local))
        self._remote: Remote | None = None
        self._checked = False
        # Who looks at the study sees what waits, also where the server never answered.
        self._save()

    @property
    def waiting(self) -> int:
        """Records and files that the server has not taken (count)."""
        return self._journal.waiting(self.state.offset, SENT) + len(self.state.uploads)

    def step(self, live: bool) -> bool:
        """Send one event, or one file once no event waits; False when there is nothing left.

        Args:
            live: whether a session of the study runs; without one no run stays open.

        Raises:
            Exception: the server's; nothing is lost, the next step tries again.
        """
        if not self._checked:
            self._check()
        event, offset = self._journal.next(self.state.offset)
        if event is not None:
            try:
                self._take(event)
            except Exception as error:
                kind = what_kind(error)
                if kind == "gone":
                    # The run or experiment was deleted meanwhile: look again, make it anew.
                    self._forget()
                if kind != "refused":
                    raise
                number = f" of trial {event['number']}" if "number" in event else ""
                self.state.refused.append(f"{event['event']}{number}: {type(error).__name__}: {str(error)[:300]}")
            self.state.offset = offset
            if event.get("event") in KEPT:
                self._save()
            return True
        if self.state.uploads:
            self._upload_one()
            return True
        return self._settle(live)

    def _save(self) -> None:
        write_state(self._folder, self.state)

    def _server(self) -> Remote:
        if self._remote is None:
            self._remote = self._connect()
        return self._remote

    def _forget(self) -> None:
        state = self.state
        state.experiment = state.parent = state.status = None
        state.points = {}

    def _take(self, event: dict[str, Any]) -> None:
        kind, state = event.get("event"), self.state
        if kind == "trial_placed":
            state.placed[str(event["number"])] = {
                key: event.get(key) for key in ("number", "role", "candidate", "label", "unix_s")
            }
        if kind not in SENT:
            return
        self._open_study(event)
        if kind == "session":
            for placed in list(state.placed.values()):
                self._send_trial(lost_trial(placed, float(event["unix_s"])))
            # Whatever its runs were left at, this session's end decides anew.
            state.end, state.status = "", None
        elif kind == "trial":
            self._send_trial(event)
        elif kind == "winner":
            self._send_winner(event)
        elif kind == "commit":
            tags = {f"ledgertune.commit.{key}": str(event[key]) for key in ("repo", "branch", "hash")}
            self._server().set_tags(self._parent, tags)
        elif kind == "study_end":
            state.end = ENDS.get(event.get("state", ""), "FINISHED")
            self._server().set_tags(self._parent, {"ledgertune.end": str(event.get("reason", ""))})
        elif kind == "session_failed":
            state.end = "FAILED"
            tags = {"ledgertune.failure.class": event["class"], "ledgertune.failure.text": event["text"][:1000]}
            self._server().set_tags(self._parent, tags)

    @property
    def _parent(self) -> str:
        assert self.state.parent is not None
        return self.state.parent

    def _check(self) -> None:
        """Servers are wiped: one that does not know the study any more is told everything again."""
        state = self.state
        if state.parent is not None and not self._server().exists(state.parent):
            self._forget()
            state.trials, state.placed, state.uploads, state.offset = {}, {}, [], 0
        self._checked = True

    def _open_study(self, event: dict[str, Any]) -> None:
        """Find or make the study's run."""
        state, server = self.state, self._server()
        if state.parent is not None:
            return
        state.study_id = study_id(self._journal.first_line())
        state.experiment = server.experiment()
        first = event if event["event"] == "session" else self._first_session()
        facts = study_run(state.study_id, self._folder.name, self._facts(), first)
        state.parent = server.ensure_run(state.experiment, facts)
        server.log_params(state.parent, facts.params)
        for path in (self._folder.job, self._folder.rejected):
            if path.exists() and path.stat().st_size <= self._cap:
                server.upload(state.parent, path)
        server.set_view(state.experiment, VIEW_TAG + view_key(state.study_id), chart_view(state.study_id))
        self._save()

    def _first_session(self) -> dict[str, Any]:
        event, offset = self._journal.next(0)
        while event is not None and event["event"] != "session":
            event, offset = self._journal.next(offset)
        return event or {"budget_device_s": 0.0, "unix_s": time.time()}

    def _facts(self) -> dict[str, Any]:
        try:
            facts: dict[str, Any] = json.loads(self._folder.facts.read_text())
        except (OSError, ValueError):
            return {}
        return facts

    def _send_trial(self, record: dict[str, Any]) -> None:
        state, server = self.state, self._server()
        number = str(record["number"])
        assert state.experiment is not None
        facts = trial_run(state.study_id, self._folder.name, self._facts(), record, self._parent)
        run = server.ensure_run(state.experiment, facts)
        # The id is noted before the rest is sent: a crash between the two leaves a run that the next try goes on with.
        state.trials[number] = run
        self._save()
        refused = server.log_params(run, facts.params)
        server.log_points(run, facts.points)
        # Not where the record says: a journal is data, and may name any folder of this machine.
        folder = self._folder.trial(int(number))
        points = step_points(folder, record)
        for first in range(state.points.get(number, 0), len(points), BATCH):
            server.log_points(run, points[first : first + BATCH])
            state.points[number] = first + BATCH
            self._save()
        server.upload_text(run, json.dumps(record, indent=1), "record.json")
        files = sort_files(folder, self._cap)
        for path in files.now:
            server.upload(run, path)
        self._queue(run, files.later)
        server.set_tags(run, self._remarks(record, files.never, refused))
        server.end(run, facts.status, facts.ended_ms)
        state.points.pop(number, None)
        state.placed.pop(number, None)
        if record.get("mfu_pct") is not None:
            stamp = int(1000 * float(record["unix_s"]))
            point = Point(key="trial_mfu_pct", value=float(record["mfu_pct"]), unix_ms=stamp, step=int(number))
            server.log_points(self._parent, [point])

    def _remarks(self, record: dict[str, Any], never: tuple[Path, ...], refused: list[str]) -> dict[str, str]:
        """Tags that say what is unlike an ordinary run: sent late, files left out, parameters refused."""
        tags = {"ledgertune.sent": "whole"}
        late = time.time() - float(record["unix_s"])
        number = int(record["number"])
        if late > LATE_S:
            tags["ledgertune.sent_late_s"] = f"{late:.0f}"
            if number not in self.state.late:
                self.state.late.append(number)
        notes = []
        if never:
            note = note_left_out(never, self._folder.root, self._cap)
            notes.append(note)
            if f"trial {number}: {note}" not in self.state.left_out:
                self.state.left_out.append(f"trial {number}: {note}")
        if refused:
            notes.append(f"the server took no parameter {', '.join(refused)}; record.json holds everything")
        if notes:
            tags["mlflow.note.content"] = "\n\n".join(notes)
        return tags

    def _queue(self, run: str, paths: tuple[Path, ...]) -> None:
        for path in paths:
            entry = [run, str(path.relative_to(self._folder.root) if self._folder.root in path.parents else path)]
            if entry not in self.state.uploads:
                self.state.uploads.append(entry)

    def _upload_one(self) -> None:
        run, name = self.state.uploads[0]
        path = self._folder.root / name
        if path.exists():
            try:
                self._server().upload(run, path)
            except Exception as error:
                if what_kind(error) not in ("refused", "gone"):
                    raise
                self.state.refused.append(f"file {name}: {type(error).__name__}: {str(error)[:300]}")
        self.state.uploads.pop(0)
        self._save()

    def _send_winner(self, event: dict[str, Any]) -> None:
        comparison, server = event.get("comparison") or {}, self._server()
        tags = {"ledgertune.winner": event["label"]}
        if event.get("why"):
            tags["mlflow.note.content"] = f"winner: trial {event['number']}, {event['label']}. {event['why']}"
        server.set_tags(self._parent, tags)
        stamp = int(1000 * float(event["unix_s"]))
        names = {"step_time_change_pct": "winner_step_time_change_pct", "mfu_points": "winner_mfu_points"}
        points = [
            Point(key=name, value=float(comparison[key]), unix_ms=stamp)
            for key, name in names.items()
            if comparison.get(key) is not None
        ]
        server.log_points(self._parent, points)
        run = self.state.trials.get(str(event["number"]))
        if run is not None:
            server.set_tags(run, {"ledgertune.winner": "true"})

    def _settle(self, live: bool) -> bool:
        """Give the study's run the status that the journal asks for, and close what a crash left open."""
        state = self.state
        if state.parent is None or state.experiment is None:
            return False
        wanted = state.end or ("RUNNING" if live else "KILLED")
        if state.status == wanted:
            return False
        server = self._server()
        if wanted != "RUNNING":
            for run in server.open_runs(state.experiment, state.study_id):
                if run != state.parent:
                    server.end(run, "KILLED")
        server.end(state.parent, wanted)
        state.status = wanted
        self._save()
        return True
