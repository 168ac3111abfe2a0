"""What measured trials say about the prior's error: a small Gaussian process over named features of the knobs."""

from __future__ import annotations

import numpy as np

from search_space.pool import Pool
from search_space.sampler.prior import Prior
from search_space.sampler.prior import Told


LENGTHS = {
    "tensor_parallel": 4.0,
    "pipeline_parallel": 4.0,
    "virtual_stages": 3.0,
    "context_parallel": 4.0,
    "expert_parallel": 4.0,
    "data_parallel_replicate": 6.0,
    "data_parallel_shard": 6.0,
    "micro_batch": 4.0,
    "fsdp_bucket": 4.0,
    "memory_budget": 1.0,
    "first_n": 4.0,
}
"""Ordered knobs: doublings (of the memory budget: units) after which two residuals share 1/e of their variance."""

SWITCHES = {
    "activation_checkpoint": 0.5,
    "compile": 0.5,
    "schedule": 0.5,
    "reshard_after_forward": 0.3,
    "zero_stage": 0.3,
    "env": 0.5,
    "async_tp": 0.3,
    "float8": 0.5,
    "accumulate_without_sync": 0.3,
    "forward_prefetch": 0.2,
    "loss_chunks": 0.2,
}
"""Unordered knobs: the distance between two different values."""

NOISE = 0.01
"""Standard deviation of a measured log step time beyond what the candidate explains."""

OUTLIER = 2.0
"""Prior standard deviations beyond which a residual is taken for the trial's own (another job, a broken link) instead
of a lesson about its neighbours: the excess counts as noise."""

COMMON = 0.1
"""Share of the prior's variance that all candidates of the pool have in common."""


def features(pool: Pool) -> np.ndarray:
    """The knobs as coordinates, shape (n, f): the distance of two rows is the kernel's distance."""
    columns: list[np.ndarray] = []
    for name, length in LENGTHS.items():
        values = pool[name].astype(np.float32)
        scaled = values if name == "memory_budget" else np.log2(np.maximum(values, 1))
        columns.append(scaled / length)
    for name, distance in SWITCHES.items():
        values = np.unique(pool[name])
        if len(values) > 1:
            columns += [(pool[name] == value) * np.float32(distance / np.sqrt(2)) for value in values]
    return np.stack(columns, axis=1).astype(np.float32)


def correlation(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Correlation of the residuals of candidates with features ``left`` (n, f) and ``right`` (k, f), shape (n, k).

    Exponential in the distance (Matérn 1/2: neighbours differ roughly, as knobs act by thresholds), and a share
    that the whole pool has in common.
    """
    square = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :] - 2 * left @ right.T
    return np.asarray(COMMON + (1 - COMMON) * np.exp(-np.sqrt(np.maximum(square, 0))))


def posterior(pool: Pool, prior: Prior, told: Told) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the log step time of every candidate, each of shape (n,).

    Zero-mean Gaussian process on (measured - predicted) with covariance σᵢ·σⱼ·ρᵢⱼ, where σ is the prior's own
    uncertainty and ρ the :func:`correlation` (Rasmussen & Williams 2006, algorithm 2.1). Running candidates enter with
    their expected value, which leaves every mean as it is and only takes uncertainty away, so that parallel asks
    spread out.
    """
    measured = told.measured.astype(int)
    known = np.concatenate([measured, told.running.astype(int)])
    if not len(known):
        return prior.log_step_time.copy(), prior.sigma.copy()
    places = features(pool)
    cross = correlation(places, places[known]) * prior.sigma[known][None, :]
    count = len(measured)
    residual = told.log_step_time - prior.log_step_time[measured]
    noise = np.full(len(known), NOISE)
    noise[:count] = np.maximum(NOISE, np.abs(residual) - OUTLIER * prior.sigma[measured])
    within = cross[known] * prior.sigma[known][:, None] + np.diag(noise**2 + 1e-9)
    factor = np.linalg.cholesky(within)
    inverse = np.linalg.inv(factor)
    # the mean rests on what was measured alone: a running trial's expected value adds nothing to it
    weights = np.linalg.solve(within[:count, :count], residual) if count else np.zeros(0)
    spread = cross @ inverse.T
    variance = np.maximum(1.0 - (spread**2).sum(axis=1), 1e-6)
    shift = cross[:, :count] @ weights
    return prior.log_step_time + prior.sigma * shift, prior.sigma * np.sqrt(variance)
