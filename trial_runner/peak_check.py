"""Whether torchtitan's own log divides by the same peak as this product does."""

from __future__ import annotations

import re


_LINE = re.compile(r"tflops:\s*([\d.,]+)\s+mfu:\s*([\d.]+)%")

TOLERANCE = 0.02
"""Relative difference of peaks from which a trial is flagged."""


def implied_peak_flops(log: str) -> float | None:
    """The peak, FLOP/s, that a log's last line with both figures implies: TFLOP/s ÷ MFU; None without such a line."""
    found = _LINE.findall(log)
    if not found:
        return None
    rate, mfu = float(found[-1][0].replace(",", "")), float(found[-1][1])
    return rate * 1e12 / (mfu / 100) if mfu > 0 else None


def peaks_disagree(log: str, peak_flops: float) -> bool:
    """Whether the log's implied peak differs from ``peak_flops`` by more than :data:`TOLERANCE`."""
    implied = implied_peak_flops(log)
    return implied is not None and abs(implied / peak_flops - 1) > TOLERANCE
