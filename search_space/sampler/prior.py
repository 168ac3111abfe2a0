"""What a sampler is told about a pool: predictions as arrays, from whoever makes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from search_space.pool import Pool


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What earlier studies say about the prior's error; their trials do not count as measured."""

    pool: Pool
    """Their measured candidates, without environment lists, k of them."""

    residual: np.ndarray
    """Log of measured over predicted step time, shape (k,)."""

    sigma: np.ndarray
    """Standard deviation of those predictions, shape (k,)."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Predictions over a pool of n candidates; every array has shape (n,)."""

    log_step_time: np.ndarray
    """Natural logarithm of the predicted step time in seconds."""

    sigma: np.ndarray
    """Standard deviation of that prediction."""

    cost: np.ndarray
    """Predicted cost of a trial, device-seconds."""

    allowed: np.ndarray
    """Mask of the candidates that may be proposed."""

    chance: np.ndarray | None = None
    """Probability that a trial fits in memory; None: all of them fit."""

    failed_cost: np.ndarray | None = None
    """Predicted cost of a trial that does not fit, device-seconds; None: as much as one that does."""

    favour: np.ndarray | None = None
    """Factor on the merit of each candidate, from what measured trials showed; None: 1."""

    carried: Carried | None = None
    """What earlier studies measured; None: nothing."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is known of the candidates that were asked: positions in the pool and their values."""

    measured: np.ndarray
    """Positions that have a value, shape (k,)."""

    log_step_time: np.ndarray
    """Their values, natural logarithm of seconds, shape (k,)."""

    running: np.ndarray
    """Positions that are running now, shape (r,)."""

    asked: np.ndarray
    """Positions that may not be asked again, shape (a,)."""
