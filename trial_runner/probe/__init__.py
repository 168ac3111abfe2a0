"""Probe: what devices, links and nodes really give, in a few seconds."""

from __future__ import annotations

from trial_runner.probe.figures import DeviceFigures
from trial_runner.probe.figures import NodeFigures
from trial_runner.probe.figures import read_figures
from trial_runner.probe.order import make_order
from trial_runner.probe.order import ProbeOrder
from trial_runner.probe.order import shapes_of
from trial_runner.probe.run import probe_node
from trial_runner.probe.run import PROGRAM
from trial_runner.probe.suspects import node_figures


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
