"""What a probe of a job's devices measures, and what its figures mean to the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from statistics import median
from typing import Any

from pruning.coefficients import prior
from pruning.probed import Probed
from pruning.probed import with_probe
from search_space.setting import Setting
from trial_runner.probe import make_order
from trial_runner.probe import NodeFigures
from trial_runner.probe import ProbeOrder
from trial_runner.probe import shapes_of


CPU_LIMIT = 1 << 28
"""Multiply-adds of the largest product on a CPU slot: some hundredths of a second."""


def order_for(setting: Setting, device: str, seconds: float) -> ProbeOrder:
    """The order to measure a node of the setting at the shapes of its model."""
    limit = CPU_LIMIT if device == "cpu" else 1 << 40
    return make_order(
        shapes_of(setting.shape, setting.seq_len, limit=limit),
        device=device,
        precision=setting.precision,
        ranks_per_node=setting.devices_per_node,
        seconds=seconds,
    )


def probed_of(nodes: Sequence[NodeFigures]) -> Probed:
    """Medians over the devices that are no suspects; over all where every one is.

    Where the links of a node are a suspect, every device of it counts as one for the links' figures.
    """
    devices = [device for node in nodes for device in node.devices]
    bad = {(node.node, suspect["rank"]) for node in nodes for suspect in node.suspects}
    sound = [device for node in nodes for device in node.devices if (node.node, device.rank) not in bad] or devices
    linked = [device for node in nodes if (node.node, None) not in bad for device in node.devices] or devices
    products = []
    for i, product in enumerate(sound[0].products):
        rows, depth, width = product["shape"]
        rate = median(device.products[i]["tflops"] for device in sound) * 1e12
        products.append(((int(rows), int(depth), int(width)), rate))
    links = [device.links for device in linked if device.links]
    network = [device.network for device in linked if device.network]
    return Probed(
        products=products,
        memory_bytes_s=median(device.memory_gb_s for device in sound) * 1e9,
        link_bytes_s=median(row[-1]["gb_s"] for row in links) * 1e9 if links else None,
        network_bytes_s=median(row[-1]["gb_s"] for row in network) * 1e9 if network else None,
        # The ledger's hops of a collective: log2 of the group.
        latency_s=median(row[0]["seconds"] for row in links) / log2(len(nodes[0].devices)) if links else None,
    )


def suspect_text(node: str, suspect: dict[str, Any]) -> str:
    """What is said of a suspect."""
    who = f"node {node}" if suspect["rank"] is None else f"device {suspect['rank']} of {node}"
    return f"{who} lags in {suspect['what']}: {suspect['value']:.3g}, the median is {suspect['median']:.3g}"


def document(nodes: Sequence[NodeFigures], setting: Setting) -> dict[str, Any]:
    """The figures and the ledger's coefficients that follow from them, as ``tune probe --json`` prints them."""
    before = prior(setting)
    after = with_probe(before, setting, probed_of(nodes))
    names = ("gemm_efficiency", "memory_efficiency", "domain_share", "network_share", "latency_s")
    return {
        "nodes": [node.to_json() for node in nodes],
        "suspects": [{"node": node.node, **suspect} for node in nodes for suspect in node.suspects],
        "coefficients": {
            name: {"prior": before.value(name), "value": after.value(name), "log_sigma": after.sigma(name)}
            for name in names
            if len(nodes) > 1 or name != "network_share"
        },
        "not_measured": [] if len(nodes) > 1 else ["links between nodes: only one node was probed"],
        "elapsed_s": max(node.elapsed_s for node in nodes),
    }
