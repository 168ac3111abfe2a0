"""The breakdown on a terminal: each step as a table with a waterfall, then products, collectives and advice."""

from __future__ import annotations

from rich.console import Console
from rich.console import Group
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trial_runner.breakdown.result import Breakdown
from trial_runner.breakdown.result import PARTS
from trial_runner.breakdown.result import StepBreakdown


LABELS = {
    "useful": "useful",
    "bubble": "pipeline bubble",
    "exposed_communication": "exposed communication",
    "recompute": "recompute",
    "data_wait": "data wait",
    "kernel_efficiency": "kernel efficiency",
    "cpu_launch": "CPU launch",
    "straggler": "straggler",
    "unexplained": "unexplained",
}
"""What a person reads for each part."""

BAR = 32
"""Characters of a whole step in the waterfall."""

TOP = 5
"""Rows of the tables of kernels and collectives; the JSON holds 20."""


def waterfall(step: StepBreakdown) -> list[tuple[str, float, float]]:
    """The way from ideal to measured: (part, start, length) in seconds, useful time first, unexplained last."""
    rows, start = [], 0.0
    values = {"useful": step.useful_s, **step.parts_s, "unexplained": step.unexplained_s}
    for part in ("useful", *PARTS, "unexplained"):
        rows.append((part, start, values[part]))
        start += values[part]
    return rows


def show(breakdown: Breakdown, console: Console) -> None:
    """Print a breakdown."""
    for step in breakdown.steps:
        console.print(_step(step, breakdown.expected_s))
    if breakdown.stragglers:
        table = Table(title="Ranks that others waited for", title_justify="left")
        for column in ("rank", "late (s)", "came last"):
            table.add_column(column, justify="right")
        for straggler in breakdown.stragglers:
            table.add_row(str(straggler.rank), f"{straggler.late_s:.6f}", str(straggler.collectives))
        console.print(table)
    for finding in breakdown.findings:
        low, high = finding.expected_s
        console.print(
            f"[bold]{LABELS[finding.part]}[/bold] ({finding.group}): found {finding.found_s:.4f} s, "
            f"expected {low:.4f} to {high:.4f} s\n  cause: {escape(_clean(finding.cause))}\n"
            f"  seen: {escape(_clean(finding.evidence))}\n  change: {escape(_clean(finding.change))}"
        )
    for warning in breakdown.warnings:
        console.print(Text(f"warning: {_clean(warning)}", style="yellow"))


def _clean(text: str) -> str:
    """Text from a trace without the codes that would drive a terminal."""
    return "".join(letter if letter.isprintable() else "·" for letter in text)


def _step(step: StepBreakdown, expected: dict[str, tuple[float, float]]) -> RenderableType:
    mfu = "" if step.mfu_pct is None else f", MFU {step.mfu_pct:.2f}%"
    inferred = f" ({step.inferred})" if step.inferred else ""
    title = f"rank {step.rank}, step {step.step}: {step.step_s:.6f} s{mfu}{inferred}"
    parts = Table(title=Text(_clean(title)), title_justify="left")
    parts.add_column("part")
    for column in ("seconds", "% of step", "MFU points", "exact"):
        parts.add_column(column, justify="right")
    if expected:
        parts.add_column("expected (s)", justify="right")
    parts.add_column("from ideal to measured")
    for part, start, length in waterfall(step):
        points = None if part == "useful" else step.points(part)
        row = [
            LABELS[part],
            f"{length:.6f}",
            f"{100 * length / step.step_s:.2f}",
            "" if points is None else f"{points[0]:.2f}",
            "" if points is None or points[1] is None else f"{points[1]:.2f}",
        ]
        if expected:
            bounds = expected.get(part)
            row.append("" if bounds is None else f"{bounds[0]:.4f} to {bounds[1]:.4f}")
        first = round(BAR * start / step.step_s)
        last = max(round(BAR * (start + length) / step.step_s), first + (length > 0))
        parts.add_row(*row, " " * first + "█" * (last - first))
    facts = (
        f"coverage {step.coverage_pct:.1f}% of kernel time; {step.kernels} kernels from {step.launches} launches, "
        f"{step.launches_without_kernel} launches without kernel"
    )
    if step.recompute_basis:
        facts += f"; recompute found by {step.recompute_basis}"
    if step.clock_deficit_s is not None:
        facts += (
            f"; of kernel efficiency {step.clock_deficit_s:.6f} s is clock deficit, "
            f"{step.parts_s['kernel_efficiency'] - step.clock_deficit_s:.6f} s at the clock it had"
        )
    shown: list[RenderableType] = [parts, Text(facts)]
    if step.matrix_products:
        shown.append(_products(step))
    if step.collectives:
        shown.append(_collectives(step))
    return Group(*shown, Text())


def _products(step: StepBreakdown) -> Table:
    table = Table(title="Matrix products by shape", title_justify="left")
    for column in ("M × N × K", "count", "seconds", "TFLOP/s", "% of peak", "% of roofline", "note"):
        table.add_column(column, justify="left" if column == "note" else "right")
    for row in step.matrix_products[:TOP]:
        share = "" if row.efficiency_pct is None else f"{row.efficiency_pct:.1f}"
        roof = "" if row.roofline_pct is None else f"{row.roofline_pct:.1f}"
        shape = f"{row.m} × {row.n} × {row.k}"
        table.add_row(shape, str(row.count), f"{row.time_s:.6f}", f"{row.tflops:.2f}", share, roof, escape(row.note))
    return table


def _collectives(step: StepBreakdown) -> Table:
    table = Table(title="Communication by exposure", title_justify="left")
    for column in ("kind", "for", "count", "MiB", "total (s)", "exposed (s)", "waiting (s)", "GB/s"):
        table.add_column(column, justify="left" if column in ("kind", "for") else "right")
    for row in step.collectives[:TOP]:
        size = "" if row.size_bytes is None else f"{row.size_bytes / 2**20:.2f}"
        rate = "" if row.bandwidth_gb_s is None else f"{row.bandwidth_gb_s:.2f}"
        seconds = [f"{value:.6f}" for value in (row.total_s, row.exposed_s, row.waiting_s)]
        table.add_row(row.kind, row.dimension, str(row.count), size, *seconds, rate)
    return table
