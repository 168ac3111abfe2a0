"""Confirmation, ablation and parity in whole studies with pretended trials."""

from __future__ import annotations

from dataclasses import replace
import json
from pathlib import Path

import pytest

from search_space.candidate import Candidate
from tests.tuner.pretend import Behaviour
from tests.tuner.pretend import make_plan
from tests.tuner.pretend import run
from tests.tuner.pretend import World
from tuner.evidence.claim import Claim
from tuner.records.journal import read_journal
from tuner.records.layout import StudyFolder
from tuner.study.ablate import changed_groups
from tuner.study.plan import StudyPlan


BASE = {"activation_checkpoint": "full", "micro_batch": 1, "tensor_parallel": 1, "data_parallel_shard": 2}


def plan_of(**knobs: object) -> StudyPlan:
    """A plan whose baseline is :data:`BASE`; ``env`` lists that do nothing are there."""
    values = {
        "tensor_parallel": (1,),
        "pipeline_parallel": (1,),
        "data_parallel_replicate": (1,),
        "activation_checkpoint": ("none", "full"),
        "micro_batch": (1,),
        "env": ("default", "nothing"),
        **knobs,
    }
    recipe = {"data": "synthetic", "precision": "fp32"}
    plan = make_plan(values, env={"nothing": {"NOTHING": "1"}}, measure={"steps": 30}, recipe=recipe)
    at = [plan.pool.candidate(i) for i in range(len(plan.pool))]
    baseline = next(one for one in at if all(getattr(one, k) == v for k, v in BASE.items()) and one.env == "default")
    return replace(plan, baseline=baseline)


def world(**effects: float) -> World:
    """Step times: half a second, times the factor of every change from the baseline that is named."""

    def behave(candidate: Candidate, number: int) -> Behaviour:
        step = 0.5
        if candidate.activation_checkpoint == "none":
            step *= effects.get("ac", 1.0)
        if candidate.env != "default":
            step *= effects.get("env", 1.0)
        if candidate.tensor_parallel > 1:
            step *= effects.get("tp", 1.0)
        return Behaviour(step_s=step, loss_shift=effects.get("loss", 0.0) if candidate.env != "default" else 0.0)

    return behave


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    return [event for event in read_journal(StudyFolder(folder).journal) if event["event"] == kind]


def test_a_change_that_does_nothing_confirms_the_baseline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = plan_of(activation_checkpoint=("full",))
    # The search sees the no-op 3% faster, by luck of its one run; repeated in turns it is not.
    lucky = {1: 0.97}

    def behave(candidate: Candidate, number: int) -> Behaviour:
        return Behaviour(step_s=0.5 * lucky.get(number, 1.0), noise=0.002)

    code, end = run(monkeypatch, tmp_path / "s", plan, behave, 2000.0)
    assert code == 0 and end["winner"] == end["baseline"]
    (winner,) = events(tmp_path / "s", "winner")
    assert "within noise" in str(winner["why"])
    roles = [trial["role"] for trial in end["trials"]]
    assert roles.count("confirm") >= 3, "A B A at least"
    assert not Claim.read(tmp_path / "s" / "claim.json").changed


def test_a_real_gain_keeps_only_what_buys_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, end = run(monkeypatch, tmp_path / "s", plan_of(), world(ac=0.7, env=0.999), 6000.0)
    assert code == 0
    winner = next(trial for trial in end["trials"] if trial["number"] == end["winner"])
    assert winner["candidate"]["activation_checkpoint"] == "none" and winner["candidate"]["env"] == "default"
    claim = Claim.read(tmp_path / "s" / "claim.json")
    assert set(claim.changed) == {"activation_checkpoint"}
    assert claim.comparison["significant"] and claim.parity["verdict"] == "agree"
    assert -32 < claim.comparison["step_time_change_pct"] < -28


def test_two_changes_that_both_buy_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, tmp_path / "s", plan_of(), world(ac=0.8, env=0.8), 6000.0)
    claim = Claim.read(tmp_path / "s" / "claim.json")
    assert set(claim.changed) == {"activation_checkpoint", "env"}
    bought = {tuple(change["knobs"]): change for change in claim.changes}
    assert all(change["kept"] and change["source"] == "measured" for change in bought.values())
    assert all(-25 < change["step_time_change_pct"] < -15 for change in bought.values())


def test_what_the_budget_does_not_cover_is_predicted_and_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A budget that ends with confirmation leaves the ablation to the ledger."""
    plan = plan_of()
    one = 2 * (5 + 0.5 * 33 + 3)
    for share in (5.0, 6.0, 7.0, 8.0, 9.0):
        folder = tmp_path / f"s{share:g}"
        run(monkeypatch, folder, plan, world(ac=0.7, env=0.7), share * one * 1.3)
        rows = [change for event in events(folder, "ablation") for change in event["changes"]]  # type: ignore[attr-defined]
        if any(change["source"] == "predicted" for change in rows):
            assert all(
                change["kept"] and change["interval_pct"] is None for change in rows if change["source"] == "predicted"
            )
            return
    pytest.fail("no budget left an ablation to the ledger")


def test_a_faster_candidate_with_another_loss_never_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, end = run(
        monkeypatch, tmp_path / "s", plan_of(activation_checkpoint=("full",)), world(env=0.7, loss=0.05), 4000.0
    )
    assert code == 0 and end["winner"] == end["baseline"]
    (winner,) = events(tmp_path / "s", "winner")
    assert winner["parity"]["verdict"] == "differ" and "loss does not agree" in str(winner["why"])  # type: ignore[index]


def test_other_layouts_begin_with_the_same_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan = plan_of(tensor_parallel=(1, 2), activation_checkpoint=("full",), env=("default",))
    run(monkeypatch, tmp_path / "s", plan, world(tp=0.7), 4000.0)
    confirmed = [trial for trial in events(tmp_path / "s", "trial") if trial["role"] == "confirm"]
    assert len(confirmed) >= 3
    assert {trial["start_mode"] for trial in confirmed} == {"seed_weights"}
    assert Claim.read(tmp_path / "s" / "claim.json").parity["verdict"] == "agree"


def test_an_interrupted_confirmation_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A second session with the budget of the first finds the evidence complete and measures nothing again."""
    folder = tmp_path / "s"
    _, first = run(monkeypatch, folder, plan_of(), world(ac=0.7), 6000.0)
    _, second = run(monkeypatch, folder, plan_of(), world(ac=0.7), 6000.0)
    assert len(second["trials"]) == len(first["trials"]) and second["winner"] == first["winner"]


def test_knobs_that_mean_something_together_are_undone_together() -> None:
    baseline = Candidate(data_parallel_shard=8)
    winner = Candidate(tensor_parallel=2, pipeline_parallel=2, data_parallel_shard=2, compile=True, async_tp=True)
    groups = changed_groups(winner, baseline)
    assert groups == [("tensor_parallel", "pipeline_parallel", "data_parallel_shard"), ("compile", "async_tp")]


def test_a_claim_survives_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(monkeypatch, tmp_path / "s", plan_of(), world(ac=0.7), 4000.0)
    path = tmp_path / "s" / "claim.json"
    claim = Claim.read(path)
    assert Claim.from_json(claim.to_json(), "x") == claim
    assert json.loads(path.read_text())["after"]["label"] == claim.after.label


def test_a_kept_baseline_claims_nothing_of_the_rival_that_was_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plan = plan_of(activation_checkpoint=("full",))
    run(monkeypatch, tmp_path / "s", plan, world(env=0.7, loss=0.05), 4000.0)
    claim = Claim.read(tmp_path / "s" / "claim.json")
    assert claim.parity["verdict"] == "agree" and not claim.changed
    assert "loss does not agree" in claim.why


def test_seed_weights_are_named_once_a_set_and_gone_at_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Curves compare only within one set of weights; a study that is over leaves none behind."""
    plan = plan_of(tensor_parallel=(1, 2), activation_checkpoint=("full",), env=("default",))
    run(monkeypatch, tmp_path / "s", plan, world(tp=0.7), 4000.0)
    folder = StudyFolder(tmp_path / "s")
    confirmed = [trial for trial in events(folder.root, "trial") if trial["role"] == "confirm"]
    assert len({trial["weights"] for trial in confirmed}) == 1 and confirmed[0]["weights"]
    assert not folder.seed_weights.exists()


def test_a_sound_rival_wins_where_the_fastest_is_another_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fastest computes something else; the second, a little slower, is sound: it wins, not the baseline. The budget
    is not spent on undoing the changes of one that cannot win."""
    code, end = run(monkeypatch, tmp_path / "s", plan_of(), world(ac=0.7, env=0.995, loss=0.05), 6000.0)
    assert code == 0
    winner = next(trial for trial in end["trials"] if trial["number"] == end["winner"])
    assert winner["candidate"]["activation_checkpoint"] == "none" and winner["candidate"]["env"] == "default", end[
        "why"
    ]
    assert end["parity"]["verdict"] == "agree"
