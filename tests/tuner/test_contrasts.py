"""The ratio arm: contrasts that differ in one axis and little else, inside their share of the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_space.candidate import Candidate
from search_space.job import Job
from search_space.pool import Pool
from tests.tuner.pretend import Behaviour
from tests.tuner.pretend import make_plan
from tests.tuner.pretend import run
from tuner.records.roles import searched
from tuner.study.contrasts import design


def crossed() -> Pool:
    return Pool.from_candidates(
        [
            Candidate(tensor_parallel=t, data_parallel_shard=8 // t, micro_batch=b, activation_checkpoint=a, compile=c)
            for t in (1, 2, 4, 8)
            for b in (1, 2, 4)
            for a in ("none", "selective", "full")
            for c in (False, True)
        ]
    )


def cell(candidate: Candidate) -> tuple[int, str, bool]:
    return candidate.tensor_parallel, candidate.activation_checkpoint, candidate.compile


def test_all_eight_cells_with_everything_else_as_in_the_centre() -> None:
    pool = crossed()
    centre = Candidate(tensor_parallel=4, data_parallel_shard=2, micro_batch=2, activation_checkpoint="selective")
    found = [pool.candidate(i) for i in design(pool, np.full(len(pool), True), np.ones(len(pool)), centre)]
    assert {cell(c) for c in found} == {(t, a, c) for t in (1, 8) for a in ("none", "full") for c in (False, True)}
    assert {c.micro_batch for c in found} == {2}


def test_the_first_half_is_balanced() -> None:
    """Four trials show both ends of every axis twice, and no two axes go together."""
    pool = crossed()
    order = design(pool, np.full(len(pool), True), np.ones(len(pool)), pool.candidate(0))
    first = np.array(
        [[c.tensor_parallel == 8, c.activation_checkpoint == "full", c.compile] for c in map(pool.candidate, order[:4])]
    )
    assert (first.sum(axis=0) == 2).all()
    signs = 2 * first.astype(int) - 1
    assert (signs.T @ signs == 4 * np.eye(3)).all()


def test_refused_cells_are_left_out_and_an_axis_may_be_flat() -> None:
    pool = crossed()
    allowed = (pool["tensor_parallel"] == 2) & ~pool["compile"].astype(bool)
    found = [pool.candidate(i) for i in design(pool, allowed, np.ones(len(pool)), pool.candidate(0))]
    assert sorted(cell(c) for c in found) == [(2, "full", False), (2, "none", False)]
    assert design(pool, np.full(len(pool), False), np.ones(len(pool)), pool.candidate(0)) == []


def test_share_is_asked_for_by_a_target() -> None:
    job: dict[str, Any] = {"model": {"torchtitan": "m:f"}}
    assert Job.model_validate(job).ratio_share == 0
    assert Job.model_validate({**job, "extrapolate": {"gpus": 1024}}).ratio_share == 0.15
    assert Job.model_validate({**job, "extrapolate": {"gpus": 8}, "search": {"ratio_share": 0.3}}).ratio_share == 0.3


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_contrasts_are_measured_whole_inside_their_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, share: float
) -> None:
    plan = make_plan(search={"ratio_share": share})
    budget = 5000.0

    def world(candidate: Candidate, number: int) -> Behaviour:
        return Behaviour(step_s=0.9 if candidate.activation_checkpoint == "full" else 0.3, startup_s=5, noise=0.001)

    _, end = run(monkeypatch, tmp_path / "s", plan, world, budget)
    arm = [trial for trial in end["trials"] if trial["role"] == "ratio"]
    assert bool(arm) == bool(share)
    if share:
        assert sum(trial["device_s"] for trial in arm) <= share * budget * 0.8
        assert all(trial["state"] == "measured" and trial["steps"] == 20 for trial in arm)
        seen = [Candidate.from_json(trial["candidate"]) for trial in end["trials"] if trial["state"] == "measured"]
        assert {c.activation_checkpoint for c in seen} >= {"none", "full"} and {c.tensor_parallel for c in seen} >= {
            1,
            2,
        }
    keys = [str(trial["candidate"]) for trial in end["trials"] if searched(trial)]
    assert len(keys) == len(set(keys))
