"""Calibration: few named coefficients with uncertainty, updated by every measured trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
import json
from typing import Any

import numpy as np

from pruning.coefficients import Coefficients
from pruning.coefficients import NAMES
from pruning.coefficients import prior
from pruning.ledger.prices import price
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.pool import Pool
from search_space.setting import Setting


__all__ = ["Coefficients", "Observation", "calibrate", "prior"]

MEMORY_SIGMA = 0.04
"""Log standard deviation of a measured peak that the memory account leaves unexplained."""

STEP = 1e-3
"""Step of the numeric derivative, in log units."""


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


def calibrate(coefficients: Coefficients, setting: Setting, observations: Sequence[Observation]) -> Coefficients:
    """Update coefficients by maximum a posteriori, with a Laplace estimate of what stays uncertain.

    Coefficients are lognormal: Gauss-Newton on their logarithms against the logarithms of measured step times
    (error: the model error and the trial's own interval) and of measured reserved memory. An out-of-memory trial
    counts as a peak of at least the device memory, when the account says less.

    Args:
        coefficients: what is believed so far; they must be for this hardware and framework.
        setting: the study's setting.
        observations: measured trials, each used once.

    Raises:
        UserError: the coefficients belong to other hardware or another framework.
    """
    coefficients.check(setting)
    useful = [o for o in observations if o.step_time_s or o.peak_reserved_bytes or o.oom]
    if not useful:
        return coefficients
    pool = Pool.from_candidates([o.candidate for o in useful])
    start = coefficients.log_values()
    precision = np.linalg.inv(coefficients.covariance())
    sigma_model = coefficients.value("model_error")
    step = np.array([o.step_time_s or np.nan for o in useful])
    noise = np.array([_log_noise(o) for o in useful])
    scale = price(pool, setting, coefficients).error_scale
    weight_time = np.where(np.isnan(step), 0.0, 1.0 / ((sigma_model * scale) ** 2 + noise**2))
    outside = 0.0 if setting.on_cpu else coefficients.value("fixed_bytes")
    capacity = max(setting.hardware.memory_bytes - outside, 1.0)
    peak = np.array([o.peak_reserved_bytes or np.nan for o in useful])
    out = np.array([o.oom for o in useful])
    log = start.copy()
    jacobian, weights = np.zeros((1, len(log))), np.ones(1)
    for _ in range(8):
        time, memory = _predict(coefficients, log, pool, setting)
        target = np.where(out, np.maximum(memory, np.log(capacity)), np.log(peak))
        weight_memory = np.where(np.isnan(target) | (out & (memory >= np.log(capacity))), 0.0, 1 / MEMORY_SIGMA**2)
        columns = []
        for k in range(len(log)):
            moved = log.copy()
            moved[k] += STEP
            time_k, memory_k = _predict(coefficients, moved, pool, setting)
            columns.append(np.concatenate([time_k - time, memory_k - memory]) / STEP)
        jacobian = np.nan_to_num(np.array(columns).T)
        weights = np.concatenate([weight_time, weight_memory])
        residual = np.nan_to_num(np.concatenate([np.log(step) - time, target - memory]))
        left = precision + jacobian.T @ (weights[:, None] * jacobian)
        right = jacobian.T @ (weights * residual) + precision @ (start - log)
        move = np.linalg.solve(left, right)
        log = log + np.clip(move, -1.0, 1.0)
        if np.abs(move).max() < 1e-4:
            break
    covariance = np.linalg.inv(precision + jacobian.T @ (weights[:, None] * jacobian))
    covariance = (covariance + covariance.T) / 2
    updated = coefficients.with_logs(log, covariance)
    measured = weight_time > 0
    if measured.sum():
        prices = price(pool, setting, updated)
        left_over = ((np.log(step) - np.log(prices.step_time_s)) / prices.error_scale)[measured]
        dof = 4.0
        error = np.sqrt((dof * sigma_model**2 + float(left_over @ left_over)) / (dof + measured.sum()))
        updated = updated.with_value("model_error", float(np.clip(error, 0.02, 1.0)))
    return replace(updated, observations=coefficients.observations + len(useful))


def _log_noise(observation: Observation) -> float:
    interval = observation.step_time_ci_s
    if not interval or min(interval) <= 0:
        return 0.0
    return float(np.log(interval[1] / interval[0]) / (2 * 1.96))


def _predict(
    coefficients: Coefficients, log: np.ndarray, pool: Pool, setting: Setting
) -> tuple[np.ndarray, np.ndarray]:
    prices = price(pool, setting, coefficients.with_logs(log, None))
    return np.log(prices.step_time_s), np.log(prices.reserved_bytes)


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
