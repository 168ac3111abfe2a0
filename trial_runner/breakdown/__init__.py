"""The MFU breakdown: where the time of a step went, in seven parts that add up to the step."""

from __future__ import annotations

from trial_runner.breakdown.analyse import break_down
from trial_runner.breakdown.result import Breakdown
from trial_runner.breakdown.result import PARTS
from trial_runner.breakdown.result import StepBreakdown
from trial_runner.breakdown.stream import TraceError


__all__ = ["break_down", "Breakdown", "PARTS", "StepBreakdown", "TraceError"]
