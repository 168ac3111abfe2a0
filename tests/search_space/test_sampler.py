"""The sampler never leaves the pool, never repeats, and prefers what the prior and the trials prefer."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from search_space.enumerate import enumerate_pool
from search_space.pool import Pool
from search_space.sampler import Prior
from search_space.setting import Setting
from tuner.study.asking import Asker


def prior_of(pool: Pool, sigma: float = 0.5) -> Prior:
    n = len(pool)
    step = 1 + 0.1 * pool["micro_batch"] + 0.5 * (pool["pipeline_parallel"] > 1)
    return Prior(
        log_step_time=np.log(step), sigma=np.full(n, sigma), cost=np.full(n, 60.0), allowed=np.arange(n) % 3 != 0
    )


@pytest.mark.parametrize("strategy", ["ours", "ledger", "random", "tpe", "gp"])
def test_whole_pool_once_and_nothing_else(strategy: str, cpu_setting: Setting, tmp_path: Path) -> None:
    knobs = {"compile": (False,), "activation_checkpoint": ("none",), "micro_batch": (1, 2)}
    pool = enumerate_pool(cpu_setting, knobs)
    prior = prior_of(pool)
    asker = Asker(tmp_path / "o.db", "s", pool, lambda: prior, strategy, seed=1)
    seen = []
    while asker.left:
        trial, candidate = asker.ask()
        seen.append(candidate.key())
        asker.tell_measured(trial, 1.0 + len(seen) % 5)
    allowed = {pool.candidate(int(i)).key() for i in np.flatnonzero(prior.allowed)}
    assert len(seen) == len(set(seen)) and set(seen) == allowed


def test_failures_are_not_asked_again_and_interrupted_ones_are(cpu_setting: Setting, tmp_path: Path) -> None:
    pool = enumerate_pool(cpu_setting, {"compile": (False,)})
    prior = prior_of(pool)
    asker = Asker(tmp_path / "o.db", "s", pool, lambda: prior, "ledger", seed=1)
    before = asker.left
    first, failed = asker.ask()
    asker.tell_failed(first, 1.0, "out_of_memory")
    second, again = asker.ask()
    asker.tell_interrupted(second)
    _, third = asker.ask()
    assert failed != again == third
    assert asker.left == before - 2


def test_a_killed_session_sets_its_running_trials_free(cpu_setting: Setting, tmp_path: Path) -> None:
    pool = enumerate_pool(cpu_setting, {"compile": (False,)})
    prior = prior_of(pool)
    first = Asker(tmp_path / "o.db", "s", pool, lambda: prior, "ledger", seed=1)
    _, lost = first.ask()
    second = Asker(tmp_path / "o.db", "s", pool, lambda: prior, "ledger", seed=1)
    second.free_running()
    assert second.ask()[1] == lost


def test_parallel_asks_differ(cpu_setting: Setting, tmp_path: Path) -> None:
    pool = enumerate_pool(cpu_setting)
    prior = prior_of(pool)
    asker = Asker(tmp_path / "o.db", "s", pool, lambda: prior, "ours", seed=1)
    keys = [asker.ask()[1].key() for _ in range(6)]
    assert len(set(keys)) == 6


def test_learning_moves_the_search_to_what_is_measured_fast(cpu_setting: Setting, tmp_path: Path) -> None:
    """The prior dislikes pipelines, the measurements love them: the search must follow the measurements."""
    pool = enumerate_pool(cpu_setting, {"compile": (False,)})
    prior = prior_of(pool)
    prior = Prior(
        log_step_time=prior.log_step_time, sigma=prior.sigma, cost=prior.cost, allowed=np.full(len(pool), True)
    )
    asker = Asker(tmp_path / "o.db", "s", pool, lambda: prior, "ours", seed=1)
    pipelined = []
    for _ in range(16):
        trial, candidate = asker.ask()
        pipelined.append(candidate.pipeline_parallel > 1)
        asker.tell_measured(trial, 0.3 if candidate.pipeline_parallel > 1 else 1.2)
    assert sum(pipelined[8:]) >= 5


def ask_all(path: Path, pool: Pool, strategy: str, seed: int) -> list[str]:
    """One worker: asks and tells until nothing is left; the keys that it got."""
    prior = prior_of(pool)
    asker = Asker(path, "s", pool, lambda: prior, strategy, seed)
    keys = []
    while True:
        try:
            trial, candidate = asker.ask()
        except IndexError:
            return keys
        keys.append(candidate.key())
        asker.tell_measured(trial, 1.0 + len(keys) % 3)


@pytest.mark.parametrize("strategy", ["ours", "ledger", "tpe"])
def test_four_workers_on_one_storage_never_get_the_same_candidate(
    strategy: str, cpu_setting: Setting, tmp_path: Path
) -> None:
    """``ledger`` would give all four the same one if they could ask at the same moment."""
    pool = enumerate_pool(cpu_setting, {"compile": (False,), "micro_batch": (1, 2)})
    prior = prior_of(pool)
    Asker(tmp_path / "o.db", "s", pool, lambda: prior, strategy, 0)
    arguments = [(tmp_path / "o.db", pool, strategy, seed) for seed in range(4)]
    with multiprocessing.get_context("fork").Pool(4) as workers:
        keys = [key for mine in workers.starmap(ask_all, arguments) for key in mine]
    assert sorted(keys) == sorted(pool.candidate(int(i)).key() for i in np.flatnonzero(prior.allowed))
