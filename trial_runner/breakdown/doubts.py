"""What to know before believing the figures, in words."""

from __future__ import annotations

from search_space.errors import UserError
from trial_runner.breakdown import names
from trial_runner.breakdown.communication import Communication
from trial_runner.breakdown.integrity import AHEAD_SHARE
from trial_runner.breakdown.integrity import COVERAGE_PCT
from trial_runner.breakdown.integrity import Integrity
from trial_runner.breakdown.links import Links
from trial_runner.breakdown.steps import Step
from trial_runner.breakdown.trace import RUNTIME
from trial_runner.breakdown.trace import Trace


def check_trace(trace: Trace, links: Links, communication: list[Communication], warnings: list[str]) -> None:
    """Warn of what limits a whole trace.

    Raises:
        UserError: several ranks and kernels, but no communication.
    """
    dropped = [f"{count} events with {reason}" for reason, count in trace.dropped.items()]
    if dropped:
        warnings.append(f"{trace.path.name}: integrity: left out or mended: {'; '.join(dropped)}")
    if (trace.world_size or 1) > 1 and not communication:
        text = (
            f"trace {trace.path}: a job of {trace.world_size} ranks, but no communication was found in it: its kernels "
            "have names that are not known, or communication was not traced"
        )
        if links.on_device:
            raise UserError(f"{text}. The breakdown would report 0% exposed communication, which is wrong")
        warnings.append(f"error: {text}")
    if not links.on_device and len(trace.named(trace.rows(RUNTIME), names.is_launch)):
        warnings.append(
            f"{trace.path.name}: kernels were launched but none was recorded; only the CPU's own work is broken down. "
            "Record with the device's activity on"
        )


def lost_text(trace: Trace, step: Step, found: Integrity) -> str:
    """What to say of a step that lost kernels."""
    share = 100 * found.lost / max(1, found.launches)
    return (
        f"{trace.path.name}: step {step.number} is unreliable: {found.lost} of {found.launches} launches "
        f"({share:.0f}%) have no kernel in the trace, so the profiler lost them; idle time of this step is not real, "
        "prefer the MFU of unprofiled steps"
    )


def warn_step(where: str, found: Integrity, measured_step_s: float | None, step: Step, warnings: list[str]) -> None:
    """Warn of what limits the figures of one step: unknown kernels, a CPU far ahead, the profiler's own cost."""
    if found.coverage_pct < COVERAGE_PCT:
        listed = ", ".join(f"{row['name'][:80]} ({row['share_pct']:.1f}%)" for row in found.unknown[:5])
        warnings.append(
            f"{where}: {100 - found.coverage_pct:.1f}% of kernel time is of unknown kernels and counted as compute: "
            f"{listed}"
        )
    length = (step.end - step.start) / 1e9
    if found.overhang_s > AHEAD_SHARE * length:
        warnings.append(
            f"{where}: the device works on it for {found.overhang_s:.6f} s after its mark ended, since the CPU runs "
            "ahead; the window is the mark's. Synchronise before profiler.step(), or trace several steps and take the "
            "median"
        )
    if measured_step_s:
        overhead = 100 * (length / measured_step_s - 1)
        if overhead > 5:
            warnings.append(
                f"{where}: the traced step is {overhead:.0f}% longer than the measured one; the profiler slows "
                "launches, so MFU is of the measured step and scaled_parts_s takes the overhead from the CPU-launch "
                "part first"
            )
