"""Amounts as people read them."""

from __future__ import annotations


def format_budget(device_s: float) -> str:
    """A readable amount: ``1.25 device-hours`` or ``12.0 device-minutes``."""
    if device_s >= 3600:
        return f"{device_s / 3600:.2f} device-hours"
    if device_s >= 120:
        return f"{device_s / 60:.1f} device-minutes"
    return f"{device_s:.0f} device-seconds"
