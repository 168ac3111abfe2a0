"""Ratios from measured pairs: what compilation gains and recomputation costs, against the ledger's own account."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pruning.calibration import Observation
from pruning.coefficients import Coefficients
from pruning.extrapolate import evaluate
from pruning.extrapolate import Ratio
from pruning.extrapolate import RATIO_HELP
from pruning.ledger.prices import Z90
from search_space.candidate import Candidate
from search_space.pool import Pool
from search_space.setting import Setting


PRIOR_SIGMA = 0.3
"""Log standard deviation of a factor on the ledger's account before any pair was measured."""

RANGE = (0.05, 20.0)
"""Factors that are looked at."""

KNOBS = {"compile_factor": "compile", "recompute_factor": "activation_checkpoint"}
"""The knob in which the pairs of each ratio differ."""


def pairs(observations: Sequence[Observation], knob: str) -> list[tuple[Observation, Observation]]:
    """Measured pairs that differ in one knob alone: (without, with), without = eager or no checkpointing."""
    plain = {"compile": False, "activation_checkpoint": "none"}[knob]
    timed = [o for o in observations if o.step_time_s]
    found = []
    for first in timed:
        if getattr(first.candidate, knob) != plain:
            continue
        for second in timed:
            if set(second.candidate.changed(first.candidate)) == {knob}:
                found.append((first, second))
    return found


def measured_ratios(observations: Sequence[Observation], setting: Setting, coefficients: Coefficients) -> list[Ratio]:
    """Factors on the ledger's account of compilation and recomputation, from every pair that differs in it alone.

    For each pair the factor at which the ledger gives the measured ratio of step times is found by bisection; pairs
    are combined with the prior (no correction) by their precision, whose noise is the two step times' own.

    Args:
        observations: measured trials.
        setting: their setting.
        coefficients: the ledger as these trials calibrated it.
    """
    ratios = []
    for name, knob in KNOBS.items():
        weights, logs = [1 / PRIOR_SIGMA**2], [0.0]
        for before, after in pairs(observations, knob):
            found = _solve(name, before.candidate, after.candidate, _log_ratio(before, after), setting, coefficients)
            if found is None:
                continue
            log, slope = found
            sigma = float(np.hypot(_noise(before), _noise(after))) / slope
            weights.append(1 / max(sigma, 1e-3) ** 2)
            logs.append(log)
        if len(logs) == 1:
            continue
        middle = float(np.average(logs, weights=weights))
        spread = Z90 / float(np.sqrt(sum(weights)))
        # Pairs that disagree by more than their noise widen the interval.
        spread = max(spread, Z90 * float(np.std(logs[1:])) / np.sqrt(len(logs) - 1))
        low, value, high = (float(np.exp(middle + move)) for move in (-spread, 0.0, spread))
        text = f"{RATIO_HELP[name]}; {len(logs) - 1} pairs"
        ratios.append(Ratio(name=name, value=value, low=low, high=high, source="measured", unit="ratio", help=text))
    return ratios


def _log_ratio(before: Observation, after: Observation) -> float:
    assert before.step_time_s and after.step_time_s
    return float(np.log(after.step_time_s / before.step_time_s))


def _noise(observation: Observation) -> float:
    interval = observation.step_time_ci_s
    if not interval or min(interval) <= 0:
        return 0.02
    return max(float(np.log(interval[1] / interval[0])) / (2 * 1.96), 1e-3)


def _solve(
    name: str, before: Candidate, after: Candidate, wanted: float, setting: Setting, coefficients: Coefficients
) -> tuple[float, float] | None:
    """Log of the factor at which the pair's predicted log ratio is ``wanted``, and the slope there; None if none."""
    pool = Pool.from_candidates([before, after])

    def ratio(log: float) -> float:
        step = evaluate(pool, setting, coefficients, {name: float(np.exp(log))}).step
        return float(np.log(step[1] / step[0]))

    low, high = np.log(RANGE[0]), np.log(RANGE[1])
    first, last = ratio(low), ratio(high)
    slope_sign = 1.0 if last > first else -1.0
    if abs(last - first) < 1e-6:
        return None
    if (wanted - first) * slope_sign <= 0:
        found = low
    elif (wanted - last) * slope_sign >= 0:
        found = high
    else:
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if (wanted - ratio(middle)) * slope_sign > 0 else (low, middle)
        found = (low + high) / 2
    slope = abs(ratio(found + 0.05) - ratio(found - 0.05)) / 0.1
    return float(found), max(slope, 1e-3)
