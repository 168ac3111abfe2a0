"""Judges a probe's figures: what lags behind the median, and what other work took meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from trial_runner.probe.figures import DeviceFigures
from trial_runner.probe.figures import NodeFigures


SUSPECT = 0.75
"""What gives less than this share of the median is a suspect."""


def node_figures(devices: Sequence[DeviceFigures], names: Sequence[str], elapsed_s: float) -> list[NodeFigures]:
    """Figures by node, suspects named.

    Args:
        devices: figures in the order of ranks, equally many a node.
        names: the nodes' names.
        elapsed_s: wall time, seconds.
    """
    width = len(devices) // len(names)
    groups = [list(devices[i * width : (i + 1) * width]) for i in range(len(names))]
    found = suspects_of(groups)
    return [
        NodeFigures(node=name, devices=group, suspects=suspects, elapsed_s=elapsed_s, others_share=others_share(group))
        for name, group, suspects in zip(names, groups, found)
    ]


def others_share(devices: Sequence[DeviceFigures]) -> float:
    """Share of a node's cores that others used: (busy - the ranks' own) / what the cores had."""
    first = devices[0]
    if first.host_cores_s <= 0:
        return 0.0
    others = first.host_busy_s - sum(device.own_cpu_s for device in devices)
    return min(1.0, max(0.0, others / first.host_cores_s))


def suspects_of(nodes: Sequence[Sequence[DeviceFigures]]) -> list[list[dict[str, Any]]]:
    """What lags on each node: below :data:`SUSPECT` of the median over all devices (over all nodes, for links).

    A device is judged by what it gave in the mean, for one that is held up now and then can still be fast at best. The
    links of a node are judged together, since one slow link holds up every rank of a collective, and among three nodes
    or more, since of two none is the usual one.
    """
    out: list[list[dict[str, Any]]] = [[] for _ in nodes]
    everything = [device for node in nodes for device in node]
    for what, value in (("matrix products", _computed), ("memory bandwidth", _copied)):
        middle = median(value(device) for device in everything)
        for suspects, node in zip(out, nodes):
            for device in node:
                if value(device) < SUSPECT * middle:
                    suspects.append({"rank": device.rank, "what": what, "value": value(device), "median": middle})
    if len(nodes) < 3:
        return out
    for what, rate in (("links inside the node", _inside), ("links to other nodes", _outside)):
        rates = [rate(node) for node in nodes]
        middle = median(rates)
        for suspects, found in zip(out, rates):
            if found < SUSPECT * middle:
                suspects.append({"rank": None, "what": what, "value": found, "median": middle})
    return out


def _computed(device: DeviceFigures) -> float:
    return device.mean_tflops


def _copied(device: DeviceFigures) -> float:
    return device.memory_mean_gb_s


def _inside(node: Sequence[DeviceFigures]) -> float:
    return min((device.links[-1]["gb_s"] for device in node if device.links), default=0.0)


def _outside(node: Sequence[DeviceFigures]) -> float:
    return min((device.exchange_gb_s for device in node if device.exchange_gb_s is not None), default=0.0)
