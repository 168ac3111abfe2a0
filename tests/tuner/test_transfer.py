"""Starting from earlier studies: what they learned carries over, on the same devices and versions only."""

from __future__ import annotations

from dataclasses import replace
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pruning.assess import assess
from pruning.coefficients import prior
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.sampler import Carried
from search_space.sampler import Prior
from search_space.sampler.prior import Told
from search_space.sampler.residual import posterior
from tests.tuner.pretend import Behaviour
from tests.tuner.pretend import make_plan
from tests.tuner.pretend import run
from tuner.records.layout import StudyFolder
from tuner.records.roles import searched
from tuner.study.plan import StudyPlan
from tuner.study.transfer import carry
from tuner.study.transfer import combine
from tuner.study.transfer import read_source
from tuner.study.transfer import Source
from tuner.study.transfer import write_transfer


VERSIONS = {"torch": "2.14.1", "torchtitan": "0.3.0"}
NOW = {"device": "cpu", "hardware": "cpu", "precision": "fp32", "versions": VERSIONS}
FACTOR = 2.5
"""How much slower this pretended machine is than the shipped priors say."""


@pytest.fixture(scope="module")
def plan() -> StudyPlan:
    return make_plan(measure={"stop_confidence": 1.0}, search={"max_trials": 8})


def truth(plan: StudyPlan) -> dict[str, float]:
    """Step time of every candidate on the pretended machine."""
    prices = assess(plan.pool, plan.setting).prices
    return {plan.pool.candidate(i).key(): FACTOR * float(prices.step_time_s[i]) for i in range(len(plan.pool))}


def world(plan: StudyPlan) -> Any:
    known = truth(plan)
    return lambda candidate, number: Behaviour(step_s=known[candidate.key()], noise=0.002)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, plan: StudyPlan) -> StudyFolder:
    root = tmp_path_factory.mktemp("source") / "earlier"
    with pytest.MonkeyPatch.context() as patch:
        run(patch, root, plan, world(plan), 1e6)
    folder = StudyFolder(root)
    hardware = plan.setting.hardware
    facts = NOW | {
        "study": "earlier",
        "num_devices": 2,
        "seq_len": 128,
        "global_batch_seqs": 8,
        "peak_flops": hardware.peak("fp32"),
        "base": plan.base.to_json(),
    }
    folder.facts.write_text(json.dumps(facts))
    return folder


def test_predictions_start_where_the_earlier_study_ended(plan: StudyPlan, source: StudyFolder) -> None:
    found = combine([read_source(source, plan.setting, NOW)], plan.setting)
    known = np.array([truth(plan)[plan.pool.candidate(i).key()] for i in range(len(plan.pool))])
    before = np.abs(np.log(assess(plan.pool, plan.setting).prices.step_time_s / known))
    after = np.abs(np.log(assess(plan.pool, plan.setting, found).prices.step_time_s / known))
    assert np.median(before) == pytest.approx(np.log(FACTOR)) and np.median(after) < 0.25 * np.median(before)
    assert found.observations > 0


def test_a_new_study_uses_them_and_its_trials_are_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: StudyPlan, source: StudyFolder
) -> None:
    folder = StudyFolder(tmp_path / "new")
    folder.root.mkdir()
    write_transfer(folder, [read_source(source, plan.setting, NOW)], plan.setting)
    notes: list[str] = []

    def listen(event: dict[str, Any]) -> None:
        if event["event"] == "session":
            notes.extend(event["notes"])

    few = replace(
        plan, job=plan.job.model_copy(update={"search": plan.job.search.model_copy(update={"max_trials": 3})})
    )
    _, end = run(monkeypatch, folder.root, few, world(plan), 1e6, listeners=[listen])
    asked = [trial for trial in end["trials"] if searched(trial)]
    assert len(asked) == 3
    first = asked[0]
    assert first["predicted"]["step_time_s"] == pytest.approx(first["step_time_s"], rel=0.25)
    assert any("started from earlier" in note for note in notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hardware": "H100-SXM"}, "hardware cpu → H100-SXM"),
        ({"versions": {**VERSIONS, "torch": "2.15.0"}}, "torch 2.14.1 → 2.15.0"),
        ({"precision": "bf16"}, "precision fp32 → bf16"),
    ],
)
def test_other_devices_or_versions_are_refused_with_the_reason(
    plan: StudyPlan, source: StudyFolder, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        read_source(source, plan.setting, NOW | change)


def test_a_study_without_measurements_is_refused(tmp_path: Path, plan: StudyPlan) -> None:
    folder = StudyFolder(tmp_path / "empty")
    folder.root.mkdir()
    folder.facts.write_text(json.dumps(NOW))
    with pytest.raises(UserError, match="nothing was measured"):
        read_source(folder, plan.setting, NOW)


def test_two_sources_hold_the_shipped_prior_once(plan: StudyPlan, source: StudyFolder) -> None:
    """A source that learned nothing adds nothing; two that learned the same are surer than one."""
    start = prior(plan.setting)
    blank = Source("blank", plan.setting, start, ())
    one = read_source(source, plan.setting, NOW)
    alone, joined = combine([one], plan.setting), combine([one, blank], plan.setting)
    assert np.allclose(alone.log_values()[:-5], joined.log_values()[:-5], atol=1e-6)
    twice = combine([one, one], plan.setting)
    assert all(np.diag(twice.covariance()) <= np.diag(alone.covariance()) + 1e-12)
    assert np.allclose(combine([blank], plan.setting).log_values(), start.log_values())


def test_residuals_of_an_earlier_study_move_the_candidates_like_its_own() -> None:
    plan = make_plan()
    pool, n = plan.pool, len(plan.pool)
    flat = Prior(log_step_time=np.zeros(n), sigma=np.full(n, 0.3), cost=np.ones(n), allowed=np.full(n, True))
    pipelined = np.flatnonzero(pool["pipeline_parallel"] > 1)
    told = Carried(pool=pool.take(pipelined[:3]), residual=np.full(3, -0.5), sigma=np.full(3, 0.3))
    nothing = Told(
        measured=np.zeros(0, int), log_step_time=np.zeros(0), running=np.zeros(0, int), asked=np.zeros(0, int)
    )
    mean, sigma = posterior(pool, replace(flat, carried=told), nothing)
    others = np.setdiff1d(np.arange(n), pipelined)
    assert mean[pipelined].max() < mean[others].min() < 0
    assert (sigma[pipelined[:3]] < 0.15).all() and (sigma[others] > 0.2).all()


def test_nothing_carries_over_from_named_environments(plan: StudyPlan) -> None:
    record = {"candidate": replace(Candidate(data_parallel_shard=2), env="tuned").to_json(), "step_time_s": 1.0}
    assert carry([Source("s", plan.setting, prior(plan.setting), (record,))]) is None
