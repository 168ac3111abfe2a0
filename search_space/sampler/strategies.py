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

MIN_CHANCE = 0.01
"""A parallel dimension is opened only if its best candidate has this chance to beat the incumbent."""


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
    """Open each parallel dimension once, then take the best expected improvement per device-second.

    The opening lets calibration see every kind of communication before the search narrows. Improvement is in log
    step time against the best measured one (Jones, Schonlau & Welch 1998), divided by the predicted cost.
    """
    mean, sigma = posterior(pool, prior, told)
    if not len(told.measured):
        return int(left[np.argmin(mean[left])])
    best = float(told.log_step_time.min())
    spread = np.maximum(sigma, 1e-9)
    gap = (best - mean) / spread
    merit = spread * (gap * norm.cdf(gap) + norm.pdf(gap)) / prior.cost
    families = family(pool)
    seen = set(families[told.asked.astype(int)].tolist())
    openings = []
    for unopened in dict.fromkeys(families[left].tolist()):
        if unopened in seen:
            continue
        members = left[families[left] == unopened]
        first = members[np.argmax(merit[members])]
        if norm.cdf((best - mean[first]) / max(sigma[first], prior.sigma[first])) > MIN_CHANCE:
            openings.append(int(first))
    if openings:
        return max(openings, key=lambda i: merit[i])
    return int(left[np.argmax(merit[left])])


def ledger(pool: Pool, prior: Prior, told: Told, left: np.ndarray, rng: np.random.Generator) -> int:
    """The ledger's order alone, no learning from trials beyond what calibrates the ledger."""
    return int(left[np.argmin(prior.log_step_time[left])])


def random(pool: Pool, prior: Prior, told: Told, left: np.ndarray, rng: np.random.Generator) -> int:
    """Uniform over what is left."""
    return int(rng.choice(left))


STRATEGIES: dict[str, Strategy] = {"ours": ours, "ledger": ledger, "random": random}
"""Strategies by name; Optuna's own samplers are delegated to by :mod:`search_space.sampler.pool_sampler`."""
