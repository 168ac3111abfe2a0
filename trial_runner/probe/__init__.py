"""Probe: what devices, links and nodes really give, in a few seconds."""

from __future__ import annotations

from trial_runner.probe.figures import DeviceFigures
from trial_runner.probe.figures import make_order
from trial_runner.probe.figures import node_figures
from trial_runner.probe.figures import NodeFigures
from trial_runner.probe.figures import ProbeOrder
from trial_runner.probe.figures import read_figures
from trial_runner.probe.figures import shapes_of
from trial_runner.probe.run import probe_node
from trial_runner.probe.run import PROGRAM


__all__ = [
    "PROGRAM",
    "DeviceFigures",
    "NodeFigures",
    "ProbeOrder",
    "make_order",
    "node_figures",
    "probe_node",
    "read_figures",
    "shapes_of",
]
