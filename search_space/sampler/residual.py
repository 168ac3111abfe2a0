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
    "symm_mem": 0.3,
    "loss_chunks": 0.2,
}
"""Unordered knobs: the distance between two different values."""

NOISE = 0.01
"""Standard deviation of a measured log step time beyond what the candidate explains."""

OUTLIER = 2.0
"""Prior standard deviations beyond which a residual is taken for the trial's own (another job, a broken link) instead
of a lesson about its neighbours: the excess counts as noise."""

CARRIED_NOISE = 0.05
"""The same of a step time that an earlier study measured: another day, another placement, perhaps another model."""

COMMON = 0.1
"""Share of the prior's variance that all candidates of the pool have in common."""

FAMILY = 0.3
"""Share that candidates with the same parallel dimensions have in common: each kind of communication and bubble has
coefficients of its own."""

LOCAL = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5)
"""Variances of the neighbours' share, over its prior one, that measured residuals choose from."""

LOCAL_SIGMA = 1.0
"""Log standard deviation of that variance before anything is measured."""

CHUNK = 1 << 14
"""Candidates looked at at once, so that working arrays stay small."""


def features(pool: Pool) -> np.ndarray:
    """The knobs as coordinates, shape (n, f): the distance of two rows is the kernel's distance."""
    columns: list[np.ndarray] = []
    for name, length in LENGTHS.items():
        values = pool[name].astype(np.float32)
        scaled = values if name == "memory_budget" else np.log2(np.maximum(values, 1))
        columns.append(scaled / length)
    for name, apart in SWITCHES.items():
        values = np.unique(pool[name])
        if len(values) > 1:
            columns += [(pool[name] == value) * np.float32(apart / np.sqrt(2)) for value in values]
    return np.stack(columns, axis=1).astype(np.float32)


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


def distance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Distances of candidates with features ``left`` (n, f) and ``right`` (k, f), shape (n, k)."""
    square = (left**2).sum(axis=1)[:, None] + (right**2).sum(axis=1)[None, :] - 2 * left @ right.T
    return np.asarray(np.sqrt(np.maximum(square, 0)))


def covariance(far: np.ndarray, same: np.ndarray, local: float) -> np.ndarray:
    """Covariance of scaled residuals: what the pool shares, what a family shares, and what neighbours share.

    The last is exponential in the distance (Matérn 1/2: knobs act by thresholds, so neighbours differ roughly).

    Args:
        far: distances, shape (n, k).
        same: whether a pair uses the same parallel dimensions, shape (n, k).
        local: variance of the neighbours' share over its prior one.
    """
    return np.asarray(COMMON + FAMILY * same + (1 - COMMON - FAMILY) * local * np.exp(-far))


def posterior(pool: Pool, prior: Prior, told: Told, wanted: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the log step time of the ``wanted`` candidates (all), each of shape (wanted,).

    Zero-mean Gaussian process on (measured - predicted) with covariance σᵢ·σⱼ·kᵢⱼ, where σ is the prior's own
    uncertainty and k the :func:`covariance` (Rasmussen & Williams 2006, algorithm 2.1). Running candidates enter with
    their expected value, which leaves every mean as it is and only takes uncertainty away, so that parallel asks
    spread out.
    """
    index = np.arange(len(pool)) if wanted is None else wanted
    mean, sigma = prior.log_step_time[index], prior.sigma[index]
    measured, running, carried = told.measured.astype(int), told.running.astype(int), prior.carried
    residual = told.log_step_time - prior.log_step_time[measured]
    noise = np.maximum(NOISE, np.abs(residual) - OUTLIER * prior.sigma[measured])
    own = prior.sigma[measured]
    # One pool for all: features code the values that occur.
    pools = [pool.take(np.concatenate([index, measured]))]
    if carried is not None:
        pools.append(carried.pool)
        residual, own = np.concatenate([residual, carried.residual]), np.concatenate([own, carried.sigma])
        noise = np.concatenate([noise, np.full(len(carried.residual), CARRIED_NOISE)])
    pools.append(pool.take(running))
    n, count = len(index), len(residual)
    own, noise = np.concatenate([own, prior.sigma[running]]), np.concatenate([noise, np.full(len(running), NOISE)])
    if not len(own):
        return mean.copy(), sigma.copy()
    both = Pool.concatenate(pools)
    places, kinds = features(both), family(both)
    far, same = distance(places[n:], places[n:]).astype(float), kinds[n:][:, None] == kinds[n:][None, :]
    local = _local_scale(far[:count, :count], same[:count, :count], own[:count], noise[:count], residual)
    within = covariance(far, same, local) * np.outer(own, own) + np.diag(noise**2 + 1e-9)
    inverse = np.linalg.inv(np.linalg.cholesky(within)).astype(np.float32)
    # The mean rests on what was measured alone: a running trial's expected value adds nothing to it.
    weights = np.linalg.solve(within[:count, :count], residual) if count else np.zeros(0)
    shift, variance = np.zeros(n), np.full(n, COMMON + FAMILY + (1 - COMMON - FAMILY) * local)
    for start in range(0, n, CHUNK):
        rows = slice(start, min(start + CHUNK, n))
        alike = (kinds[rows][:, None] == kinds[n:][None, :]).astype(np.float32)
        cross = covariance(distance(places[rows], places[n:]), alike, local) * own.astype(np.float32)[None, :]
        shift[rows] = cross[:, :count] @ weights
        variance[rows] -= ((cross @ inverse.T) ** 2).sum(axis=1)
    return mean + sigma * shift, sigma * np.sqrt(np.maximum(variance, 1e-6))


def _local_scale(far: np.ndarray, same: np.ndarray, own: np.ndarray, noise: np.ndarray, residual: np.ndarray) -> float:
    """The local variance that the residuals speak for: maximum a posteriori over :data:`LOCAL`."""

    def score(local: float) -> float:
        within = covariance(far, same, local) * np.outer(own, own) + np.diag(noise**2 + 1e-9)
        factor = np.linalg.cholesky(within)
        white = np.linalg.solve(factor, residual)
        likelihood = -0.5 * white @ white - np.log(np.diag(factor)).sum()
        return float(likelihood - 0.5 * (np.log(local) / LOCAL_SIGMA) ** 2)

    return max(LOCAL, key=score) if len(residual) else 1.0
