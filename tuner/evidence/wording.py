"""A claim in words: the config file's docstring, the report, the text of a pull request."""

from __future__ import annotations

from typing import Any

from tuner.evidence.claim import Claim
from tuner.evidence.claim import Side


def gain(comparison: dict[str, Any]) -> str:
    """The difference in one line."""
    low, high = comparison["step_time_change_ci_pct"]
    return (
        f"step time {comparison['step_time_change_pct']:+.1f}% [{low:+.1f}, {high:+.1f}], "
        f"MFU {comparison['mfu_points']:+.1f} points"
    )


def evidence(claim: Claim) -> str:
    """The docstring of the committed file."""
    kept = "" if claim.changed else " (the baseline, kept)"
    lines = [
        f"{claim.function} tuned for {claim.num_devices} × {claim.hardware}{kept}.",
        "",
        f"study: {claim.study}, trials {_numbers(claim.after)} against baseline trials {_numbers(claim.before)}",
        f"recipe: sequence {claim.seq_len}, global batch {claim.global_batch_seqs}, {claim.precision}",
        f"before: {_figures(claim.before)}",
        f"after:  {_figures(claim.after)}",
        f"change: {gain(claim.comparison)} "
        f"({'significant' if claim.comparison['significant'] else 'within noise'}; two runs of one configuration "
        f"differ by up to {claim.noise['floor_pct']:.1f}%)",
        f"why: {claim.why}",
        f"loss: {claim.parity['verdict']} with the baseline's: {claim.parity['why']}",
        f"peak used for MFU: {claim.peak_flops / 1e12:.4g} TFLOP/s per device",
        f"versions: {', '.join(f'{key} {value}' for key, value in claim.versions.items())}",
        f"your modules: {claim.git_head or 'none under version control (path under [model])'}",
        f"approved by: {claim.approved_by or 'nobody yet'}",
    ]
    lines += [f"bought: {_change(change)}" for change in claim.changes]
    if claim.parity["numeric_changes"]:
        lines.append(f"NUMERIC CHANGE: {', '.join(claim.parity['numeric_changes'])}")
    if claim.env:
        lines.append(f"environment: {' '.join(f'{key}={value}' for key, value in sorted(claim.env.items()))}")
    if claim.data == "synthetic":
        lines.append("measured on synthetic tokens; the data loader of the original function is untouched here")
    return "\n".join(lines)


def report(claim: Claim) -> str:
    """The claim as a page of Markdown: what a reviewer needs, and how to check or undo it."""
    before, after = claim.before, claim.after
    rows = [
        ("configuration", before.label, after.label),
        ("step time, s", _interval(before.step_time_s, before.step_time_ci_s), _after(after)),
        ("median in another study, s", _range(before.repeat_s), _range(after.repeat_s)),
        ("95th percentile, s", f"{before.step_time_p95_s:.4g}", f"{after.step_time_p95_s:.4g}"),
        ("tokens/s/device", f"{before.tokens_per_s_per_device:.5g}", f"{after.tokens_per_s_per_device:.5g}"),
        ("MFU, %", _interval(before.mfu_pct, before.mfu_ci_pct), _interval(after.mfu_pct, after.mfu_ci_pct)),
        ("peak reserved, GiB", f"{before.peak_reserved_gib:.2f}", f"{after.peak_reserved_gib:.2f}"),
        ("runs", str(len(before.trials)), str(len(after.trials))),
        ("control beside them, s a round", _control(before), _control(after)),
    ]
    changes = "; ".join(f"`{knob}`: {old} → {new}" for knob, (old, new) in claim.changed.items())
    lines = [
        f"# {claim.name}",
        "",
        f"{claim.function} on {claim.num_devices} × {claim.hardware}, sequence {claim.seq_len}, global batch "
        f"{claim.global_batch_seqs}, {claim.precision}. {claim.date}, study {claim.study}.",
        "",
        f"**{gain(claim.comparison)}**: {claim.why}.",
        "",
        f"Changes: {changes or 'none, the baseline stays'}.",
        "",
        "| | before | after |",
        "|---|---|---|",
        *(f"| {name} | {old} | {new} |" for name, old, new in rows),
        "",
        f"Intervals are 95%. Two runs of one configuration differ by up to {claim.noise['floor_pct']:.1f}% here "
        f"({claim.noise['repeats']} repeats behind that); differences below 1 MFU point count as noise.",
        "",
    ]
    if claim.changes:
        lines += [
            "## What each change bought",
            "",
            "| change | step time | how known | in the winner |",
            "|---|---|---|---|",
        ]
        lines += [_change_row(change) for change in claim.changes]
        lines.append("")
    lines += [
        "## Loss",
        "",
        f"{claim.parity['verdict']}: {claim.parity['why']}.",
        *(
            [f"**Numeric change**: {', '.join(claim.parity['numeric_changes'])}."]
            if claim.parity["numeric_changes"]
            else []
        ),
        "",
        "## Measured with",
        "",
        f"{', '.join(f'{key} {value}' for key, value in claim.versions.items())}; code at "
        f"{claim.git_head or 'no commit'}; peak {claim.peak_flops / 1e12:.4g} TFLOP/s per device; "
        f"traces: {', '.join(after.traces) or 'none'}.",
        "",
        "## Check or undo",
        "",
        "`tune verify COMMIT` measures this configuration again and says whether the claim holds. "
        "Nothing but these files was added; `git revert` takes them out.",
        "",
        f"Approved by: {claim.approved_by or '_nobody yet_'}",
        "",
    ]
    return "\n".join(lines)


def _after(side: Side) -> str:
    return _interval(side.step_time_s, side.step_time_ci_s)


def _interval(value: float, interval: tuple[float, float]) -> str:
    return f"{value:.4g} [{interval[0]:.4g}, {interval[1]:.4g}]"


def _range(interval: tuple[float, float] | None) -> str:
    return f"{interval[0]:.4g} to {interval[1]:.4g}" if interval is not None else "–"


def _control(side: Side) -> str:
    return ", ".join(f"{seconds:.4g}" for seconds in side.control.runs_s) or "–"


def _numbers(side: Side) -> str:
    return ", ".join(map(str, side.trials))


def _figures(side: Side) -> str:
    return (
        f"step {_interval(side.step_time_s, side.step_time_ci_s)} s, p95 {side.step_time_p95_s:.4g} s, "
        f"{side.tokens_per_s_per_device:.4g} tokens/s/device, MFU {side.mfu_pct:.2f}%, "
        f"peak reserved {side.peak_reserved_gib:.2f} GiB"
    )


def change_name(change: dict[str, Any]) -> str:
    """The knobs of a change with their values, ``knob old → new``."""
    return ", ".join(f"{knob} {old} → {new}" for knob, (old, new) in change["knobs"].items())


def change_effect(change: dict[str, Any]) -> str:
    """What a change did to the step time, in words."""
    if change["step_time_change_pct"] is None:
        return "cannot be undone alone"
    words = f"{change['step_time_change_pct']:+.1f}%"
    if change["interval_pct"] is not None:
        words += f" [{change['interval_pct'][0]:+.1f}, {change['interval_pct'][1]:+.1f}]"
    return words


def change_fate(change: dict[str, Any]) -> str:
    """Whether the winner keeps a change, in words."""
    if not change["kept"]:
        return "left out"
    return "kept" if change.get("sure", True) else "kept, undecided"


def _change(change: dict[str, Any]) -> str:
    kept = change_fate(change)
    return f"{change_name(change)}: {change_effect(change)} ({change['source'].replace('_', ' ')}, {kept})"


def _change_row(change: dict[str, Any]) -> str:
    return (
        f"| {change_name(change)} | {change_effect(change)} | {change['source'].replace('_', ' ')} | "
        f"{change_fate(change)} |"
    )
