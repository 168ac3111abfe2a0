"""Assessment: rules and ledger over a pool, with every refusal's numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pruning.coefficients import Coefficients
from pruning.ledger.prices import price
from pruning.ledger.prices import Prices
from search_space.hardware import GIB
from search_space.pool import Pool
from search_space.reason import Reason
from search_space.rules import judge
from search_space.rules import Judgement
from search_space.rules import RISKS
from search_space.rules import Rule
from search_space.rules import RULES
from search_space.setting import Setting


MEMORY = "memory"
"""Code of the reason that a candidate does not fit."""


@dataclass(frozen=True)
class Assessment:
    """What the ledger says about a pool."""

    pool: Pool
    """The candidates."""

    setting: Setting
    """What is fixed for all of them."""

    judgement: Judgement
    """The validity rules' outcome."""

    prices: Prices
    """Memory and step time of every candidate."""

    feasible: np.ndarray
    """Legal, and surely needed memory within the device minus the margin; shape (n,) of bool."""

    @property
    def doubtful(self) -> np.ndarray:
        """Feasible candidates whose median memory is above what is allowed: they may not fit; shape (n,) of bool."""
        return np.asarray(self.feasible & (self.prices.memory_bytes > self.allowed_bytes))

    @property
    def allowed_bytes(self) -> float:
        """Device memory that a candidate may use: capacity × (1 - margin)."""
        return self.setting.hardware.memory_bytes * (1 - self.setting.memory_margin)

    def reasons(self, i: int) -> list[Reason]:
        """Every reason against candidate ``i``, validity first; empty when it is feasible."""
        reasons = self.judgement.reasons(self.pool, self.setting, i)
        needed, surely = float(self.prices.memory_bytes[i]), float(self.prices.memory_surely_bytes[i])
        if surely > self.allowed_bytes:
            rank = int(np.nanargmax(self.prices.memory_by_rank_bytes[i]))
            capacity = self.setting.hardware.memory_bytes / GIB
            text = (
                f"needs {needed / GIB:.1f} GiB on pipeline rank {rank} (surely {surely / GIB:.1f}), "
                f"{self.allowed_bytes / GIB:.1f} GiB allowed "
                f"({capacity:.1f} GiB minus a margin of {self.setting.memory_margin:.0%})"
            )
            reasons.append(
                Reason(code=MEMORY, required=needed / GIB, available=self.allowed_bytes / GIB, unit="GiB", text=text)
            )
        return reasons

    def risks(self, i: int) -> list[Reason]:
        """Known unreliable combinations of candidate ``i``; it stays legal, but belongs after its like."""
        one = self.pool.take(np.array([i]))
        risks = judge(one, self.setting, RISKS).reasons(one, self.setting, 0)
        needed, surely = float(self.prices.memory_bytes[i]), float(self.prices.memory_surely_bytes[i])
        if surely <= self.allowed_bytes < needed:
            required, available = needed / GIB, self.allowed_bytes / GIB
            text = f"may run out of memory: {required:.1f} GiB predicted, {available:.1f} GiB allowed"
            risks.append(Reason(code=MEMORY, required=required, available=available, unit="GiB", text=text))
        return risks

    def rejected(self) -> list[dict[str, Any]]:
        """Counts of refused candidates by their first reason, most frequent first, each with one example."""
        over = self.prices.memory_surely_bytes > self.allowed_bytes
        rows = [*self.judgement.violations, over]
        codes = [*(rule.code for rule in self.judgement.rules), MEMORY]
        left = np.ones(len(self.pool), dtype=bool)
        groups = []
        for code, row in zip(codes, rows):
            mine = left & row
            left &= ~row
            if mine.any():
                example = self.pool.candidate(int(np.argmax(mine))).label()
                groups.append({"code": code, "count": int(mine.sum()), "example": example})
        return sorted(groups, key=lambda group: -group["count"])

    def nearest(self, k: int = 3) -> list[int]:
        """Positions of the refused candidates nearest to feasible: fewest reasons, then the smallest excess."""
        refused = np.flatnonzero(~self.feasible)
        broken = self.judgement.violations[:, refused].sum(axis=0)
        ratio = self.prices.memory_surely_bytes[refused] / self.allowed_bytes
        count = broken + (ratio > 1)
        order = np.lexsort((np.where(broken > 0, np.maximum(ratio, 2.0), ratio), count))
        return [int(i) for i in refused[order[:k]]]


def assess(
    pool: Pool,
    setting: Setting,
    coefficients: Coefficients | None = None,
    rules: Sequence[Rule] = RULES,
) -> Assessment:
    """Ask every rule about every candidate, price all of them, and say which fit.

    Args:
        pool: the candidates.
        setting: what is fixed for all of them.
        coefficients: calibrated coefficients; absent: the shipped priors.
        rules: validity rules.

    Raises:
        UserError: the coefficients belong to other hardware or another framework.
    """
    if coefficients is not None:
        coefficients.check(setting)
    judgement = judge(pool, setting, rules)
    prices = price(pool, setting, coefficients)
    fits = prices.memory_surely_bytes <= setting.hardware.memory_bytes * (1 - setting.memory_margin)
    return Assessment(pool, setting, judgement, prices, judgement.legal & fits)
