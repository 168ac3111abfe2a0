"""Probe: what the devices and links of a node really give, in a few seconds."""

from __future__ import annotations

from trial_runner.probe.run import DeviceFigures
from trial_runner.probe.run import NodeFigures
from trial_runner.probe.run import probe_node


__all__ = ["DeviceFigures", "NodeFigures", "probe_node"]
