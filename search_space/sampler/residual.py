"""What measured trials say about the prior's error: a small Gaussian process over matching knobs."""

from __future__ import annotations

import numpy as np

from search_space.pool import NAMES
from search_space.pool import Pool
from search_space.sampler.prior import Prior
from search_space.sampler.prior import Told


LENGTH = 2.0
"""Knobs that must differ until two residuals share only 1/e of their variance."""

NOISE = 0.02
"""Standard deviation of a measured log step time beyond what the candidate explains."""


def posterior(pool: Pool, prior: Prior, told: Told) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the log step time of every candidate, each of shape (n,).

    Zero-mean Gaussian process on (measured - predicted) with covariance σᵢ·σⱼ·exp(-d/ℓ), where d counts the knobs
    in which two candidates differ and σ is the prior's own uncertainty (Rasmussen & Williams 2006, algorithm 2.1).
    Running candidates enter with their predicted value, so that parallel asks spread out.
    """
    known = np.concatenate([told.measured, told.running]).astype(int)
    if not len(known):
        return prior.log_step_time.copy(), prior.sigma.copy()
    mean_measured = told.log_step_time - prior.log_step_time[told.measured.astype(int)]
    cross = _covariance(pool, prior, np.arange(len(pool)), known)
    within = cross[known]
    measured = np.arange(len(told.measured))
    residual = np.zeros(len(known))
    residual[measured] = mean_measured
    if len(told.running):
        first = within[np.ix_(measured, measured)] + NOISE**2 * np.eye(len(measured))
        believed = within[np.ix_(np.arange(len(measured), len(known)), measured)] @ np.linalg.solve(
            first, mean_measured
        )
        residual[len(measured) :] = believed
    factor = np.linalg.cholesky(within + (NOISE**2 + 1e-9) * np.eye(len(known)))
    weights = np.linalg.solve(factor.T, np.linalg.solve(factor, residual))
    spread = np.linalg.solve(factor, cross.T)
    variance = np.maximum(prior.sigma**2 - (spread**2).sum(axis=0), 1e-8)
    return prior.log_step_time + cross @ weights, np.sqrt(variance)


def _covariance(pool: Pool, prior: Prior, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    differing = np.zeros((len(left), len(right)), dtype=np.float32)
    for name in NAMES:
        column = pool[name]
        differing += column[left][:, None] != column[right][None, :]
    return np.asarray(prior.sigma[left][:, None] * prior.sigma[right][None, :] * np.exp(-differing / LENGTH))
