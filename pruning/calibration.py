"""Calibration: few named coefficients with uncertainty, updated by every measured trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
import json
from typing import Any

import numpy as np

from pruning.accounts.account import Account
from pruning.accounts.account import find_account
from pruning.coefficients import Coefficients
from pruning.coefficients import NAMES
from pruning.coefficients import prior
from pruning.ledger.layout import Links
from pruning.ledger.prices import prepare
from pruning.ledger.prices import Prepared
from pruning.ledger.prices import price_prepared
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.pool import Pool
from search_space.setting import Setting


__all__ = ["Coefficients", "Observation", "calibrate", "prior"]

MEMORY_SIGMA = 0.04
"""Log standard deviation of a measured peak that the memory account leaves unexplained."""

STEP = 1e-3
"""Step of the numeric derivative, in log units."""

ROUNDS = 20
"""Most Gauss-Newton steps."""

HALVINGS = 5
"""Times that a step is halved while it does not help."""

OUTLIER = 2.0
"""Predicted standard deviations beyond which the rest of a residual counts as noise of that trial alone."""

PRIOR_TRIALS = 4.0
"""Trials that the prior model error counts for."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What one trial measured."""

    candidate: Candidate
    """The configuration that ran."""

    step_time_s: float | None = None
    """Median step time, seconds."""

    step_time_ci_s: tuple[float, float] | None = None
    """95% interval of the median, seconds."""

    peak_reserved_bytes: float | None = None
    """Largest reserved device memory over all ranks after step 2, bytes."""

    oom: bool = False
    """Whether the trial ran out of device memory."""

    def to_json(self) -> dict[str, Any]:
        """Every field, the candidate by its knobs."""
        interval = list(self.step_time_ci_s) if self.step_time_ci_s else None
        return {
            "candidate": self.candidate.to_json(),
            "step_time_s": self.step_time_s,
            "step_time_ci_s": interval,
            "peak_reserved_bytes": self.peak_reserved_bytes,
            "oom": self.oom,
        }


def calibrate(
    coefficients: Coefficients,
    setting: Setting,
    observations: Sequence[Observation],
    account: Account | None = None,
    links: Links | None = None,
) -> Coefficients:
    """Update coefficients by maximum a posteriori, with a Laplace estimate of what stays uncertain.

    Coefficients are lognormal: Gauss-Newton on their logarithms against the logarithms of measured step times
    (error: the model error and the trial's own interval) and of measured reserved memory. An out-of-memory trial
    counts as a peak of at least the device memory, when the account says less.

    Args:
        coefficients: what is believed so far; they must be for this hardware and framework.
        setting: the study's setting.
        observations: measured trials, each used once.
        account: the framework's habits; absent: those of the setting's framework.
        links: bandwidths of the trials' own nodes, shape (trials,) each; absent: the hardware's.

    Raises:
        UserError: the coefficients belong to other hardware or another framework.
    """
    coefficients.check(setting)
    taught = [i for i, o in enumerate(observations) if o.step_time_s or o.peak_reserved_bytes or o.oom]
    useful = [observations[i] for i in taught]
    if not useful:
        return coefficients
    own_links = (links[0][taught], links[1][taught]) if links is not None else None
    problem = _Problem.of(coefficients, setting, useful, account or find_account(setting.framework), own_links)
    precision = np.linalg.inv(coefficients.covariance())
    start = coefficients.log_values()
    log, (residual, weights) = start.copy(), problem.residuals(start)
    loss = _loss(residual, weights, log - start, precision)
    jacobian = problem.jacobian(log)
    for _ in range(ROUNDS):
        left = precision + jacobian.T @ (weights[:, None] * jacobian)
        right = jacobian.T @ (weights * residual) + precision @ (start - log)
        move = np.clip(np.linalg.solve(left, right), -1.0, 1.0)
        for _ in range(HALVINGS):
            residual, weights = problem.residuals(log + move)
            tried = _loss(residual, weights, log + move - start, precision)
            if tried < loss:
                break
            move = move / 2
        else:
            residual, weights = problem.residuals(log)
            break
        gained, loss, log = loss - tried, tried, log + move
        jacobian = problem.jacobian(log)
        if gained < 1e-6 * (1 + loss):
            break
    covariance = np.linalg.inv(precision + jacobian.T @ (weights[:, None] * jacobian))
    updated = coefficients.with_logs(log, (covariance + covariance.T) / 2)
    timed = ~np.isnan(problem.time)
    if timed.any():
        prices = price_prepared(problem.prepared, updated)
        left_over = ((problem.time - np.log(prices.step_time_s)) / prices.error_scale)[timed]
        before = coefficients.value("model_error")
        spread = np.sqrt((PRIOR_TRIALS * before**2 + float(left_over @ left_over)) / (PRIOR_TRIALS + timed.sum()))
        updated = updated.with_value("model_error", float(np.clip(spread, 0.02, 1.0)))
    return replace(updated, observations=coefficients.observations + len(useful))


@dataclass(frozen=True)
class _Problem:
    """Measured trials as residuals of the ledger's logarithms: step times first, then memory."""

    coefficients: Coefficients
    """What was believed before."""

    prepared: Prepared
    """The trials' candidates."""

    time: np.ndarray
    """Log of measured step times, NaN where there is none, shape (n,)."""

    time_weight: np.ndarray
    """One over their variances, 0 where there is none, shape (n,)."""

    peak: np.ndarray
    """Log of measured reserved memory, NaN where there is none, shape (n,)."""

    out: np.ndarray
    """Whether the trial ran out of memory, shape (n,)."""

    capacity: float
    """Log of the memory that the allocator can have."""

    @classmethod
    def of(
        cls,
        coefficients: Coefficients,
        setting: Setting,
        trials: Sequence[Observation],
        account: Account,
        links: Links | None,
    ) -> _Problem:
        """The problem of some measured trials."""
        pool = Pool.from_candidates([trial.candidate for trial in trials])
        prepared = prepare(pool, setting, account, links)
        time = np.log([trial.step_time_s or np.nan for trial in trials])
        noise = np.array([_log_noise(trial) for trial in trials])
        before = price_prepared(prepared, coefficients)
        # What lies far outside the interval is mostly the trial's own: another job, a broken link.
        excess = np.abs(time - np.log(before.step_time_s)) - OUTLIER * before.log_sigma
        noise = np.hypot(noise, np.nan_to_num(np.maximum(excess, 0.0)))
        variance = (coefficients.value("model_error") * before.error_scale) ** 2 + noise**2
        outside = 0.0 if setting.on_cpu else coefficients.value("fixed_bytes")
        return cls(
            coefficients,
            prepared,
            time,
            np.where(np.isnan(time), 0.0, 1 / variance),
            np.log([trial.peak_reserved_bytes or np.nan for trial in trials]),
            np.array([trial.oom for trial in trials]),
            float(np.log(max(setting.hardware.memory_bytes - outside, 1.0))),
        )

    def predict(self, log: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Logs of predicted step time and reserved memory, shape (n,) each."""
        prices = price_prepared(self.prepared, self.coefficients.with_logs(log, None))
        return np.log(prices.step_time_s), np.log(prices.reserved_bytes)

    def residuals(self, log: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Residuals and weights, shape (2n,) each; an out-of-memory trial pulls only where it was said to fit."""
        time, memory = self.predict(log)
        target = np.where(self.out, np.maximum(memory, self.capacity), self.peak)
        silent = np.isnan(target) | (self.out & (memory >= self.capacity))
        weight = np.where(silent, 0.0, 1 / MEMORY_SIGMA**2)
        residual = np.nan_to_num(np.concatenate([self.time - time, target - memory]))
        return residual, np.concatenate([self.time_weight, weight])

    def jacobian(self, log: np.ndarray) -> np.ndarray:
        """Derivative of the predicted logs by the coefficients' logs, shape (2n, k)."""
        here = np.concatenate(self.predict(log))
        columns = []
        for k in range(len(log)):
            moved = log.copy()
            moved[k] += STEP
            columns.append((np.concatenate(self.predict(moved)) - here) / STEP)
        return np.array(columns).T


def _loss(residual: np.ndarray, weights: np.ndarray, moved: np.ndarray, precision: np.ndarray) -> float:
    return float((weights * residual) @ residual + moved @ precision @ moved)


def _log_noise(observation: Observation) -> float:
    interval = observation.step_time_ci_s
    if not interval or min(interval) <= 0:
        return 0.0
    return float(np.log(interval[1] / interval[0]) / (2 * 1.96))


def load_coefficients(text: str, setting: Setting) -> Coefficients:
    """Coefficients from their JSON text, refused when they are for other hardware or another framework.

    Raises:
        UserError: the text is no coefficients file, or its key does not match the setting.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"coefficients: no JSON ({error}); delete the file to start from the shipped priors") from None
    coefficients = Coefficients.from_json(values)
    coefficients.check(setting)
    return coefficients


assert "model_error" in NAMES
