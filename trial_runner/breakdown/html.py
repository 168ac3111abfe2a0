"""The breakdown as one self-contained HTML page: tables and an inline SVG waterfall, no script, nothing loaded."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from trial_runner.breakdown.render import LABELS
from trial_runner.breakdown.render import waterfall
from trial_runner.breakdown.result import Breakdown
from trial_runner.breakdown.result import StepBreakdown


COLOURS = {
    "useful": "#2e7d32",
    "bubble": "#6a1b9a",
    "exposed_communication": "#1565c0",
    "recompute": "#ef6c00",
    "data_wait": "#00838f",
    "kernel_efficiency": "#9e9d24",
    "cpu_launch": "#c62828",
    "straggler": "#4e342e",
    "unexplained": "#757575",
}

_STYLE = (
    "body{font:14px/1.4 system-ui,sans-serif;margin:2em;max-width:70em}table{border-collapse:collapse;margin:.6em 0}"
    "td,th{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:right}"
    "td:first-child,th:first-child{text-align:left}"
    ".warning{color:#8a6d00}.name{font-family:monospace;word-break:break-all}h2{margin-top:1.6em}"
)


def waterfall_svg(step: StepBreakdown, width: int = 720) -> str:
    """The waterfall of a step from ideal to measured as an SVG element.

    Args:
        step: the step.
        width: width of the whole step in the picture, pixels.
    """
    row, label, value = 22, 170, 190
    rows = waterfall(step)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{label + width + value}" height="{row * len(rows) + 8}" '
        f'font-family="sans-serif" font-size="12" role="img" aria-label="waterfall of step {step.step}">'
    ]
    for index, (part, start, length) in enumerate(rows):
        x, size = label + width * start / step.step_s, width * length / step.step_s
        y = row * index + 4
        lines.append(
            f'<text x="0" y="{y + 14}">{LABELS[part]}</text>'
            f'<rect x="{x:.2f}" y="{y}" width="{max(size, 0.5 if length else 0):.2f}" height="{row - 5}" '
            f'fill="{COLOURS[part]}"/>'
            f'<text x="{x + size + 6:.2f}" y="{y + 14}">{length:.6f} s ({100 * length / step.step_s:.2f}%)</text>'
        )
    lines.append("</svg>")
    return "".join(lines)


def page(breakdown: Breakdown) -> str:
    """The whole page. Every text that comes from a trace is escaped."""
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8><title>MFU breakdown</title>"
        f"<style>{_STYLE}</style></head><body><h1>MFU breakdown</h1>"
    ]
    for warning in breakdown.warnings:
        parts.append(f'<p class="warning">{escape(warning)}</p>')
    if breakdown.stragglers:
        rows = [(str(s.rank), f"{s.late_s:.6f}", str(s.collectives)) for s in breakdown.stragglers]
        parts.append("<h2>Ranks that others waited for</h2>" + _table(("rank", "late (s)", "came last"), rows))
    if breakdown.findings:
        found = [
            (LABELS[f.part], f.group, f"{f.found_s:.4f}", _range(f.expected_s), f.cause, f.evidence, f.change)
            for f in breakdown.findings
        ]
        head = ("part", "act as", "found (s)", "expected (s)", "cause", "seen", "change")
        parts.append("<h2>Expected against found</h2>" + _table(head, found))
    parts += [_step(step) for step in breakdown.steps]
    parts.append("</body></html>\n")
    return "".join(parts)


def _range(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]:.4f} to {bounds[1]:.4f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _step(step: StepBreakdown) -> str:
    mfu = "" if step.mfu_pct is None else f", MFU {step.mfu_pct:.2f}%"
    text = [
        f"<h2>Rank {step.rank}, step {step.step}: {step.step_s:.6f} s{mfu}</h2>",
        f'<p class="name">{escape(step.file)} {escape(step.inferred)}</p>',
        waterfall_svg(step),
        f"<p>Coverage {step.coverage_pct:.1f}% of kernel time; {step.kernels} kernels from {step.launches} launches, "
        f"{step.launches_without_kernel} launches without kernel. {escape(step.recompute_basis)}</p>",
    ]
    if step.mfu_pct is not None:
        points = {part: step.points(part) or (0.0, None) for part in (*step.parts_s, "unexplained")}
        rows = [
            (LABELS[part], f"{first:.3f}", "" if exact is None else f"{exact:.3f}")
            for part, (first, exact) in points.items()
        ]
        text.append(_table(("MFU points", "first order", "exact"), rows))
    if step.unknown_kernels:
        unknown = [(r["name"][:200], str(r["count"]), f"{r['share_pct']:.2f}") for r in step.unknown_kernels[:20]]
        text.append(_table(("unknown kernel", "count", "% of kernel time"), unknown))
    if step.matrix_products:
        products = [
            (
                f"{r.m} × {r.n} × {r.k}",
                r.operator,
                r.dtype,
                str(r.count),
                f"{r.time_s:.6f}",
                f"{r.tflops:.2f}",
                "" if r.efficiency_pct is None else f"{r.efficiency_pct:.1f}",
                "" if r.roofline_pct is None else f"{r.roofline_pct:.1f}",
                r.note,
            )
            for r in step.matrix_products
        ]
        head = ("M × N × K", "operator", "type", "count", "seconds", "TFLOP/s", "% of peak", "% of roofline", "note")
        text.append(_table(head, products))
    if step.collectives:
        talk = [
            (
                r.kind,
                r.dimension,
                str(r.count),
                "" if r.size_bytes is None else f"{r.size_bytes / 2**20:.2f}",
                f"{r.total_s:.6f}",
                f"{r.exposed_s:.6f}",
                f"{r.waiting_s:.6f}",
                "" if r.bandwidth_gb_s is None else f"{r.bandwidth_gb_s:.2f}",
            )
            for r in step.collectives
        ]
        columns = ("communication", "for", "count", "MiB", "total (s)", "exposed (s)", "waiting (s)", "GB/s")
        text.append(_table(columns, talk))
    return "".join(text)
