"""Strategies: each picks one position of the pool from what is predicted and what is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.stats import norm

from search_space.pool import Pool
from search_space.sampler.prior import Prior
from search_space.sampler.prior import Told
from search_space.sampler.residual import posterior


Strategy = Callable[[Pool, Prior, Told, np.ndarray, np.random.Generator], int]
"""(pool, prior, told, positions left, random source) → one of the positions left."""

FAILED_SHARE = 0.5
"""Least price of a trial that runs out of memory, as a share of one that runs: it costs little more than its start-up,
but it measures nothing, and on a real cluster it may take a node along."""


NOVELTY = 1.5
"""Factor on the merit of candidates that use parallel dimensions in a combination which no trial has seen: each kind of
communication and bubble has coefficients of its own, and a first look calibrates them."""


def family(pool: Pool) -> np.ndarray:
    """Which parallel dimensions each candidate uses, as a code of bits (TP, PP, CP, shard, replicate), shape (n,)."""
    names = (
        "tensor_parallel",
        "pipeline_parallel",
        "context_parallel",
        "data_parallel_shard",
        "data_parallel_replicate",
    )
    return np.asarray(sum((pool[name] > 1).astype(int) << bit for bit, name in enumerate(names)))


def ours(pool: Pool, prior: Prior, told: Told, left: np.ndarray, rng: np.random.Generator) -> int:
    """The best expected improvement per device-second; new families and diagnosed moves count for more."""
    found = merit(pool, prior, told)
    if prior.favour is not None:
        found = found * prior.favour
    if len(told.asked):
        families = family(pool)
        found = np.where(np.isin(families, families[told.asked.astype(int)]), found, NOVELTY * found)
    return int(left[np.argmax(found[left])])


def merit(pool: Pool, prior: Prior, told: Told) -> np.ndarray:
    """Expected improvement per device-second of every candidate, shape (n,).

    Improvement is in log step time against the best measured one (Jones, Schonlau & Welch 1998), weighted by the
    chance to fit in memory, over the expected cost. Before anything is measured the incumbent is the candidate that
    promises most at its pessimistic end.
    """
    mean, sigma = posterior(pool, prior, told)
    spread = np.maximum(sigma, 1e-9)
    chance = np.ones(len(pool)) if prior.chance is None else prior.chance
    if len(told.measured):
        best = float(told.log_step_time.min())
    else:
        best = float((mean + spread)[prior.allowed & (chance >= min(0.9, chance[prior.allowed].max()))].min())
    failed = FAILED_SHARE * prior.cost
    if prior.failed_cost is not None:
        failed = np.maximum(failed, prior.failed_cost)
    gap = (best - mean) / spread
    improvement = spread * (gap * norm.cdf(gap) + norm.pdf(gap))
    return np.asarray(chance * improvement / (chance * prior.cost + (1 - chance) * failed))


def ledger(pool: Pool, prior: Prior, told: Told, left: np.ndarray, rng: np.random.Generator) -> int:
    """The ledger's order alone, no learning from trials beyond what calibrates the ledger."""
    return int(left[np.argmin(prior.log_step_time[left])])


def random(pool: Pool, prior: Prior, told: Told, left: np.ndarray, rng: np.random.Generator) -> int:
    """Uniform over what is left."""
    return int(rng.choice(left))


STRATEGIES: dict[str, Strategy] = {"ours": ours, "ledger": ledger, "random": random}
"""Strategies by name; Optuna's own samplers are delegated to by :mod:`search_space.sampler.pool_sampler`."""
