"""Expected against found: what is outside its range, why it likely is, and what to change, in the order to act."""

from __future__ import annotations

from collections.abc import Mapping

from search_space.errors import UserError
from trial_runner.breakdown.advice_rules import Evidence
from trial_runner.breakdown.advice_rules import GROUPS
from trial_runner.breakdown.advice_rules import RULES
from trial_runner.breakdown.result import Breakdown
from trial_runner.breakdown.result import Finding
from trial_runner.breakdown.result import PARTS


TOLERANCE = 0.002
"""Share of the step by which a part may be outside its range and still count as inside."""


def compare(breakdown: Breakdown, expected: Mapping[str, tuple[float, float]]) -> list[Finding]:
    """Findings for the parts whose mean over the analysed steps and ranks is outside the expected range.

    A part above its range gets every cause of the rule table for which the traces hold evidence, else the table's
    first cause without asking for evidence. A part below its range is a finding without a cause: the expectation was
    too high. Order: configuration errors, then hardware, then structure; within them the largest excess first.

    Args:
        breakdown: what was found.
        expected: (low, high) by part, seconds.

    Raises:
        UserError: an expected part is none of the seven, or its range is none.
    """
    for part, bounds in expected.items():
        if part not in PARTS:
            raise UserError(f"expected part {part!r}: the parts are {', '.join(PARTS)}")
        if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1]:
            raise UserError(f"expected {part} {bounds!r}: give (low, high) in seconds, 0 <= low <= high")
    if not breakdown.steps:
        return []
    evidence = Evidence(breakdown)
    findings = []
    for part in PARTS:
        if part not in expected:
            continue
        low, high = expected[part]
        found = evidence.mean(part)
        slack = TOLERANCE * evidence.step_s
        if low - slack <= found <= high + slack:
            continue
        if found < low:
            findings.append(
                Finding(
                    part=part,
                    found_s=found,
                    expected_s=(low, high),
                    group="expectation",
                    cause="less time than expected",
                    evidence=f"{found:.4f} s against {low:.4f} to {high:.4f} s",
                    change="nothing to change; the next calibration of the ledger takes the measured value",
                )
            )
            continue
        findings += _causes(part, found, (low, high), evidence)
    order = {group: index for index, group in enumerate(GROUPS)}
    return sorted(findings, key=lambda item: (order[item.group], item.expected_s[1] - item.found_s))


def _causes(part: str, found: float, bounds: tuple[float, float], evidence: Evidence) -> list[Finding]:
    findings = []
    for rule in RULES:
        if rule.part != part:
            continue
        seen = rule.seen(evidence)
        if seen is not None:
            findings.append(
                Finding(
                    part=part,
                    found_s=found,
                    expected_s=bounds,
                    group=rule.group,
                    cause=rule.cause,
                    evidence=seen,
                    change=rule.change,
                )
            )
    if findings:
        return findings
    first = next(rule for rule in RULES if rule.part == part)
    return [
        Finding(
            part=part,
            found_s=found,
            expected_s=bounds,
            group=first.group,
            cause=f"not told by the trace; most often: {first.cause}",
            evidence=f"{found:.4f} s against {bounds[0]:.4f} to {bounds[1]:.4f} s",
            change=first.change,
        )
    ]
