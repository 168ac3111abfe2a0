"""The protocol over a whole study: disturbed trials, the canary, nodes that are put out of use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_space.candidate import Candidate
from tests.tuner.pretend import Behaviour
from tests.tuner.pretend import make_plan
from tests.tuner.pretend import run
from tests.tuner.pretend import with_pool
from tuner.records.journal import read_journal
from tuner.records.layout import StudyFolder
from tuner.study.plan import StudyPlan


def plan_of(count: int, **measure: Any) -> StudyPlan:
    """A plan of so many candidates, without confirmation."""
    plan = make_plan(measure={"steps": 40, "stop_confidence": 1.0, **measure}, budget={"confirm_share": 0.0})
    return with_pool(plan, list(range(count)))


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(StudyFolder(folder).journal) if event["event"] == kind]


def test_a_disturbed_trial_that_could_have_won_runs_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = plan_of(3)
    disturbed: list[int] = []

    def world(candidate: Candidate, number: int) -> Behaviour:
        if number == 0:
            return Behaviour(step_s=0.5)
        if number == 1:
            disturbed.append(number)
            return Behaviour(step_s=0.4, slow_half=2.0)
        return Behaviour(step_s=0.4)

    _, end = run(monkeypatch, tmp_path / "s", plan, world, 5000.0)
    first = next(trial for trial in end["trials"] if trial["number"] == 1)
    assert "shift" in first["flags"] and first["undisturbed_s"] == pytest.approx(0.4, rel=0.02)
    same = [trial for trial in end["trials"] if trial["candidate"] == first["candidate"]]
    assert len(same) == 2 and "shift" not in same[1]["flags"], "it was not run again, or more than once"


def test_a_disturbed_trial_that_could_not_win_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def world(candidate: Candidate, number: int) -> Behaviour:
        return Behaviour(step_s=0.5) if number == 0 else Behaviour(step_s=0.8, slow_half=1.5)

    _, end = run(monkeypatch, tmp_path / "s", plan_of(3), world, 5000.0)
    keys = [Candidate.from_json(trial["candidate"]).key() for trial in end["trials"]]
    assert len(keys) == len(set(keys)) == 3


def test_the_baseline_is_measured_again_when_the_hour_has_changed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine becomes 20% slower on the way: the canary says so."""

    def world(candidate: Candidate, number: int) -> Behaviour:
        return Behaviour(step_s=0.5 if number < 3 else 0.6, noise=0.002)

    plan = plan_of(6, canary_s=50)
    _, end = run(monkeypatch, tmp_path / "s", plan, world, 5000.0)
    canaries = [trial for trial in end["trials"] if trial["role"] == "canary"]
    assert canaries and all(Candidate.from_json(t["candidate"]) == plan.baseline for t in canaries)
    found = events(tmp_path / "s", "canary")
    assert len(found) == len(canaries)
    assert any(event["drifted"] and event["change_pct"] == pytest.approx(20, abs=2) for event in found)
    _, quiet = run(monkeypatch, tmp_path / "q", plan_of(6, canary_s=0), world, 5000.0)
    assert all(trial["role"] != "canary" for trial in quiet["trials"])


def test_ray_07_a_node_with_foreign_memory_is_quarantined_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The gang that meets 30 GiB of somebody else's is classed dirty device, its node left out, the candidate tried on
    another node; nothing of it teaches the ledger that the candidate does not fit."""
    plan = plan_of(3)

    def world(candidate: Candidate, number: int) -> Behaviour:
        return Behaviour(dirty_node="id1") if number == 1 else Behaviour(step_s=0.5 + 0.01 * number)

    code, end = run(monkeypatch, tmp_path / "s", plan, world, 5000.0, nodes=2)
    assert code == 0
    by_number = {trial["number"]: trial for trial in end["trials"]}
    assert by_number[1]["failure"]["class"] == "dirty_device" and by_number[1]["quarantined"] == "n1"
    (event,) = events(tmp_path / "s", "quarantine")
    assert event["node"] == "n1"
    measured = [t for t in end["trials"] if t["state"] == "measured"]
    assert {Candidate.from_json(t["candidate"]).key() for t in measured} == {
        plan.pool.candidate(i).key() for i in range(3)
    }


def test_the_last_node_is_not_quarantined_but_the_study_stops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def world(candidate: Candidate, number: int) -> Behaviour:
        return Behaviour(dirty_node="id0") if number >= 1 else Behaviour()

    _, end = run(monkeypatch, tmp_path / "s", plan_of(3), world, 5000.0)
    assert "free the named node" in end["reason"] and not events(tmp_path / "s", "quarantine")


def test_ray_11_what_was_spent_counts_and_not_the_hours_between(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """40 device-hours, some spent, ten hours of nothing, resumed: the rest is still there to the second."""
    from tests.tuner.pretend import Clock

    plan = plan_of(2)
    _, first = run(monkeypatch, tmp_path / "s", plan, lambda c, n: Behaviour(), 144000.0)
    later = Clock(1e9 + 36000 + 10000)
    _, second = run(monkeypatch, tmp_path / "s", plan, lambda c, n: Behaviour(), 144000.0, clock=later)
    assert second["spent_device_s"] == pytest.approx(first["spent_device_s"])
    session = events(tmp_path / "s", "session")[-1]
    assert session["budget_device_s"] - session["spent_device_s"] == pytest.approx(144000 - first["spent_device_s"])


def test_ray_09_a_resumed_study_goes_on_from_what_it_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Five of twenty trials, then a new session: the history is there, nothing is asked twice, and the next proposals
    are those of an uninterrupted study, not a start from nothing."""
    from dataclasses import replace

    def limited(plan: StudyPlan, trials: int) -> StudyPlan:
        search = plan.job.search.model_copy(update={"max_trials": trials})
        return replace(plan, job=plan.job.model_copy(update={"search": search}))

    plan = make_plan(
        {"micro_batch": (1, 2, 4), "compile": (False,)}, measure={"stop_confidence": 1.0}, budget={"confirm_share": 0.0}
    )
    costs = {plan.pool.candidate(i).key(): 0.4 + 0.013 * i for i in range(len(plan.pool))}

    def world(candidate: Candidate, number: int) -> Behaviour:
        return Behaviour(step_s=costs[candidate.key()], noise=0.0)

    _, whole = run(monkeypatch, tmp_path / "whole", limited(plan, 12), world, 1e6)
    run(monkeypatch, tmp_path / "cut", limited(plan, 5), world, 1e6)
    _, resumed = run(monkeypatch, tmp_path / "cut", limited(plan, 12), world, 1e6)
    asked = [[Candidate.from_json(t["candidate"]).key() for t in end["trials"]] for end in (whole, resumed)]
    assert asked[0][:5] == asked[1][:5] and len(set(asked[1])) == len(asked[1])
    assert asked[0] == asked[1], "the second session proposed otherwise than one that never stopped"


def test_a_peak_measured_on_a_busy_cpu_bars_no_winner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a CPU the peak is a measurement of ours: an MFU above 100% says that it was too low, not that a trial errs."""
    from dataclasses import replace

    plan = plan_of(2)
    # A peak at which no step could take less than 0.6 s; these take 0.5 and 0.3.
    low = plan.setting.hardware.peak("fp32") * plan.setting.ideal_s / 0.6
    slow = plan.setting.hardware.override(peak_flops={"fp32": low})
    plan = replace(plan, setting=replace(plan.setting, hardware=slow))
    costs = {plan.pool.candidate(i).key(): 0.5 - 0.2 * i for i in range(2)}
    _, end = run(monkeypatch, tmp_path / "s", plan, lambda c, n: Behaviour(step_s=costs[c.key()]), 1e8)
    assert all(trial["mfu_pct"] > 100 and "peak_too_low" in trial["flags"] for trial in end["trials"])
    assert end["winner"] != end["baseline"] and not events(tmp_path / "s", "warning")
