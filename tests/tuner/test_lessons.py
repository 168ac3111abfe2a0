"""What failures mean for the rest of a study."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from search_space.candidate import Candidate
from search_space.hardware import find_hardware
from search_space.model import ModelShape
from search_space.pool import Pool
from search_space.setting import Setting
from trial_runner.failure.classes import CLASSES
from trial_runner.failure.find import named
from tuner.evidence.sanity import unsound
from tuner.study.lessons import Lessons


SHAPE = ModelShape(name="moe", layers=8, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=2048)
SETTING = Setting(
    shape=SHAPE,
    hardware=find_hardware("H100-SXM"),
    devices_per_node=8,
    nodes=1,
    seq_len=512,
    global_batch_seqs=64,
    versions={"torchtitan": "0.3.0"},
)
CANDIDATES = [
    Candidate(data_parallel_shard=8),
    Candidate(data_parallel_shard=8, expert_parallel=4),
    Candidate(data_parallel_shard=4, tensor_parallel=2, expert_parallel=4),
    Candidate(data_parallel_shard=4, pipeline_parallel=2, micro_batch=1),
    Candidate(
        data_parallel_shard=4, pipeline_parallel=2, compile=True, activation_checkpoint="full", expert_parallel=2
    ),
    Candidate(data_parallel_shard=8, compile=True, activation_checkpoint="full"),
]
POOL = Pool.from_candidates(CANDIDATES)


def record(candidate: Candidate, kind: str, text: str = "", fault: str | None = None) -> dict[str, Any]:
    failure = {"class": kind, "text": text, "rank": 0, "fault": fault}
    return {"state": "failed", "candidate": candidate.to_json(), "failure": failure}


def lessons() -> Lessons:
    return Lessons(POOL, SETTING)


@pytest.mark.parametrize("kind", [item for item in CLASSES if item.retries], ids=lambda item: item.kind)
def test_retried_as_often_as_the_table_says(kind: Any) -> None:
    known = lessons()
    for _ in range(kind.retries):
        assert known.take(record(CANDIDATES[0], kind.kind)).again
    last = known.take(record(CANDIDATES[0], kind.kind))
    if kind.stops_study:
        # The candidate is not to blame and stays free, but no trial follows in this session.
        assert last.stop
        return
    assert not last.again and not last.stop
    assert known.take(record(CANDIDATES[1], kind.kind)).again


def test_CON_25_expert_parallel_without_tensor_parallel_is_held_after_the_first_failure() -> None:
    failure = named("KeyError: mesh 'tp' is not available", "builtins", 0)
    lesson = lessons().take(record(CANDIDATES[1], failure.kind, failure.text, failure.fault))
    assert lesson.held is not None and not lesson.again and not lesson.stop
    np.testing.assert_array_equal(lesson.held, [False, True, False, False, True, False])
    assert "without tensor parallelism" in lesson.reason


def test_CON_27_pipelines_are_held_and_the_search_goes_on_without() -> None:
    failure = named("ValueError: Expecting 2 arg_mbs but got 1", "builtins", 0)
    lesson = lessons().take(record(CANDIDATES[3], failure.kind, failure.text, failure.fault))
    assert lesson.held is not None and not lesson.stop
    np.testing.assert_array_equal(lesson.held, [False, False, False, True, True, False])


def test_CON_13_a_met_risk_holds_all_that_have_it() -> None:
    lesson = lessons().take(record(CANDIDATES[4], "compile_error", "InductorError: backward"))
    assert lesson.held is not None
    # Full checkpointing around compile is a risk of its own, which the sixth candidate shares.
    np.testing.assert_array_equal(lesson.held, [False, False, False, False, True, True])
    assert lessons().take(record(CANDIDATES[0], "compile_error")).held is None


def test_a_full_disk_stops_at_once_and_bad_data_at_the_second() -> None:
    assert "free the disk" in lessons().take(record(CANDIDATES[0], "disk_full")).stop
    known = lessons()
    assert not known.take(record(CANDIDATES[0], "data_error")).stop
    known.take({"state": "measured", "candidate": CANDIDATES[1].to_json(), "failure": None})
    assert not known.take(record(CANDIDATES[0], "data_error")).stop
    assert known.take(record(CANDIDATES[1], "data_error")).stop


def test_CON_20_a_loss_outside_the_band_does_not_win() -> None:
    baseline = {"loss_last": 4.0, "flags": []}
    assert unsound({"loss_last": 6.1, "flags": []}, baseline) is not None
    assert unsound({"loss_last": 4.1, "flags": []}, baseline) is None
    assert unsound({"loss_last": 3.0, "flags": []}, baseline) is None
    assert unsound({"loss_last": float("nan"), "flags": []}, baseline) is not None
    assert unsound({"loss_last": None, "flags": []}, baseline) is None
    leaking = {"loss_last": 4.0, "flags": ["leak"], "leak_bytes_per_step": 400 * 2**20}
    assert "400 MiB a step" in str(unsound(leaking, baseline))


def test_RUN_16_two_configurations_without_a_reason_mean_a_broken_environment() -> None:
    known = lessons()
    assert not known.take(record(CANDIDATES[0], "agent_lost")).stop
    assert not known.take(record(CANDIDATES[0], "agent_lost")).stop
    assert "environment broken" in known.take(record(CANDIDATES[1], "agent_lost")).stop
    known = lessons()
    known.take({"state": "measured", "candidate": CANDIDATES[0].to_json(), "failure": None})
    stops = [known.take(record(candidate, "illegal_access")).stop for candidate in CANDIDATES[1:4]]
    assert [bool(stop) for stop in stops] == [False, False, True]
    known = lessons()
    mixed = [known.take(record(c, k)).stop for c, k in zip(CANDIDATES, ("exception", "out_of_memory", "exception"))]
    assert not any(mixed)


def test_a_new_session_starts_with_a_clean_slate() -> None:
    known = lessons()
    failed = [record(CANDIDATES[0], "data_error"), record(CANDIDATES[1], "exception")]
    blocked, held = known.blocked_by(failed)
    assert blocked == [CANDIDATES[1]] and not held.any()
    assert not known.take(record(CANDIDATES[2], "data_error")).stop
    assert not known.take(record(CANDIDATES[2], "exception")).stop


def test_devices_that_others_fill_end_a_study_at_the_second_trial() -> None:
    known = lessons()
    assert not known.take(record(CANDIDATES[0], "dirty_device")).stop
    assert "free the named node" in known.take(record(CANDIDATES[0], "dirty_device")).stop
