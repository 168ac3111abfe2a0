"""What a study knows: the ledger's assessment, calibrated by every trial, as the sampler's prior."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import Protocol

import numpy as np
from scipy.stats import norm

from pruning.assess import assess
from pruning.assess import Assessment
from pruning.calibration import calibrate
from pruning.calibration import Observation
from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from pruning.ledger.prices import Prices
from pruning.ledger.prices import Z90
from search_space.candidate import Candidate
from search_space.hardware import GIB
from search_space.pool import Pool
from search_space.sampler import Carried
from search_space.sampler import Prior
from search_space.setting import Setting
from trial_runner.gang import KILL_GRACE_S
from tuner.study.costs import CostModel
from tuner.study.costs import DEFAULT_STARTUP_S
from tuner.study.moves import diagnose
from tuner.study.moves import Diagnosis
from tuner.study.moves import NEAR_BEST
from tuner.study.moves import RAISE


MEMORY_SIGMA = 0.08
"""Log standard deviation of the error of predicted peaks that a pool shares, beyond its coefficients' own."""

OWN_MEMORY_SIGMA = 0.06
"""The same of each candidate's own error."""


class Ledger(Protocol):
    """Who prices a pool and is calibrated by trials."""

    def assess(self, coefficients: Coefficients) -> Assessment:
        """Prices and verdicts of the whole pool."""

    def calibrate(self, start: Coefficients, observations: list[Observation]) -> Coefficients:
        """Coefficients after some trials, all of them counted from ``start``."""


@dataclass(frozen=True)
class SettingLedger:
    """The ledger of one job: one framework account for the whole pool."""

    pool: Pool
    """Every candidate."""

    setting: Setting
    """What is fixed."""

    def assess(self, coefficients: Coefficients) -> Assessment:
        """Prices and verdicts of the whole pool."""
        return assess(self.pool, self.setting, coefficients)

    def calibrate(self, start: Coefficients, observations: list[Observation]) -> Coefficients:
        """Coefficients after some trials, all of them counted from ``start``."""
        return calibrate(start, self.setting, observations)


@dataclass
class Knowledge:
    """Predictions over the pool and how they change as trials come in."""

    pool: Pool
    """Every candidate."""

    setting: Setting
    """What is fixed."""

    costs: CostModel
    """What trials cost."""

    coefficients: Coefficients | None = None
    """Calibrated coefficients; None: the shipped priors."""

    observations: list[Observation] = field(default_factory=list)
    """Every trial that taught something."""

    wall_limit_s: float = float("inf")
    """Candidates whose worst-case wall time exceeds this are not proposed."""

    ledger: Ledger | None = None
    """Who prices the pool; None: the ledger of the setting's own framework."""

    carried: Carried | None = None
    """What earlier studies measured."""

    calibrates: bool = True
    """Whether trials calibrate; strategies that never read predictions need none."""

    def __post_init__(self) -> None:
        self._start = self.coefficients or prior(self.setting)
        self._ledger: Ledger = self.ledger or SettingLedger(self.pool, self.setting)
        self._blocked = np.zeros(len(self.pool), dtype=bool)
        self.assessment: Assessment = self._ledger.assess(self._start)
        self._chance = self._chance_now()
        self.raised: dict[int, Diagnosis] = {}
        """Candidates that breakdowns of measured trials speak for."""

    def start_from(self, coefficients: Coefficients) -> None:
        """Take other coefficients as the start of all calibration: those that a probe observed."""
        self._start = coefficients
        self.coefficients = calibrate(coefficients, self.setting, self.observations)
        self.assessment = assess(self.pool, self.setting, self.coefficients)

    @property
    def feasible(self) -> np.ndarray:
        """Candidates that the ledger and the trials so far leave standing, shape (n,)."""
        return np.asarray(self.assessment.feasible & ~self._blocked)

    def position(self, candidate: Candidate) -> int:
        """Where a candidate stands in the pool.

        Raises:
            KeyError: it is not in the pool.
        """
        found = self.pool.position(candidate)
        if found is None:
            raise KeyError(candidate.label())
        return found

    def observe(self, observation: Observation) -> None:
        """Take in one trial: recalibrate, and after an out-of-memory refuse all that needs as much or more."""
        self.observations.append(observation)
        if observation.oom:
            memory = self.assessment.prices.memory_bytes
            self._blocked |= memory >= memory[self.position(observation.candidate)]
        if self.calibrates:
            self.coefficients = self._ledger.calibrate(self._start, self.observations)
            self.assessment = self._ledger.assess(self.coefficients)
        self._chance = self._chance_now()

    def block(self, candidate: Candidate) -> None:
        """Never propose this candidate again."""
        self._blocked[self.position(candidate)] = True

    def hold(self, candidates: np.ndarray) -> None:
        """Never propose these candidates, shape (n,) of bool: they would fail as one of their like did."""
        self._blocked |= candidates

    def step_high_s(self, candidate: Candidate) -> float:
        """Upper bound of a candidate's step time, seconds; a measured one counts with a half more."""
        for observation in self.observations:
            if observation.candidate == candidate and observation.step_time_s:
                return 1.5 * observation.step_time_s
        return float(self.assessment.prices.step_time_high_s[self.position(candidate)])

    def first_step_s(self, candidate: Candidate) -> float:
        """Bound of the time from placement to the end of the first step, seconds; none before a start-up was seen.

        Never below the bound for an unknown machine: what started fast on a quiet one is not hung on a busy one.
        """
        if not self.costs.seen_s[candidate.compile]:
            return float("inf")
        patience = max(DEFAULT_STARTUP_S[self.costs.device, candidate.compile], self.costs.startup_s(candidate.compile))
        return patience + 3 * self.step_high_s(candidate)

    def worst_s(self, candidate: Candidate) -> float:
        """Worst-case wall time of a candidate's trial, seconds."""
        return self.costs.worst_s(candidate.compile, self.step_high_s(candidate))

    def _worst_s(self) -> np.ndarray:
        """Worst-case wall time of every candidate, seconds, shape (n,)."""
        high = self.assessment.prices.step_time_high_s
        compiled = self.pool["compile"].astype(bool)
        startup = np.where(compiled, self.costs.startup_s(True), self.costs.startup_s(False))
        worst = startup + self.costs.steps * high + KILL_GRACE_S
        timeout = self.costs.measure.timeout_s
        return np.asarray(np.minimum(worst, timeout) if timeout else worst)

    def prior(self) -> Prior:
        """Predictions for the sampler."""
        prices = self.assessment.prices
        compiled = self.pool["compile"].astype(bool)
        startup = np.where(compiled, self.costs.expected_s(True, 0.0), self.costs.expected_s(False, 0.0))
        return Prior(
            log_step_time=np.log(prices.step_time_s),
            sigma=prices.log_sigma,
            cost=startup + self.costs.steps * prices.step_time_s,
            allowed=self.feasible & (self._worst_s() <= self.wall_limit_s),
            chance=self._chance,
            favour=self._favour(),
            carried=self.carried,
            failed_cost=startup,
        )

    def diagnose(self, record: dict[str, Any], best_s: float) -> None:
        """Raise the neighbours that a measured trial's breakdown speaks for, if the trial is near the best."""
        if record["step_time_s"] > NEAR_BEST * best_s:
            return
        allowed = self.assessment.allowed_bytes
        spare = 1.0 if self.setting.on_cpu else 1 - (record["peak_reserved_gib"] or 0.0) * GIB / allowed
        self.raised = diagnose(record, self.pool, spare) | self.raised

    def _favour(self) -> np.ndarray | None:
        if not self.raised:
            return None
        found = np.ones(len(self.pool))
        found[list(self.raised)] = RAISE
        return found

    def _chance_now(self) -> np.ndarray:
        """Probability that each candidate fits in memory, after what ran and what did not, shape (n,)."""
        ran = [self.position(o.candidate) for o in self.observations if not o.oom]
        out = [self.position(o.candidate) for o in self.observations if o.oom]
        return chance_to_fit(self.assessment.prices, self.setting, ran, out)

    def predicted(self, candidate: Candidate) -> dict[str, object]:
        """The ledger's prediction for a candidate, for the record beside what is measured."""
        i, prices = self.position(candidate), self.assessment.prices
        ideal = float(prices.ideal_s[i] if np.ndim(prices.ideal_s) else prices.ideal_s)
        return {
            "step_time_s": float(prices.step_time_s[i]),
            "step_time_interval_s": [float(prices.step_time_low_s[i]), float(prices.step_time_high_s[i])],
            "mfu_pct": 100 * ideal / float(prices.step_time_s[i]),
            "memory_gib": float(prices.memory_bytes[i]) / GIB,
            "parts_s": {name: float(values[i]) for name, values in prices.parts_s.items()},
            "ideal_s": ideal,
        }


def chance_to_fit(
    prices: Prices, setting: Setting, ran: Sequence[int] = (), out_of_memory: Sequence[int] = ()
) -> np.ndarray:
    """Probability that each candidate fits in the device's memory, shape (n,); where memory is the host's, 1.

    The true peak is the predicted one times two lognormal errors: one that the whole pool shares, and each candidate's
    own. Trials that ran or ran out of memory tell the shared one apart, by Bayes' rule on a grid.

    Args:
        prices: predictions over the pool.
        setting: what is fixed.
        ran: positions of the trials that fitted.
        out_of_memory: positions of the trials that did not.
    """
    if setting.on_cpu:
        return np.ones(len(prices))
    needed = np.maximum(prices.memory_bytes, 1.0)
    spread = np.log(np.maximum(prices.memory_high_bytes, 1.0) / needed) / Z90
    room = np.log(setting.hardware.memory_bytes / needed)
    shared = float(np.hypot(MEMORY_SIGMA, np.median(spread)))
    grid = np.linspace(-4 * shared, 4 * shared, 81)
    belief = norm.logpdf(grid, scale=shared)
    for positions, sign in ((ran, 1.0), (out_of_memory, -1.0)):
        known = room[np.asarray(positions, dtype=int)]
        belief = belief + norm.logcdf(sign * (known[:, None] - grid) / OWN_MEMORY_SIGMA).sum(axis=0)
    weights = np.exp(belief - belief.max())
    weights /= weights.sum()
    # The chance depends on the room alone: a table of it serves a million candidates.
    edge = 6 * (shared + OWN_MEMORY_SIGMA)
    table = np.linspace(-edge, edge, 401)
    fits = norm.cdf((table[:, None] - grid[None, :]) / OWN_MEMORY_SIGMA) @ weights
    return np.asarray(np.interp(room, table, fits))
