"""Coefficients fitted on measured rows of many settings at once, with what a left-out group takes away again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace

import numpy as np

from pruning.accounts.account import Account
from pruning.coefficients import Coefficients
from pruning.coefficients import INDEX
from pruning.coefficients import NAMES
from pruning.ledger.prices import price
from pruning.ledger.prices import Prices
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

    time: np.ndarray
    """Log of measured step times; NaN where not measured, shape (n,)."""

    memory: np.ndarray
    """Log of measured peak memory; NaN where not measured or unusable, shape (n,)."""

    allocated: bool
    """Whether ``memory`` is allocated, not reserved."""

    rank: int | None
    """Pipeline rank that the memory was read on (-1: the last one); None: the worst."""


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

    squares: list[float]
    """Each block's sum of squared log step-time residuals."""

    counts: list[int]
    """Each block's measured step times."""

    def without(self, blocks: Sequence[int]) -> Coefficients:
        """Coefficients as if the blocks had not been measured: one Newton step away from the common fit."""
        precision, pull = self.precision.copy(), np.zeros(len(self.log))
        squares, count = sum(self.squares), sum(self.counts)
        for i in blocks:
            precision -= self.information[i]
            pull += self.pull[i]
            squares -= self.squares[i]
            count -= self.counts[i]
        log = self.log - np.linalg.solve(precision, pull)
        covariance = np.linalg.inv(precision)
        error = self.start.value("model_error")
        spread = np.sqrt((4 * error**2 + max(squares, 0.0)) / (4 + max(count, 0)))
        moved = self.start.with_logs(log, (covariance + covariance.T) / 2)
        return moved.with_value("model_error", float(np.clip(spread, 0.03, 1.0)))


def predict(block: Block, coefficients: Coefficients) -> tuple[np.ndarray, np.ndarray, Prices]:
    """Logs of predicted step time and memory of a block's rows, and all prices."""
    prices = price(block.pool, block.setting, coefficients, block.account)
    return np.log(prices.step_time_s), np.log(np.maximum(memory_like_measured(block, prices, coefficients), 1.0)), prices


def memory_like_measured(block: Block, prices: Prices, coefficients: Coefficients) -> np.ndarray:
    """Predicted memory in the terms that the table measured: allocated or reserved, on its rank; shape (n,)."""
    if block.rank is None:
        reserved = prices.reserved_bytes
    else:
        last = block.pool["pipeline_parallel"].astype(int) - 1 if block.rank < 0 else block.rank
        device = prices.memory_by_rank_bytes[np.arange(len(block.pool)), last]
        reserved = device - (prices.memory_bytes - prices.reserved_bytes)
    return reserved / coefficients.value("reserved_factor") if block.allocated else reserved


def fit(start: Coefficients, blocks: Sequence[Block], rounds: int = 10) -> Fit:
    """Maximum a posteriori over all blocks by Gauss-Newton with Huber weights.

    Args:
        start: prior coefficients.
        blocks: measured rows.
        rounds: most iterations.
    """
    prior_precision = np.linalg.inv(start.covariance())
    first = start.log_values()
    log = first.copy()
    frozen = INDEX["model_error"]
    damping = 1e-3
    information: list[np.ndarray] = []
    pull: list[np.ndarray] = []
    squares: list[float] = []
    counts: list[int] = []
    for _ in range(rounds):
        information, pull, squares, counts = [], [], [], []
        for block in blocks:
            jacobian, residual, weight, timed = _linearise(start, log, block, frozen)
            information.append(jacobian.T @ (weight[:, None] * jacobian))
            pull.append(jacobian.T @ (weight * residual))
            squares.append(float(np.sum(np.minimum(residual[timed] ** 2, (3 * TIME_SIGMA) ** 2))))
            counts.append(int(timed.sum()))
        precision = prior_precision + sum(information, np.zeros_like(prior_precision))
        right = sum(pull, np.zeros(len(log))) + prior_precision @ (first - log)
        move = np.linalg.solve(precision + damping * np.diag(np.diag(precision)), right)
        log = log + np.clip(move, -0.5, 0.5)
        if np.abs(move).max() < 5e-3:
            break
    precision = prior_precision + sum(information, np.zeros_like(prior_precision))
    return Fit(start, log, precision, pull, information, squares, counts)


def _linearise(
    start: Coefficients, log: np.ndarray, block: Block, frozen: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Jacobian, residuals, weights and mask of step times of one block; rows with nothing measured are dropped."""
    here = start.with_logs(log, None)
    time, memory, _ = predict(block, here)
    columns = []
    for k in range(len(NAMES)):
        if k == frozen:
            columns.append(np.zeros(2 * len(time)))
            continue
        moved = log.copy()
        moved[k] += STEP
        time_k, memory_k, _ = predict(block, start.with_logs(moved, None))
        columns.append(np.concatenate([time_k - time, memory_k - memory]) / STEP)
    residual = np.concatenate([block.time - time, block.memory - memory])
    sigma = np.concatenate([np.full(len(time), TIME_SIGMA), np.full(len(time), MEMORY_SIGMA)])
    keep = ~np.isnan(residual)
    scaled = np.abs(residual[keep]) / sigma[keep]
    weight = np.minimum(1.0, HUBER / np.maximum(scaled, 1e-9)) / sigma[keep] ** 2
    timed = np.concatenate([np.ones(len(time), dtype=bool), np.zeros(len(time), dtype=bool)])[keep]
    return np.array(columns).T[keep], residual[keep], weight, timed


def widened(start: Coefficients, factor: float) -> Coefficients:
    """The same medians with larger prior uncertainty, for fits over frameworks that the priors were not made for."""
    covariance = start.covariance() * factor**2
    return replace(start, log_covariance=tuple(tuple(map(float, row)) for row in covariance))
