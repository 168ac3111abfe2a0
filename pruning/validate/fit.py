"""Coefficients fitted on measured rows of many settings at once, with what a left-out group takes away again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from functools import cached_property

import numpy as np

from pruning.accounts.account import Account
from pruning.coefficients import Coefficients
from pruning.coefficients import INDEX
from pruning.coefficients import NAMES
from pruning.ledger.layout import Links
from pruning.ledger.prices import prepare
from pruning.ledger.prices import Prepared
from pruning.ledger.prices import price_prepared
from pruning.ledger.prices import Prices
from pruning.ledger.prices import Z90
from search_space.pool import Pool
from search_space.setting import Setting


TIME_SIGMA = 0.12
"""Log standard deviation of a step time that no coefficient explains, while fitting."""

MEMORY_SIGMA = 0.08
"""The same of a peak memory."""

HUBER = 2.0
"""Residuals beyond so many standard deviations count linearly, so that single rows do not steer the fit."""

STEP = 1e-2
"""Step of the numeric derivative, log units."""


@dataclass(frozen=True)
class Block:
    """Rows of one setting and one set of habits."""

    setting: Setting
    """What the rows have in common."""

    account: Account
    """Their framework's habits."""

    pool: Pool
    """Their candidates."""

    links: Links
    """Their bandwidths inside a node and of the network, bytes/s, shape (n,) each."""

    time: np.ndarray
    """Log of measured step times; NaN where not measured, shape (n,)."""

    memory: np.ndarray
    """Log of measured peak memory; NaN where not measured or unusable, shape (n,)."""

    allocated: bool
    """Whether ``memory`` is allocated, not reserved."""

    rank: int | None
    """Pipeline rank that the memory was read on (-1: the last one); None: the worst."""

    @cached_property
    def prepared(self) -> Prepared:
        """What of the rows' prices does not depend on coefficients."""
        return prepare(self.pool, self.setting, self.account, self.links)

    def take(self, keep: np.ndarray) -> Block:
        """The rows at ``keep`` (positions or a mask)."""
        return replace(
            self,
            pool=self.pool.take(keep),
            links=(self.links[0][keep], self.links[1][keep]),
            time=self.time[keep],
            memory=self.memory[keep],
        )


@dataclass(frozen=True)
class Fit:
    """Fitted logs with the normal equations of every block, so that one block can be taken out again."""

    start: Coefficients
    """The prior."""

    log: np.ndarray
    """Logs of the fitted values, shape (k,)."""

    precision: np.ndarray
    """Prior precision plus all blocks' information, shape (k, k)."""

    pull: list[np.ndarray]
    """Each block's weighted residual pull, shape (k,)."""

    information: list[np.ndarray]
    """Each block's information, shape (k, k)."""

    errors: list[np.ndarray]
    """Each block's log step-time residuals over their scale, absolute."""

    def without(self, blocks: Sequence[int]) -> Coefficients:
        """Coefficients as if the blocks had not been measured: one Newton step away from the common fit."""
        precision, pull = self.precision.copy(), np.zeros(len(self.log))
        left = [errors for i, errors in enumerate(self.errors) if i not in set(blocks)]
        for i in blocks:
            precision -= self.information[i]
            pull += self.pull[i]
        log = self.log - np.linalg.solve(precision, pull)
        covariance = np.linalg.inv(precision)
        moved = self.start.with_logs(log, (covariance + covariance.T) / 2)
        return moved.with_value("model_error", spread_of(np.concatenate(left or [np.zeros(0)]), self.start))


def spread_of(errors: np.ndarray, start: Coefficients) -> float:
    """The model error at which 85% of absolute scaled residuals lie within a 90% interval: the tails.

    Few residuals are filled up with the prior's own: four pseudo-observations at its 90% point.
    """
    prior_error = start.value("model_error")
    filled = np.concatenate([errors, np.full(4, prior_error * Z90)])
    return float(np.clip(np.quantile(filled, 0.85) / Z90, 0.02, 1.0))


def predict(block: Block, coefficients: Coefficients) -> tuple[np.ndarray, np.ndarray, Prices]:
    """Logs of predicted step time and memory of a block's rows, and all prices."""
    prices = price_prepared(block.prepared, coefficients)
    return (
        np.log(prices.step_time_s),
        np.log(np.maximum(memory_like_measured(block, prices, coefficients), 1.0)),
        prices,
    )


def memory_like_measured(block: Block, prices: Prices, coefficients: Coefficients) -> np.ndarray:
    """Predicted memory in the terms that the table measured: allocated or reserved, on its rank; shape (n,)."""
    if block.rank is None:
        reserved = prices.reserved_bytes
    else:
        last = block.pool["pipeline_parallel"].astype(int) - 1 if block.rank < 0 else block.rank
        device = prices.memory_by_rank_bytes[np.arange(len(block.pool)), last]
        reserved = device - (prices.memory_bytes - prices.reserved_bytes)
    return reserved / coefficients.value("reserved_factor") if block.allocated else reserved


def fit(start: Coefficients, blocks: Sequence[Block], rounds: int = 25) -> Fit:
    """Maximum a posteriori over all blocks by Levenberg-Marquardt with Huber weights.

    Args:
        start: prior coefficients.
        blocks: measured rows.
        rounds: most iterations.
    """
    prior_precision = np.linalg.inv(start.covariance())
    first = start.log_values()
    damping, frozen = 1e-2, INDEX["model_error"]
    log = _best_start(start, blocks, prior_precision)
    lines = [_linearise(start, log, block, frozen) for block in blocks]
    loss = _loss(lines, log - first, prior_precision)
    for _ in range(rounds):
        information = [line.jacobian.T @ (line.weight[:, None] * line.jacobian) for line in lines]
        pull = [line.jacobian.T @ (line.weight * line.residual) for line in lines]
        precision = prior_precision + sum(information, np.zeros_like(prior_precision))
        right = sum(pull, np.zeros(len(log))) + prior_precision @ (first - log)
        move = np.linalg.solve(precision + damping * np.diag(np.diag(precision)), right)
        move = move * min(1.0, 1.0 / np.abs(move).max())
        shown = [_residuals(start.with_logs(log + move, None), block) for block in blocks]
        tried = _loss(shown, log + move - first, prior_precision)
        if tried < loss:
            log, damping = log + move, damping / 4
            gained, loss = loss - tried, tried
            lines = [_linearise(start, log, block, frozen) for block in blocks]
            if gained < 1e-4 * loss or np.abs(move).max() < 3e-3:
                break
        else:
            damping = max(damping, 1e-3) * 6
            if damping > 1e4:
                break
    information = [line.jacobian.T @ (line.weight[:, None] * line.jacobian) for line in lines]
    pull = [line.jacobian.T @ (line.weight * line.residual) for line in lines]
    errors = [np.abs(line.residual[line.timed]) / line.scale for line in lines]
    precision = prior_precision + sum(information, np.zeros_like(prior_precision))
    return Fit(start, log, precision, pull, information, errors)


HOSTS: tuple[dict[str, float], ...] = (
    {},
    {"launch_s": 6.0},
    {"launch_s": 6.0, "pipeline_host": 2.0, "host_growth": 5.0, "network_host": 2.5},
)
"""Factors on the priors that a fit may start from: host time has no slope where devices are the slower side."""


def _best_start(start: Coefficients, blocks: Sequence[Block], prior_precision: np.ndarray) -> np.ndarray:
    """Logs of the start with the smallest loss."""
    first = start.log_values()
    best, lowest = first, np.inf
    for factors in HOSTS:
        log = first.copy()
        for name, factor in factors.items():
            log[INDEX[name]] += np.log(factor)
        lines = [_residuals(start.with_logs(log, None), block) for block in blocks]
        loss = _loss(lines, log - first, prior_precision)
        if loss < lowest:
            best, lowest = log, loss
    return best


@dataclass(frozen=True)
class _Line:
    """Residuals of one block's measured quantities at some coefficients; rows with nothing measured are dropped."""

    residual: np.ndarray
    """Measured minus predicted logs, step times first, shape (r,)."""

    sigma: np.ndarray
    """Their standard deviations, shape (r,)."""

    timed: np.ndarray
    """Mask of the step times, shape (r,)."""

    scale: np.ndarray
    """Error scale of the step times, shape (timed rows,)."""

    jacobian: np.ndarray
    """Derivative of the predicted logs by the logs of the coefficients, shape (r, k); empty when not asked."""

    @property
    def weight(self) -> np.ndarray:
        """Huber weights over variances, shape (r,)."""
        scaled = np.abs(self.residual) / self.sigma
        return np.asarray(np.minimum(1.0, HUBER / np.maximum(scaled, 1e-9)) / self.sigma**2)


def _loss(lines: Sequence[_Line], moved: np.ndarray, prior_precision: np.ndarray) -> float:
    total = float(moved @ prior_precision @ moved)
    for line in lines:
        scaled = np.abs(line.residual) / line.sigma
        total += float(np.where(scaled < HUBER, scaled**2, 2 * HUBER * scaled - HUBER**2).sum())
    return total


def _residuals(coefficients: Coefficients, block: Block) -> _Line:
    time, memory, prices = predict(block, coefficients)
    residual = np.concatenate([block.time - time, block.memory - memory])
    keep = ~np.isnan(residual)
    sigma = np.repeat([TIME_SIGMA, MEMORY_SIGMA], len(time))
    timed = np.repeat([True, False], len(time))
    scale = prices.error_scale[~np.isnan(block.time)]
    return _Line(residual[keep], sigma[keep], timed[keep], scale, np.zeros((int(keep.sum()), 0)))


def _linearise(start: Coefficients, log: np.ndarray, block: Block, frozen: int) -> _Line:
    here = _residuals(start.with_logs(log, None), block)
    columns = []
    for k in range(len(NAMES)):
        if k == frozen:
            columns.append(np.zeros(len(here.residual)))
            continue
        moved = log.copy()
        moved[k] += STEP
        there = _residuals(start.with_logs(moved, None), block)
        columns.append((here.residual - there.residual) / STEP)
    return replace(here, jacobian=np.array(columns).T)


def widened(start: Coefficients, factor: float) -> Coefficients:
    """The same medians with larger prior uncertainty, for fits over frameworks that the priors were not made for."""
    covariance = start.covariance() * factor**2
    return replace(start, log_covariance=tuple(tuple(map(float, row)) for row in covariance))
