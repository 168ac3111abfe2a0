"""Facts of a finished trial beyond its step times: where the traced step went, clocks, recomputed FLOP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.flop import flop_per_token
from search_space.flop import recompute_flop_per_token
from trial_runner.breakdown import break_down
from trial_runner.breakdown import Breakdown
from trial_runner.breakdown import PARTS
from trial_runner.breakdown.ideal import ideal_by_rank
from trial_runner.clocks import read_clocks
from trial_runner.spec import node_clocks
from tuner.study.plan import StudyPlan


def throttled(folder: Path) -> list[str]:
    """``throttled`` where a device of the first node ran below its clocks for a reason other than idling."""
    path = node_clocks(folder, 0)
    try:
        samples = read_clocks(path) if path.exists() else []
    except UserError:
        return []
    return ["throttled"] if any(sample.throttle for sample in samples) else []


def breakdown_of(
    plan: StudyPlan, candidate: Candidate, folder: Path, traces: list[str], step_s: float
) -> dict[str, Any]:
    """The traced step in seven parts, the mean over the traced ranks; empty without a readable trace.

    Args:
        plan: the study's plan.
        candidate: what ran.
        folder: the trial's folder.
        traces: paths of its traces.
        step_s: its measured step time, seconds.
    """
    if not traces:
        return {}
    setting = plan.setting
    clocks = node_clocks(folder, 0)
    try:
        found = break_down(
            [Path(trace) for trace in traces],
            ideal_by_rank_s=ideal_by_rank(setting, candidate),
            measured_step_s=step_s,
            peak_flops=setting.hardware.peak(setting.precision),
            clocks=read_clocks(clocks) if clocks.exists() else None,
        )
    except UserError as error:
        return {"breakdown": None, "breakdown_error": str(error)}
    return {"breakdown": mean_over_ranks(found)}


def mean_over_ranks(found: Breakdown) -> dict[str, Any] | None:
    """One step as the mean over its ranks: still useful + parts + unexplained = step; None without a step."""
    steps = found.steps
    if not steps:
        return None
    count = len(steps)
    return {
        "step_s": sum(step.step_s for step in steps) / count,
        "useful_s": sum(step.useful_s for step in steps) / count,
        "parts_s": {part: sum(step.parts_s[part] for step in steps) / count for part in PARTS},
        "unexplained_s": sum(step.unexplained_s for step in steps) / count,
        "coverage_pct": min(step.coverage_pct for step in steps),
        "ranks": count,
        "warnings": list(found.warnings),
    }


def recompute_share(candidate: Candidate, plan: StudyPlan) -> float:
    """FLOP that activation checkpointing runs again, as a share of the model FLOP.

    Full runs each block's forward again. Selective by operator (torchtitan 0.3.0's SelectiveAC) runs every second
    product of a block again, the output and the up projection, and saves attention. For a memory budget the
    partitioner decides; the square of the share given up is the ledger's account of it.
    """
    shape, seq_len = plan.setting.shape, plan.setting.seq_len
    whole = recompute_flop_per_token(shape, seq_len) / flop_per_token(shape, seq_len)
    match candidate.activation_checkpoint:
        case "full":
            return whole
        case "memory_budget":
            return whole * (1 - candidate.memory_budget) ** 2
        case "selective":
            again = shape.layers * shape.hidden * (shape.value_width + shape.feed_forward_width)
            return 2.0 * again / flop_per_token(shape, seq_len)
    return 0.0
