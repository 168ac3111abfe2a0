"""`tune budget`: every device-second has a kind, and the kinds add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
import pytest

from search_space.candidate import Candidate
from tests.tuner.pretend import Behaviour
from tests.tuner.pretend import make_plan
from tests.tuner.pretend import run
from tuner.cli import main
from tuner.records.journal import Journal
from tuner.records.layout import StudyFolder
from tuner.records.spending import idle_wall_s
from tuner.records.spending import KINDS
from tuner.records.spending import spending
from tuner.records.spending import split


@given(
    device_s=st.floats(0, 1e6),
    wall_s=st.floats(0, 1e5),
    state=st.sampled_from(["measured", "stopped", "failed"]),
    parts=st.lists(st.floats(-1, 1e5), min_size=5, max_size=5),
)
def test_kinds_of_a_trial_add_up_to_its_charge(device_s: float, wall_s: float, state: str, parts: list[float]) -> None:
    names = ("compile_s", "warmup_s", "measured_s", "profile_s", "cleanup_s")
    found = split(device_s, wall_s, state, **dict(zip(names, parts)))
    assert set(found) == set(KINDS) and all(seconds >= 0 for seconds in found.values())
    assert sum(found.values()) == pytest.approx(device_s, rel=1e-9, abs=1e-6)


def test_kinds_of_a_plain_trial() -> None:
    parts = dict(compile_s=20.0, warmup_s=5.0, measured_s=50.0, profile_s=2.0, cleanup_s=3.0)
    found = split(200.0, 100.0, "measured", **parts)
    expected = {"startup": 40, "compile": 40, "warmup": 10, "measured": 100, "profile": 4, "cleanup": 6}
    assert found == {**dict.fromkeys(KINDS, 0.0), **expected}
    assert split(200.0, 100.0, "stopped", **parts)["stopped_early"] == 100
    assert split(200.0, 100.0, "failed", **parts)["failed"] == 200


def test_idle_is_wall_time_of_sessions_without_a_trial() -> None:
    lines: list[tuple[float, str, dict[str, Any]]] = [
        (0, "session", {}),
        (7, "trial_placed", {"number": 0}),
        (20, "trial", {"number": 0}),
        (23, "trial_placed", {"number": 1}),
        (24, "trial_placed", {"number": 2}),
        (30, "trial", {"number": 1}),
        (40, "trial", {"number": 2}),
        (45, "study_end", {}),
        (1000, "session", {}),
        (1002, "trial_placed", {"number": 3}),
    ]
    events = [{"event": kind, "unix_s": at, **facts} for at, kind, facts in lines]
    assert idle_wall_s(events) == 7 + 3 + 5 + 2


def test_the_probe_at_the_start_is_accounted_for(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "s")
    folder.root.mkdir()
    folder.facts.write_text("{}")
    journal = Journal(folder.journal)
    journal.write("session", budget_device_s=100.0)
    journal.write("probe", device_s=12.5, suspects=[], figures={}, coefficients={})
    journal.close()
    document = spending(folder)
    assert document["spent_device_s"] == 12.5 == document["by_kind_s"]["probe"]


def test_the_account_of_a_study_that_probed_is_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A probe is the study's spending and no trial's: its kind stands in one of the two tables only."""
    run(monkeypatch, tmp_path / "s", make_plan(search={"max_trials": 2}), lambda *_: Behaviour(step_s=0.5), 1e5)
    journal = Journal(StudyFolder(tmp_path / "s").journal)
    journal.write("probe", device_s=12.5, suspects=[], figures={}, coefficients={})
    journal.close()
    assert main(["budget", str(tmp_path / "s")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["probe", "12.5"] in [line[:2] for line in lines]
    heads = next(line for line in lines if line[:1] == ["#"])
    assert "startup" in heads and "probe" not in heads


def world(candidate: Candidate, number: int) -> Behaviour:
    """The baseline is fast; others are 2 times slower, or die, or compile."""
    if number == 0:
        return Behaviour(step_s=0.5, compile_s=4.0)
    if number == 2:
        return Behaviour(error="OutOfMemoryError: CUDA out of memory")
    return Behaviour(step_s=1.0 if number % 2 else 0.48)


def test_a_study_accounts_for_all_it_spent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(measure={"steps": 60, "warmup_steps": 4}, search={"max_trials": 7})
    _, end = run(monkeypatch, tmp_path / "s", plan, world, 1e5)
    assert main(["budget", str(tmp_path / "s"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    kinds = document["by_kind_s"]
    assert sum(kinds.values()) == pytest.approx(document["spent_device_s"], abs=0.01)
    assert document["spent_device_s"] == pytest.approx(end["spent_device_s"], abs=0.1)
    first = document["trials"][0]["by_kind_s"]
    # 2 devices; the first of 4 warm-up steps compiled for 4 s; 60 steps of 0.5 s; 5 s before the first step
    assert first["compile"] == pytest.approx(8, rel=0.05)
    assert first["warmup"] == pytest.approx(4, rel=0.05)
    assert first["measured"] == pytest.approx(60, rel=0.05)
    assert first["startup"] == pytest.approx(10, abs=1)
    assert kinds["failed"] > 0 and kinds["stopped_early"] > 0
    assert 0 < document["measured_share_pct"] < 100
    assert main(["budget", str(tmp_path / "s")]) == 0
    text = capsys.readouterr().out
    assert "went into measured steps" in text and "saved" in text


def test_losers_are_stopped_and_what_they_did_not_cost_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sections = {"measure": {"steps": 60, "warmup_steps": 4}, "search": {"max_trials": 5}}
    _, end = run(monkeypatch, tmp_path / "s", make_plan(**sections), lambda c, n: world(c, n if n != 2 else 1), 1e5)
    losers = [trial for trial in end["trials"] if trial["state"] == "stopped"]
    assert losers and all(t["failure"]["class"] == "cannot_win" and t["step_time_s"] for t in losers)
    whole = 2 * (5 + 64 * 1.0)
    for trial in losers:
        assert trial["device_s"] < 0.7 * whole
        assert trial["device_s"] + trial["saved_device_s"] == pytest.approx(whole, rel=0.05)
    assert spending(StudyFolder(tmp_path / "s"))["saved_device_s"] == pytest.approx(
        sum(trial["saved_device_s"] for trial in losers), abs=0.01
    )
    assert end["winner"] not in [trial["number"] for trial in losers]
    sections["measure"] = {**sections["measure"], "stop_confidence": 1.0}
    _, never = run(monkeypatch, tmp_path / "t", make_plan(**sections), lambda c, n: world(c, n if n != 2 else 1), 1e5)
    assert not [trial for trial in never["trials"] if trial["state"] == "stopped"]
