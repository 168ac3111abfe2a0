"""What a small run cannot tell about a large one, in sentences with what would tell it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pruning.extrapolate import Ratio
from search_space.setting import Setting
from tuner.evidence.small_run import SmallRun


DIMENSIONS = {
    "tensor_parallel": ("tensor parallelism", "tensor_exposed"),
    "pipeline_parallel": ("a pipeline", "pipeline_exposed"),
    "context_parallel": ("context parallelism", None),
    "expert_parallel": ("expert parallelism", None),
}
"""Kinds of parallelism that a small run may or may not have tried, and the ratio that would speak in its place."""

WEIGHS = 0.02
"""Share of the step that a ratio's interval must move to be worth naming."""


def unknown_of(run: SmallRun, target: Setting, entry: dict[str, Any], carried: Sequence[Ratio]) -> list[str]:
    """What stays unknown for one candidate of the target.

    Args:
        run: the small run.
        target: the target's setting.
        entry: the candidate's budget entry.
        carried: the ratios that were used.
    """
    lines = []
    candidate = entry["candidate"]
    small = run.setting
    tried = [observation.candidate for observation in run.observations]
    stated = {ratio.name for ratio in carried if ratio.source == "given"}
    if not tried:
        lines.append("nothing was measured: every ratio is stated or a shipped prior")
    for knob, (words, ratio) in DIMENSIONS.items():
        if candidate[knob] > 1 and tried and ratio not in stated and not any(getattr(one, knob) > 1 for one in tried):
            lines.append(f"no measured trial used {words}: its exposed share rests on the shipped prior")
    if target.nodes > 1 and small.nodes == 1:
        lines.append(
            f"nothing was measured across nodes: bandwidth and contention of a network of {target.nodes} nodes, "
            "and what of "
            "its traffic hides; `tune probe` on two nodes would tell the first"
        )
    if target.nodes > max(small.nodes, 1):
        lines.append(
            f"waiting for the slowest of {target.num_devices} devices: {small.num_devices} show no tail of slow "
            "ones; the "
            "loss grows with the number of nodes by assumption"
        )
    if run.synthetic or not run.observations:
        lines.append("the data loader at full rate: synthetic tokens, or no run at all, never wait for storage")
    if target.shape != small.shape:
        lines.append(
            f"{target.shape.name} has other matrix shapes than {small.shape.name}; efficiency by size is the "
            "ledger's curve"
        )
    if entry["may_not_fit"]:
        lines.append("whether it fits: the median of its memory is above what is allowed; `tune dry-run` would tell")
    if target.global_batch_seqs != small.global_batch_seqs:
        lines.append("whether the larger batch trains as well: no step time says anything about convergence")
    priors = {ratio.name for ratio in carried if ratio.source == "prior"}
    for driver in entry["decided_by"]:
        share = driver["half_width_s"] / entry["step_time_s"]
        if driver["ratio"] in priors and share > WEIGHS:
            words = driver["ratio"].replace("_", " ")
            lines.append(f"{words}: not measured in the small run; its prior's range moves the step by ±{share:.0%}")
    return lines
