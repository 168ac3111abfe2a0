"""Where the missing MFU points went: budget against measured, part by part, in the order to fix.

The table of the second seed document, chapter 6, section 9. With a trace (or stated parts) every over-run is measured;
from the MFU alone only what the ledger's own doubt makes likely can be said, and that is said.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import numpy as np

from pruning.coefficients import Coefficients
from pruning.coefficients import NAMES
from pruning.extrapolate import evaluate
from pruning.extrapolate import extrapolate
from pruning.extrapolate import Extrapolation
from pruning.extrapolate import Ratio
from pruning.ledger.prices import PARTS
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.pool import Pool
from search_space.setting import Setting
from trial_runner.breakdown.advice_rules import GROUPS
from trial_runner.breakdown.advice_rules import RULES
from trial_runner.breakdown.result import Breakdown
from trial_runner.breakdown.result import Finding


OTHER = "unexplained"
"""The row of what no part holds: a budget's reserve, and what a trace leaves unexplained."""

ROWS = (*PARTS, OTHER)
"""Rows of the table."""

SMALL = 0.002
"""Share of the step below which an over-run is nothing to fix."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a candidate should take."""

    ideal_s: float
    """Ideal step time."""

    parts_s: dict[str, float]
    """Seconds by row."""

    low_s: dict[str, float]
    """Lower ends of their 90% intervals."""

    high_s: dict[str, float]
    """Upper ends."""

    step_interval_s: tuple[float, float]
    """90% interval of the step."""

    likely_s: dict[str, float]
    """Seconds of each row when the step takes one second more, by the ledger's doubt; they add up to 1."""

    at_most_s: dict[str, float]
    """Seconds that a row can take at most, where something bounds it."""

    @property
    def step_s(self) -> float:
        """Ideal and all rows."""
        return self.ideal_s + sum(self.parts_s.values())


def budget_of(candidate: Candidate, setting: Setting, coefficients: Coefficients, ratios: Sequence[Ratio]) -> Budget:
    """The budget of a candidate, with what the ledger doubts about it.

    Args:
        candidate: what runs.
        setting: where.
        coefficients: the ledger's.
        ratios: stated by hand, or measured.
    """
    pool = Pool.from_candidates([candidate])
    found = extrapolate(pool, setting, coefficients, ratios)
    parts = {part: float(found.median.seconds[part][0]) for part in PARTS}
    # A wide prior allows kernels faster than the peak; time lost to them cannot be negative.
    ends = [
        {part: max(0.0, float(side[part][0])) for part in PARTS} | {OTHER: max(0.0, float(side["reserve"][0]))}
        for side in (found.low, found.high)
    ]
    return Budget(
        ideal_s=found.ideal_s,
        parts_s=parts | {OTHER: float(found.median.reserve[0])},
        low_s=ends[0],
        high_s=ends[1],
        step_interval_s=(float(found.low["step"][0]), float(found.high["step"][0])),
        likely_s=_likely(found, coefficients, ratios),
        at_most_s=_at_most(candidate, setting, coefficients, ratios),
    )


def _likely(found: Extrapolation, coefficients: Coefficients, ratios: Sequence[Ratio]) -> dict[str, float]:
    """Cov(part, step) / Var(step) over the ledger's doubt; the rows add up to 1."""
    rows = {part: 0.0 for part in ROWS}
    variance = 0.0
    for _, moves in found.moves:
        step = sum(moves.values())
        variance += step**2
        for key, move in moves.items():
            rows[OTHER if key == "reserve" else key] += move * step
    if not any(ratio.name == "reserve" for ratio in ratios):
        own = (coefficients.value("model_error") * float(found.median.error[0]) * float(found.median.step[0])) ** 2
        variance += own
        rows[OTHER] += own
    return {part: value / variance for part, value in rows.items()} if variance else rows | {OTHER: 1.0}


def _at_most(
    candidate: Candidate, setting: Setting, coefficients: Coefficients, ratios: Sequence[Ratio]
) -> dict[str, float]:
    """Seconds of communication with nothing hidden, of recomputing all blocks, and of launches without compilation."""
    own = {ratio.name: ratio.value for ratio in ratios if ratio.name not in ("data_tail_s", "reserve")}
    known = {name: value for name, value in own.items() if name in NAMES}
    base = coefficients
    for name, value in known.items():
        base = base.with_value(name, max(value, 1e-12))
    rest = {name: value for name, value in own.items() if name not in known}
    bare = base
    for name in ("tensor_exposed", "data_exposed", "pipeline_exposed"):
        bare = bare.with_value(name, 1.0)
    tried = {
        "exposed_communication": (candidate, bare),
        "recompute": (replace(candidate, activation_checkpoint="full"), base),
        "cpu_launch": (replace(candidate, compile=False, async_tp=False), base),
    }
    found = {}
    for part, (other, used) in tried.items():
        found[part] = float(evaluate(Pool.from_candidates([other]), setting, used, rest).seconds[part][0])
    return found


def table(budget: Budget, measured: Mapping[str, float], findings: Sequence[Finding] = ()) -> list[dict[str, Any]]:
    """Rows in the order to fix: configuration, hardware, structure; within them the largest over-run first.

    A row's MFU points are 100 · ideal · over / (budget · measured), exactly its share of the gap: they add up.

    Args:
        budget: what was expected.
        measured: seconds by row, all of :data:`ROWS`; with the ideal time they are the measured step.
        findings: causes with evidence, from traces.
    """
    step = budget.ideal_s + sum(measured[row] for row in ROWS)
    rows = []
    for row in ROWS:
        over = measured[row] - budget.parts_s[row]
        entry: dict[str, Any] = {
            "part": row,
            "budget_s": budget.parts_s[row],
            "budget_interval_s": [budget.low_s[row], budget.high_s[row]],
            "measured_s": measured[row],
            "over_s": over,
            "mfu_points": 100 * budget.ideal_s * over / (budget.step_s * step),
            "outside": measured[row] > budget.high_s[row] + SMALL * step,
        }
        rows.append(entry | _cause(row, over > SMALL * step, findings))
    order = {group: i for i, group in enumerate((*GROUPS, ""))}
    return sorted(rows, key=lambda entry: (order[entry["group"]], -entry["over_s"]))


def _cause(row: str, over: bool, findings: Sequence[Finding]) -> dict[str, Any]:
    if not over:
        return {"group": "", "cause": "", "evidence": "", "remedy": ""}
    if row == OTHER:
        return {
            "group": "expectation",
            "cause": "no part holds it",
            "evidence": "",
            "remedy": "traces of more ranks, taken with shapes (`tune breakdown`)",
        }
    mine = [finding for finding in findings if finding.part == row]
    if mine:
        first = mine[0]
        cause = "; ".join(finding.cause for finding in mine)
        evidence = "; ".join(finding.evidence for finding in mine)
        return {"group": first.group, "cause": cause, "evidence": evidence, "remedy": first.change}
    rule = next(rule for rule in RULES if rule.part == row)
    return {"group": rule.group, "cause": f"most often: {rule.cause}", "evidence": "", "remedy": rule.change}


def from_mfu(budget: Budget, step_s: float) -> dict[str, float]:
    """Rows of a step of which only its length is known: the budget, and the gap where the ledger doubts itself most.

    What a bound forbids goes to the unexplained row.
    """
    gap = step_s - budget.step_s
    rows = {row: budget.parts_s[row] + gap * budget.likely_s[row] for row in ROWS}
    for part in PARTS:
        least = -np.inf if part == "kernel_efficiency" else 0.0
        most = budget.at_most_s.get(part, np.inf) if gap > 0 else np.inf
        kept = float(np.clip(rows[part], least, max(most, budget.parts_s[part])))
        rows[OTHER] += rows[part] - kept
        rows[part] = kept
    return rows


def from_parts(budget: Budget, parts: Mapping[str, float], step_s: float | None) -> dict[str, float]:
    """Rows from parts that somebody read off a trace; what is missing to the step is unexplained.

    Raises:
        UserError: a name is no part, or the parts and the ideal time exceed the step.
    """
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise UserError(f"--parts: unknown {', '.join(unknown)}; the parts are {', '.join(PARTS)}")
    rows = {part: float(parts.get(part, budget.parts_s[part])) for part in PARTS}
    whole = budget.ideal_s + sum(rows.values())
    rest = 0.0 if step_s is None else step_s - whole
    if step_s is not None and rest < -0.001 * step_s:
        raise UserError(f"--parts: ideal time and parts add up to {whole:.4g} s, more than the step of {step_s:.4g} s")
    return rows | {OTHER: rest}


def from_trace(budget: Budget, found: Breakdown, step_s: float | None) -> dict[str, float]:
    """Rows as the mean over traced steps and ranks; with a measured step the profiler's overhead is taken out.

    Traced pipeline ranks may have more or less work than the mean rank: the difference counts as kernel time.

    Raises:
        UserError: the trace holds no step.
    """
    if not found.steps:
        raise UserError("--trace: no complete step in it")
    count = len(found.steps)
    rows = {}
    for part in PARTS:
        rows[part] = sum((one.scaled_parts_s or one.parts_s)[part] for one in found.steps) / count
    useful = sum(one.useful_s for one in found.steps) / count
    rows["kernel_efficiency"] += useful - budget.ideal_s
    whole = sum(one.step_s for one in found.steps) / count if step_s is None else step_s
    return rows | {OTHER: whole - budget.ideal_s - sum(rows.values())}
