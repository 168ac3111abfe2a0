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


SAFE = 0.9
"""Chance to fit in memory from which a candidate counts as safe."""

SHORT = 1 << 14
"""Candidates that are looked at closely; of a larger pool those that promise most by the prior alone."""


def ours(pool: Pool, prior: Prior, told: Told, left: np.ndarray, rng: np.random.Generator) -> int:
    """The best expected improvement per device-second; diagnosed moves count for more."""
    looked = _shortlist(prior, left)
    found = merit(pool, prior, told, looked)
    if prior.favour is not None:
        found = found * prior.favour[looked]
    return int(looked[np.argmax(found)])


def _shortlist(prior: Prior, left: np.ndarray) -> np.ndarray:
    """The :data:`SHORT` positions left with the lowest optimistic step time."""
    if len(left) <= SHORT:
        return left
    optimistic = prior.log_step_time[left] - 2 * prior.sigma[left]
    if prior.chance is not None:
        optimistic = optimistic - np.log(np.maximum(prior.chance[left], 1e-9))
    return np.asarray(np.sort(left[np.argpartition(optimistic, SHORT)[:SHORT]]))


def merit(pool: Pool, prior: Prior, told: Told, wanted: np.ndarray) -> np.ndarray:
    """Expected improvement per device-second of the wanted candidates, shape (wanted,).

    Improvement is in log step time against the best measured one (Jones, Schonlau & Welch 1998), weighted by the
    chance to fit in memory, over the expected cost. Before anything is measured the incumbent is the candidate that
    promises most at its pessimistic end.
    """
    mean, sigma = posterior(pool, prior, told, wanted)
    spread = np.maximum(sigma, 1e-9)
    chance = np.ones(len(wanted)) if prior.chance is None else prior.chance[wanted]
    if len(told.measured):
        best = float(told.log_step_time.min())
    else:
        best = float((mean + spread)[chance >= min(SAFE, chance.max())].min())
    cost = prior.cost[wanted]
    failed = FAILED_SHARE * cost
    if prior.failed_cost is not None:
        failed = np.maximum(failed, prior.failed_cost[wanted])
    gap = (best - mean) / spread
    improvement = spread * (gap * norm.cdf(gap) + norm.pdf(gap))
    return np.asarray(chance * improvement / (chance * cost + (1 - chance) * failed))


def ledger(pool: Pool, prior: Prior, told: Told, left: np.ndarray, rng: np.random.Generator) -> int:
    """The ledger's order alone, no learning from trials beyond what calibrates the ledger."""
    return int(left[np.argmin(prior.log_step_time[left])])


def random(pool: Pool, prior: Prior, told: Told, left: np.ndarray, rng: np.random.Generator) -> int:
    """Uniform over what is left."""
    return int(rng.choice(left))


STRATEGIES: dict[str, Strategy] = {"ours": ours, "ledger": ledger, "random": random}
"""Strategies by name; Optuna's own samplers are delegated to by :mod:`search_space.sampler.pool_sampler`."""
