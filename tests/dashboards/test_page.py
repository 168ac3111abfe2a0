"""The report page without a browser: its figures, its escaping, its policy."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from pathlib import Path
import re
from typing import Any

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from dashboards.page import list_page
from dashboards.page import report_page
from dashboards.page_data import embed
from dashboards.page_data import page_document
from dashboards.page_data import refused_rows
from search_space.candidate import Candidate
from search_space.knobs import KNOBS
from tests.dashboards.made_up import events
from tests.dashboards.made_up import NASTY
from tests.dashboards.made_up import write_study
from tests.tuner.pretend import Behaviour
from tests.tuner.pretend import make_plan
from tests.tuner.pretend import run
from tuner.cli import main
from tuner.records.journal import Journal
from tuner.records.journal import JournalFollower
from tuner.records.journal import read_journal
from tuner.records.layout import StudyFolder
from tuner.records.summary import summarise
from tuner.records.timeline import timeline


def data_of(page: str) -> dict[str, Any]:
    """What stands in the page's data element."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_figures_are_those_of_status(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", events(30), refused=5)
    told = json.loads(json.dumps(summarise(folder).to_json()))
    shown = data_of(report_page(folder))["document"]
    for key in set(told) - {"trials", "running"}:
        assert shown[key] == told[key], key
    assert len(shown["trials"]) == len(told["trials"]) == 30
    for mine, theirs in zip(shown["trials"], told["trials"]):
        for key in ("number", "state", "label", "step_time_s", "step_time_ci_s", "mfu_pct", "device_s"):
            assert mine.get(key) == theirs.get(key)
        assert mine["knobs"] == [theirs["candidate"][knob.name] for knob in KNOBS]
    assert sum(shown["spending"]["by_kind_s"].values()) == pytest.approx(told["spent_device_s"], abs=0.1)


def test_SEC_07_text_of_records_cannot_leave_its_element(tmp_path: Path) -> None:
    page = report_page(write_study(tmp_path / "s<" / "title><script>x", events(20)))
    assert "alert(1)</script>" not in page and "<img src=x" not in page
    assert "<title>title><script>x" not in page and "<title>title&gt;&lt;script&gt;x" in page
    texts = [trial["failure"]["text"] for trial in data_of(page)["document"]["trials"] if "failure" in trial]
    assert any(NASTY in text for text in texts), "escaped, not lost"
    # One element of data, and as many scripts as the page has files: nothing a record says makes another.
    assert len(re.findall(r"<script\b", page)) == len(re.findall(r"</script>", page))


@given(
    st.recursive(
        st.text() | st.integers() | st.none(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
@settings(max_examples=80, deadline=None)
def test_embedded_data_reads_back_and_has_no_markup(document: Any) -> None:
    text = embed(document)
    assert json.loads(text) == document
    assert not set("<>&") & set(text)


def test_policy_names_every_script_and_no_place(tmp_path: Path) -> None:
    page = report_page(write_study(tmp_path / "s", events(3)))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    for script in re.findall(r"<script>(.*?)</script>", page, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert "connect-src 'none'" in policy[1] and "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1] and "http" not in policy[1]


def test_not_a_number_becomes_nothing(tmp_path: Path) -> None:
    lines = events(3)
    lines[4]["mfu_pct"] = float("nan")
    lines[4]["predicted"]["memory_gib"] = float("inf")
    folder = write_study(tmp_path / "s", lines)
    shown = data_of(report_page(folder))["document"]["trials"][0]
    assert shown["mfu_pct"] is None and shown["predicted"]["memory_gib"] is None


def test_later_trials_alone(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", events(12))
    found = page_document(folder, read_journal(folder.journal), skip_trials=10)
    assert found["trials_from"] == 10 and [trial["number"] for trial in found["trials"]] == [10, 11]


def test_refusals_of_ledger_near_misses_and_framework(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", events(2), refused=4)
    with folder.rejected.open("a") as file:
        file.write('{"torn')
    other = Candidate(tensor_parallel=8, micro_batch=4)
    miss = Candidate(tensor_parallel=4, data_parallel_shard=2, micro_batch=3)
    reason = {"code": "memory", "required": 2.0, "available": 1.0, "unit": "GiB", "text": "too much"}
    told = [
        {"event": "dry_run", "label": other.label(), "candidate": other.to_json(), "error": "it says no"},
        {"event": "dry_run", "label": "fine", "candidate": Candidate().to_json(), "error": None},
        {
            "event": "study_end",
            "near_misses": [{"candidate": miss.to_json(), "label": miss.label(), "reasons": [reason]}],
        },
    ]
    rows = refused_rows(folder, told)
    assert len(rows) == 6
    assert {row["reasons"][0][0] for row in rows} == {"memory", "refused_by_framework"}
    assert rows[-1]["reasons"] == [["memory", 2.0, 1.0, "GiB", "too much"]]
    assert rows[0]["memory_gib"] == rows[0]["reasons"][0][1]


def test_timeline_accounts_for_every_second() -> None:
    found = timeline(events(40), num_devices=8)
    spans = found["spans"]
    assert found["lanes"] == 1
    for before, after in itertools.pairwise(spans):
        assert after["start_s"] >= before["end_s"] - 0.01
    busy = sum(span["end_s"] - span["start_s"] for span in spans)
    assert busy + found["idle_s"] == pytest.approx(found["end_s"], abs=0.1)
    walls = {line["number"]: line["wall_s"] for line in events(40) if line["event"] == "trial"}
    for number, wall in walls.items():
        mine = [span for span in spans if span["number"] == number]
        assert sum(span["end_s"] - span["start_s"] for span in mine) == pytest.approx(wall, abs=0.02)


def test_gangs_side_by_side_and_a_session_that_died() -> None:
    lines: list[dict[str, Any]] = [
        {"event": "session", "unix_s": 100.0},
        {"event": "trial_placed", "unix_s": 101.0, "number": 0, "devices": 2},
        {"event": "trial_placed", "unix_s": 102.0, "number": 1, "devices": 2},
        {
            "event": "trial",
            "unix_s": 110.0,
            "number": 0,
            "wall_s": 9.0,
            "by_kind_s": {"startup": 4.0, "measured": 14.0},
        },
        {"event": "trial_placed", "unix_s": 111.0, "number": 2, "devices": 2},
        {"event": "heartbeat", "unix_s": 115.0, "running": {"1": 26.0, "2": 8.0}},
        {"event": "session", "unix_s": 9000.0},
        {"event": "trial_placed", "unix_s": 9001.0, "number": 3, "devices": 2},
    ]
    found = timeline(lines, num_devices=4, now_s=9004.0)
    by_number = {span["number"]: span for span in found["spans"]}
    assert found["lanes"] == 2 and found["sessions"] == [0.0, 15.0]
    assert by_number[2]["lane"] == 0 and by_number[1]["lane"] == 1
    assert by_number[1]["end_s"] == by_number[2]["end_s"] == 15.0 and by_number[1]["kind"] == "failed"
    assert (by_number[3]["start_s"], by_number[3]["end_s"], by_number[3]["kind"]) == (16.0, 19.0, "running")
    assert found["end_s"] == 19.0


def test_follower_sees_what_a_reader_sees(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    follower = JournalFollower(path)
    assert not follower.look() and follower.events == []
    journal = Journal(path)
    journal.write("session", budget_device_s=5.0)
    assert follower.look() and not follower.look()
    journal.write("heartbeat", running={"0": 1.0})
    follower.look()
    journal.write("heartbeat", running={"0": 2.0})
    with path.open("a") as file:
        file.write('{"event": "tr')
    follower.look()
    assert follower.events[-1]["running"] == {"0": 2.0} and len(follower.events) == 2
    version = follower.version
    with path.open("a") as file:
        file.write('ial", "unix_s": 1}\n')
    assert follower.look() and follower.version == version + 1
    kept = [event for event in read_journal(path) if event != read_journal(path)[1]]
    assert follower.events == kept
    path.write_text('{"event": "session", "unix_s": 2}\n')
    assert follower.look() and len(follower.events) == 1


def test_list_page_escapes() -> None:
    row = {"href": 's/"><script>/', "study": "<b>", "state": "done", "winner": "<i>", "gain": "", "budget": ""}
    page = list_page([row])
    assert "<b>" not in page and "<i>" not in page and '"><script>' not in page
    assert "no study yet" in list_page([])


def test_report_verb_writes_the_page(tmp_path: Path, capsys: Any) -> None:
    folder = write_study(tmp_path / "s", events(4))
    target = tmp_path / "out" / "r.html"
    assert main(["report", str(folder.root), "--html", str(target), "--json"]) == 2
    assert "cannot be written" in capsys.readouterr().err
    target.parent.mkdir()
    assert main(["report", str(folder.root), "--html", str(target), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["bytes"] == target.stat().st_size and target.read_text().startswith("<!DOCTYPE html>")


def test_a_study_of_the_real_loop_as_a_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A journal that the loop wrote, not a made-up one; its refused candidates have figures to be drawn with."""
    plan = make_plan()
    code, last = run(monkeypatch, tmp_path / "s", plan, lambda candidate, number: Behaviour(), 400.0)
    assert code == 0
    folder = StudyFolder(tmp_path / "s")
    shown = data_of(report_page(folder))
    assert shown["document"]["winner"] == last["winner"]
    assert shown["document"]["spent_device_s"] == last["spent_device_s"]
    assert shown["document"]["timeline"]["lanes"] == 1 and shown["document"]["timeline"]["idle_s"] >= 0
    assert len(shown["refused"]) == last["enumerated"] - last["feasible"] > 0
    for row in shown["refused"]:
        assert row["memory_gib"] > 0 and 0 < row["mfu_pct"] < 100 and row["reasons"]
