"""What a study knows: the ledger's assessment, calibrated by every trial, as the sampler's prior."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field

import numpy as np

from pruning.assess import assess
from pruning.assess import Assessment
from pruning.calibration import calibrate
from pruning.calibration import Observation
from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from search_space.candidate import Candidate
from search_space.hardware import GIB
from search_space.pool import Pool
from search_space.sampler import Prior
from search_space.setting import Setting
from trial_runner.gang import KILL_GRACE_S
from tuner.study.costs import CostModel


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

    def __post_init__(self) -> None:
        self._start = self.coefficients or prior(self.setting)
        self._positions = {candidate.key(): i for i, candidate in enumerate(self.pool.candidates())}
        self._blocked = np.zeros(len(self.pool), dtype=bool)
        self.assessment: Assessment = assess(self.pool, self.setting, self._start)

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
        return self._positions[candidate.key()]

    def observe(self, observation: Observation) -> None:
        """Take in one trial: recalibrate, and after an out-of-memory refuse all that needs as much or more."""
        self.observations.append(observation)
        if observation.oom:
            memory = self.assessment.prices.memory_bytes
            self._blocked |= memory >= memory[self.position(observation.candidate)]
        self.coefficients = calibrate(self._start, self.setting, self.observations)
        self.assessment = assess(self.pool, self.setting, self.coefficients)

    def block(self, candidate: Candidate) -> None:
        """Never propose this candidate again."""
        self._blocked[self.position(candidate)] = True

    def step_high_s(self, candidate: Candidate) -> float:
        """Upper bound of a candidate's step time, seconds; a measured one counts with a half more."""
        for observation in self.observations:
            if observation.candidate == candidate and observation.step_time_s:
                return 1.5 * observation.step_time_s
        return float(self.assessment.prices.step_time_high_s[self.position(candidate)])

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
        )

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
