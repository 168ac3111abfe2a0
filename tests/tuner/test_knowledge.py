"""What trials teach: calibration, out-of-memory domination, costs and bounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pruning.assess import assess
from pruning.calibration import Observation
from search_space.candidate import ACTIVATION_CHECKPOINT
from search_space.enumerate import enumerate_pool
from search_space.hardware import find_hardware
from search_space.job import MeasureSection
from search_space.setting import Setting
from tuner.study.costs import CostModel
from tuner.study.costs import DEFAULT_STARTUP_S
from tuner.study.knowledge import chance_to_fit
from tuner.study.knowledge import Knowledge
from tuner.study.lessons import Lesson
from tuner.study.lessons import Lessons


@pytest.fixture
def knowledge(cpu_setting: Setting) -> Knowledge:
    pool = enumerate_pool(cpu_setting)
    return Knowledge(pool, cpu_setting, CostModel("cpu", MeasureSection(steps=20, warmup_steps=5)))


def test_a_measured_trial_tightens_predictions_towards_itself(knowledge: Knowledge) -> None:
    before = knowledge.assessment.prices
    candidate = knowledge.pool.candidate(0)
    measured = 3 * float(before.step_time_s[0])
    spread = np.median(before.step_time_high_s / before.step_time_low_s)
    for i in range(0, len(knowledge.pool), 40):
        candidate = knowledge.pool.candidate(i)
        measured = 3 * float(before.step_time_s[i])
        knowledge.observe(
            Observation(candidate=candidate, step_time_s=measured, step_time_ci_s=(0.97 * measured, 1.03 * measured))
        )
    after = knowledge.assessment.prices
    assert np.median(after.step_time_s / before.step_time_s) == pytest.approx(3, rel=0.35)
    assert np.median(after.step_time_high_s / after.step_time_low_s) < spread
    assert knowledge.step_high_s(candidate) == pytest.approx(1.5 * measured)


def test_oom_refuses_all_that_need_as_much(knowledge: Knowledge) -> None:
    memory = knowledge.assessment.prices.memory_bytes
    feasible = np.flatnonzero(knowledge.feasible)
    middle = int(feasible[np.argsort(memory[feasible])[len(feasible) // 2]])
    below = memory < memory[middle]
    knowledge.observe(Observation(candidate=knowledge.pool.candidate(middle), oom=True))
    assert not knowledge.feasible[~below].any()


def test_blocked_candidate_is_out(knowledge: Knowledge) -> None:
    i = int(np.flatnonzero(knowledge.feasible)[0])
    knowledge.block(knowledge.pool.candidate(i))
    assert not knowledge.prior().allowed[i]


def test_a_refusal_by_the_framework_takes_its_whole_risk_along(knowledge: Knowledge) -> None:
    pool = knowledge.pool
    risky = pool["compile"].astype(bool) & (pool["activation_checkpoint"] == ACTIVATION_CHECKPOINT.index("full"))
    first, second = (int(i) for i in np.flatnonzero(risky & knowledge.feasible)[:2])

    def lesson(kind: str) -> Lesson:
        candidate = pool.candidate(first).to_json()
        failure = {"class": kind, "text": "", "fault": None}
        return Lessons(pool, knowledge.setting).take({"state": "failed", "candidate": candidate, "failure": failure})

    assert lesson("out_of_memory").held is None and knowledge.feasible[second]
    refused = lesson("framework_invalid")
    assert refused.held is not None and "full checkpointing around compiled" in refused.reason
    knowledge.hold(refused.held)
    assert not knowledge.feasible[risky].any() and knowledge.feasible[~risky].any()


def test_memory_chances_learn_from_what_ran_and_what_did_not(knowledge: Knowledge) -> None:
    gpu = replace(knowledge.setting, hardware=find_hardware("H100-SXM"), precision="bf16")
    prices = assess(knowledge.pool, gpu).prices
    scaled = gpu.hardware.memory_bytes / np.median(prices.memory_bytes)
    near = replace(
        prices, memory_bytes=prices.memory_bytes * scaled, memory_high_bytes=prices.memory_high_bytes * scaled
    )
    before = chance_to_fit(near, gpu)
    order = np.argsort(near.memory_bytes)
    low, high = int(order[len(order) // 3]), int(order[2 * len(order) // 3])
    assert (np.diff(before[order]) <= 1e-9).all() and 0 <= before.min() <= before.max() <= 1
    assert (chance_to_fit(near, gpu, out_of_memory=[low]) <= before + 1e-9).all()
    assert (chance_to_fit(near, gpu, ran=[high]) >= before - 1e-9).all()
    assert chance_to_fit(near, gpu, ran=[high])[low] > before[low] or before[low] > 0.999


def test_wall_limit_keeps_what_is_too_dear_out(knowledge: Knowledge) -> None:
    worst = [knowledge.worst_s(candidate) for candidate in knowledge.pool.candidates()]
    knowledge.wall_limit_s = float(np.median(worst))
    allowed = knowledge.prior().allowed
    assert allowed.any() and all(w <= knowledge.wall_limit_s * (1 + 1e-9) for w, a in zip(worst, allowed) if a)


def test_costs_learn_start_up_apart_for_compile() -> None:
    costs = CostModel("cpu", MeasureSection(steps=20, warmup_steps=5, trace=False))
    before = costs.worst_s(False, 1.0)
    costs.learn(False, 10.0)
    assert costs.worst_s(False, 1.0) < before
    assert costs.startup_s(True) > 2 * costs.startup_s(False)
    assert costs.worst_s(False, 1.0) >= 10 + 25
    bounded = CostModel("cpu", MeasureSection(steps=20, warmup_steps=5, timeout_s=30))
    assert bounded.worst_s(True, 10.0) == 30


def test_unknown_candidate_is_a_key_error(knowledge: Knowledge) -> None:
    with pytest.raises(KeyError):
        knowledge.position(replace(knowledge.pool.candidate(0), env="elsewhere"))


def test_gangs_that_start_together_may_take_longer(knowledge: Knowledge) -> None:
    knowledge.costs.learn(False, 5.0)
    alone = knowledge.costs.startup_s(False)
    knowledge.costs.crowd = 2
    assert knowledge.costs.startup_s(False) == 2 * alone


def test_what_started_fast_on_a_quiet_machine_is_not_hung_on_a_busy_one(knowledge: Knowledge) -> None:
    candidate = knowledge.pool.candidate(0)
    assert knowledge.first_step_s(candidate) == float("inf")
    knowledge.costs.learn(candidate.compile, 1.0)
    assert knowledge.first_step_s(candidate) > DEFAULT_STARTUP_S["cpu", candidate.compile]
    knowledge.costs.learn(candidate.compile, 500.0)
    assert knowledge.first_step_s(candidate) > 500.0
