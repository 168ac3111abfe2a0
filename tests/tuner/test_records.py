"""Journal and summary: what a study did is on disk, also after a crash."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from search_space.errors import UserError
from tuner.records.journal import Journal
from tuner.records.journal import read_journal
from tuner.records.layout import find_folder
from tuner.records.layout import new_folder
from tuner.records.layout import StudyFolder
from tuner.records.summary import summarise


def folder_with(tmp_path: Path, *events: dict[str, object]) -> StudyFolder:
    folder = StudyFolder(tmp_path / "s")
    folder.root.mkdir()
    folder.facts.write_text(json.dumps({"study": "s"}))
    journal = Journal(folder.journal)
    for event in events:
        journal.write(**event)  # type: ignore[arg-type]
    journal.close()
    return folder


SESSION = {"event": "session", "budget_device_s": 100.0}
PLACED = {"event": "trial_placed", "number": 1, "role": "search", "candidate": {}, "label": "x"}


def test_torn_line_is_healed(tmp_path: Path) -> None:
    path = tmp_path / "j"
    Journal(path).write("a")
    path.write_text(path.read_text() + '{"event": "b", "uni')
    assert [event["event"] for event in read_journal(path)] == ["a"]
    Journal(path).write("c")
    assert [event["event"] for event in read_journal(path)] == ["a", "c"]


def test_running_trial_counts_up_to_its_heartbeat(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, SESSION, PLACED, {"event": "heartbeat", "running": {"1": 12.5}})
    summary = summarise(folder)
    assert summary.spent_device_s == 12.5
    assert summary.state == "interrupted"
    assert list(summary.running) == [1]


def test_lost_trial_is_charged_by_the_next_session(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, SESSION, PLACED, {"event": "heartbeat", "running": {"1": 12.5}}, SESSION)
    summary = summarise(folder)
    assert summary.spent_device_s == 12.5 and not summary.running
    assert summary.trials[0]["failure"]["class"] == "driver_lost"


def test_the_probe_is_charged(tmp_path: Path) -> None:
    summary = summarise(folder_with(tmp_path, SESSION, {"event": "probe", "device_s": 7.5}))
    assert summary.spent_device_s == summary.probe_device_s == 7.5


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEDGERTUNE_STUDIES", str(tmp_path))
    with pytest.raises(UserError, match="tune start"):
        find_folder(None)
    first = new_folder("one", "m")
    first.root.mkdir()
    first.facts.write_text("{}")
    assert find_folder("one").root == first.root == find_folder(None).root
    with pytest.raises(UserError, match="already exists"):
        new_folder("one", "m")
    with pytest.raises(UserError, match="there are: one"):
        find_folder("two")
    assert new_folder(None, "../../etc:pass wd").root.parent == tmp_path
