"""The residual process: what one trial says of the others, and what it must not say."""

from __future__ import annotations

from dataclasses import replace
import json
import os
from pathlib import Path
import subprocess
import sys

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from search_space.candidate import Candidate
from search_space.pool import Pool
from search_space.sampler import Prior
from search_space.sampler import strategies
from search_space.sampler.prior import Told
from search_space.sampler.residual import posterior


def crossed() -> Pool:
    return Pool.from_candidates(
        [
            Candidate(
                tensor_parallel=t, pipeline_parallel=p, data_parallel_shard=16 // (t * p), micro_batch=b, compile=c
            )
            for t in (1, 2, 4)
            for p in (1, 2, 4)
            for b in (1, 2, 4, 8)
            for c in (False, True)
        ]
    )


ROOT = Path(__file__).parents[2]
POOL = crossed()
N = len(POOL)
PRIOR = Prior(log_step_time=np.zeros(N), sigma=np.full(N, 0.3), cost=np.full(N, 100.0), allowed=np.full(N, True))


def told(measured: list[int], values: list[float], running: list[int] | None = None) -> Told:
    run = np.array(running or [], dtype=int)
    known = np.array(measured, dtype=int)
    return Told(measured=known, log_step_time=np.array(values), running=run, asked=np.concatenate([known, run]))


@given(
    points=st.lists(st.tuples(st.integers(0, N - 1), st.floats(-0.5, 0.5)), max_size=12, unique_by=lambda p: p[0]),
    running=st.lists(st.integers(0, N - 1), max_size=4, unique=True),
)
@settings(max_examples=40, deadline=None)
def test_posterior_is_a_posterior(points: list[tuple[int, float]], running: list[int]) -> None:
    positions, values = [p for p, _ in points], [v for _, v in points]
    others = [r for r in running if r not in positions]
    mean, sigma = posterior(POOL, PRIOR, told(positions, values))
    with_running = posterior(POOL, PRIOR, told(positions, values, others))
    assert np.isfinite(mean).all() and (sigma > 0).all()
    assert np.allclose(mean, with_running[0], atol=1e-4)
    assert (with_running[1] <= sigma + 1e-3).all()
    for position, value in points:
        assert abs(mean[position] - value) < 0.1 and sigma[position] < 0.06
    wanted = np.arange(0, N, 3)
    some = posterior(POOL, PRIOR, told(positions, values), wanted)
    assert np.allclose(some[0], mean[wanted], atol=1e-4) and np.allclose(some[1], sigma[wanted], atol=1e-4)


def test_neighbours_learn_more_than_strangers_and_a_family_more_than_another() -> None:
    first = POOL.position(Candidate(tensor_parallel=4, data_parallel_shard=4, micro_batch=2))
    near = POOL.position(Candidate(tensor_parallel=4, data_parallel_shard=4, micro_batch=4))
    family = POOL.position(Candidate(tensor_parallel=2, data_parallel_shard=8, micro_batch=8, compile=True))
    other = POOL.position(Candidate(pipeline_parallel=4, data_parallel_shard=4, micro_batch=2))
    assert first is not None and near is not None and family is not None and other is not None
    mean, _ = posterior(POOL, PRIOR, told([first], [-0.3]))
    assert mean[first] < mean[near] < mean[family] < mean[other] < 0


def test_an_outlier_teaches_its_neighbours_less_than_its_size() -> None:
    mild, _ = posterior(POOL, PRIOR, told([0], [0.55]))
    wild, _ = posterior(POOL, PRIOR, told([0], [3.0]))
    assert np.median(wild[1:]) < 2 * np.median(mild[1:])


def test_a_sure_prediction_that_may_not_fit_is_weighed_against_a_safe_one() -> None:
    chance = np.ones(N)
    chance[5] = 0.3
    fast = np.zeros(N)
    fast[5], fast[9] = -0.05, -0.04
    prior = replace(PRIOR, log_step_time=fast, chance=chance, failed_cost=np.full(N, 60.0))
    rng = np.random.default_rng(0)
    assert strategies.ours(POOL, prior, told([], []), np.arange(N), rng) == 9
    much = replace(prior, log_step_time=np.where(np.arange(N) == 5, -1.5, fast))
    assert strategies.ours(POOL, much, told([], []), np.arange(N), rng) == 5


def test_cheaper_of_two_equal_candidates_comes_first() -> None:
    cost = PRIOR.cost.copy()
    cost[11] = 50.0
    prior = replace(PRIOR, cost=cost)
    assert strategies.ours(POOL, prior, told([0], [0.0]), np.arange(1, N), np.random.default_rng(0)) == 11


@pytest.mark.parametrize("size", [8, 30])
def test_the_short_list_keeps_the_choice(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    rng = np.random.default_rng(3)
    prior = replace(PRIOR, log_step_time=rng.normal(0, 0.5, N), sigma=np.full(N, 0.1))
    state, left = told([3, 8], [0.1, -0.2]), np.setdiff1d(np.arange(N), [3, 8])
    whole = strategies.ours(POOL, prior, state, left, rng)
    monkeypatch.setattr(strategies, "SHORT", size)
    assert strategies.ours(POOL, prior, state, left, rng) == whole


def test_ask_rate_prints_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/ask_rate.py", "500", "5"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert {"candidates", "told", "ask_median_s", "peak_gib"} <= set(json.loads(done.stdout))
