"""The sender: whatever fails, everything arrives, once."""

from __future__ import annotations

import json
import os
from pathlib import Path
import tempfile
from typing import Any

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from tests.tuner.tracking.fake import Down
from tests.tuner.tracking.fake import FakeRemote
from tests.tuner.tracking.study import new_study
from tests.tuner.tracking.study import placed
from tests.tuner.tracking.study import session
from tests.tuner.tracking.study import trial
from tests.tuner.tracking.study import whole_study
from tests.tuner.tracking.study import write
from tuner.records.layout import StudyFolder
from tuner.records.tracking.report import tracking_facts
from tuner.records.tracking.report import tracking_lines
from tuner.records.tracking.runs import ID_TAG
from tuner.records.tracking.sender import Sender
from tuner.records.tracking.tracker import take_credentials


def sender(folder: StudyFolder, server: FakeRemote, cap: int = 10**9) -> Sender:
    return Sender(folder, "http://server", "e", cap, lambda: server)  # type: ignore[arg-type, return-value]


def drain(folder: StudyFolder, server: FakeRemote, live: bool = False, cap: int = 10**9) -> Sender:
    """Send all, with a fresh sender after every error as a new process has."""
    for _ in range(10_000):
        one = sender(folder, server, cap)
        try:
            while one.step(live):
                pass
            return one
        except Down:
            continue
    raise AssertionError("never came to its end")


def test_a_whole_study(tmp_path: Path) -> None:
    folder, server = new_study(tmp_path / "s"), FakeRemote()
    whole_study(folder)
    drain(folder, server)
    parent, trials = server.of_study(), server.of_trials()
    assert sorted(trials) == [0, 1, 2] and parent["status"] == "FINISHED"
    assert all(held["status"] == "FINISHED" for held in trials.values())
    assert trials[2]["tags"]["ledgertune.winner"] == "true" and parent["tags"]["ledgertune.winner"] == "tp2"
    assert {step for key, step, _ in trials[0]["points"] if key == "step/loss"} == set(range(1, 21))
    assert {"record.json", "rank0.jsonl", "m_f.py"} <= set(trials[0]["files"])
    assert trials[0]["params"]["micro_batch"] == "1" and parent["params"]["budget_device_s"] == "100.0"
    told = {key: value for (key, _, _), value in parent["points"].items()}
    assert told["winner_step_time_change_pct"] == -10.0
    steps = {step: value for (key, step, _), value in parent["points"].items() if key == "trial_mfu_pct"}
    assert steps == {0: 10.0, 1: 11.0, 2: 12.0}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["ok", "before", "after"]), max_size=120), st.booleans())
def test_any_failure_loses_and_doubles_nothing(script: list[str], with_crash: bool) -> None:
    """Every call may fail before the server acts or after it (a lost answer); each error meets a fresh process."""
    with tempfile.TemporaryDirectory() as place:
        folder, server = new_study(Path(place) / "s"), FakeRemote()
        whole_study(folder, trials=3, steps=5)
        if with_crash:
            write(folder, session(folder), placed(7))
        turns = iter(script)
        turn = {"now": "ok"}

        def fails(when: str, name: str) -> bool:
            if when == "before":
                turn["now"] = next(turns, "ok")
            return turn["now"] == when

        server.fails = fails
        drain(folder, server)
        trials = server.of_trials()
        assert sorted(trials) == [0, 1, 2]
        assert server.of_study()["status"] == ("KILLED" if with_crash else "FINISHED")
        assert all(len(held["points"]) == 10 + 10 for held in trials.values())
        assert all(held["status"] != "RUNNING" for held in server.runs.values())


def test_nothing_is_sent_again_once_taken(tmp_path: Path) -> None:
    folder, server = new_study(tmp_path / "s"), FakeRemote()
    whole_study(folder)
    drain(folder, server)
    before = (server.points_sent, server.calls["upload"])
    drain(folder, server)
    assert (server.points_sent, server.calls["upload"]) == before


def test_another_server_is_told_everything(tmp_path: Path) -> None:
    folder, first, second = new_study(tmp_path / "s"), FakeRemote(), FakeRemote()
    whole_study(folder)
    drain(folder, first)
    other = Sender(folder, "http://other", "e", 10**9, lambda: second)  # type: ignore[arg-type, return-value]
    while other.step(False):
        pass
    assert second.of_trials().keys() == first.of_trials().keys()
    assert second.of_study()["tags"][ID_TAG] == first.of_study()["tags"][ID_TAG]


def test_a_lost_trial_is_recorded_by_the_next_session(tmp_path: Path) -> None:
    folder, server = new_study(tmp_path / "s"), FakeRemote()
    write(folder, session(folder), placed(0))
    drain(folder, server, live=True)
    assert server.of_study()["status"] == "RUNNING" and server.of_trials() == {}
    write(folder, session(folder))
    drain(folder, server, live=True)
    lost = server.of_trials()[0]
    assert lost["status"] == "FAILED" and lost["tags"]["ledgertune.failure.class"] == "driver_lost"


def test_large_files_go_last_and_the_largest_stay(tmp_path: Path) -> None:
    folder, server = new_study(tmp_path / "s"), FakeRemote()
    write(folder, session(folder), {"event": "trial", **trial(0, folder)}, {"event": "trial", **trial(1, folder)})
    (folder.trial(0) / "rank0_trace.json.gz").write_bytes(b"x" * 300_000)
    (folder.trial(0) / "huge.bin").write_bytes(b"x" * 600_000)
    one = sender(folder, server, cap=500_000)
    while len(server.of_trials()) < 2 or one.state.offset < folder.journal.stat().st_size:
        assert one.step(True)
    assert "rank0_trace.json.gz" not in server.of_trials()[0]["files"], "a trace went before a record"
    assert one.waiting == 1
    while one.step(True):
        pass
    files, tags = server.of_trials()[0]["files"], server.of_trials()[0]["tags"]
    assert "rank0_trace.json.gz" in files and "huge.bin" not in files
    assert "huge.bin (0.6 MiB)" in tags["mlflow.note.content"] and "cap" in tags["mlflow.note.content"]
    facts = tracking_facts(folder)
    assert facts is not None and facts["waiting_files"] == 0 and "huge.bin" in facts["left_out"][0]
    assert any("huge.bin" in line for line in tracking_lines(folder))


def test_links_in_a_trial_are_not_followed(tmp_path: Path) -> None:
    folder, server = new_study(tmp_path / "s"), FakeRemote()
    (tmp_path / "outside").write_text("not yours")
    record = trial(0, folder)
    (folder.trial(0) / "link.txt").symlink_to(tmp_path / "outside")
    write(folder, session(folder), {"event": "trial", **record})
    drain(folder, server)
    assert "link.txt" not in server.of_trials()[0]["files"]


def test_a_torn_state_file_starts_over_without_doubles(tmp_path: Path) -> None:
    folder, server = new_study(tmp_path / "s"), FakeRemote()
    whole_study(folder)
    drain(folder, server)
    runs: dict[str, Any] = json.loads(json.dumps(list(server.runs)))
    (folder.root / "mlflow.json").write_text('{"uri": "http://ser')
    drain(folder, server)
    assert list(server.runs) == runs and len(server.of_trials()) == 3


def test_a_wiped_server_is_told_everything_again(tmp_path: Path) -> None:
    folder, server = new_study(tmp_path / "s"), FakeRemote()
    whole_study(folder)
    drain(folder, server)
    server.runs.clear()
    write(folder, session(folder), {"event": "trial", **trial(3, folder)})
    drain(folder, server)
    assert sorted(server.of_trials()) == [0, 1, 2, 3] and server.of_study()


def test_what_waits_is_shown_before_a_server_ever_answered(tmp_path: Path) -> None:
    folder, server = new_study(tmp_path / "s"), FakeRemote()
    whole_study(folder)
    sender(folder, server)
    facts = tracking_facts(folder)
    assert facts is not None and facts["waiting_records"] == 6
    assert any("6 records wait" in line for line in tracking_lines(folder))


def test_user_and_password_move_from_the_address_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    assert take_credentials("https://u:p%40ss@host:5000/x") == "https://host:5000/x"
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "u" and os.environ["MLFLOW_TRACKING_PASSWORD"] == "p@ss"
    # What a job file keeps of the same address is the same server.
    assert take_credentials("https://u@host:5000/x") == "https://host:5000/x"
    assert take_credentials("sqlite:///x.db") == "sqlite:///x.db"
