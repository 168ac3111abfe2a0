"""What a trial will cost: expected, and at worst."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field

from search_space.job import MeasureSection
from trial_runner.gang import KILL_GRACE_S


DEFAULT_STARTUP_S = {("cpu", False): 40.0, ("cpu", True): 120.0, ("gpu", False): 180.0, ("gpu", True): 420.0}
"""Upper bound of start-up (placement to the end of the first step) by device and compile, before any is known."""

SAFETY = 1.3
"""Learned upper bounds are this much above the largest start-up seen."""

TRACE_STEPS = 6.0
"""What the profiler's two steps and writing the trace cost, in steps."""


@dataclass
class CostModel:
    """Costs in seconds of wall time; device-seconds are these × devices held."""

    device: str
    """``cpu`` or ``gpu``."""

    measure: MeasureSection
    """Step counts and the job's own bounds."""

    seen_s: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    """Start-up seconds of finished trials, by whether they compiled."""

    crowd: int = 1
    """Gangs that may start on one node at once: each then takes that much longer than one that starts alone."""

    def learn(self, compiled: bool, startup_s: float) -> None:
        """Take in the start-up of a finished trial."""
        self.seen_s[compiled].append(startup_s)

    def startup_s(self, compiled: bool) -> float:
        """Upper bound of start-up."""
        if self.measure.startup_s:
            return self.measure.startup_s
        seen = self.seen_s[compiled]
        return self.crowd * (SAFETY * max(seen) + 2 if seen else DEFAULT_STARTUP_S[self.device, compiled])

    @property
    def steps(self) -> float:
        """Steps of a trial, the trace counted as some."""
        return self.measure.warmup_steps + self.measure.steps + (TRACE_STEPS if self.measure.trace else 0)

    def worst_s(self, compiled: bool, step_high_s: float) -> float:
        """Worst case: start-up bound + steps × the step time's upper bound + the kill grace."""
        worst = self.startup_s(compiled) + self.steps * step_high_s + KILL_GRACE_S
        return min(worst, self.measure.timeout_s) if self.measure.timeout_s else worst

    def expected_s(self, compiled: bool, step_s: float) -> float:
        """Expected cost, for choosing between candidates."""
        seen = self.seen_s[compiled]
        startup = sum(seen) / len(seen) if seen else DEFAULT_STARTUP_S[self.device, compiled] / 2
        return startup + self.steps * step_s
