"""Probes this machine's devices for a job, leaves suspects out, and turns the rest into observations."""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from statistics import median
from typing import Any

from pruning.probed import Probed
from search_space.setting import Setting
from trial_runner.probe import NodeFigures
from trial_runner.probe import probe_node
from trial_runner.probe.run import shapes_of


CPU_LIMIT = 1 << 28
"""Multiply-adds of the largest product on a CPU slot: some hundredths of a second."""


def probe(
    setting: Setting,
    device: str,
    ranks: int,
    seconds: float = 4.0,
    started: Callable[[list[int]], None] | None = None,
) -> NodeFigures:
    """Measure this machine's devices at the shapes of the setting's model.

    Raises:
        UserError: a rank failed or did not answer.
    """
    limit = CPU_LIMIT if device == "cpu" else 1 << 40
    shapes = shapes_of(setting.shape, setting.seq_len, limit=limit)
    return probe_node(shapes, device=device, ranks=ranks, precision=setting.precision, seconds=seconds, started=started)


def probed_of(figures: NodeFigures) -> Probed:
    """Medians over the devices that are no suspects; over all where every one is."""
    bad = {suspect["rank"] for suspect in figures.suspects}
    sound = [device for device in figures.devices if device.rank not in bad] or figures.devices
    products = []
    for i, product in enumerate(sound[0].products):
        rows, depth, width = product["shape"]
        rate = median(device.products[i]["tflops"] for device in sound) * 1e12
        products.append(((int(rows), int(depth), int(width)), rate))
    links = [device.links for device in sound if device.links]
    large = median(row[-1]["gb_s"] for row in links) * 1e9 if links else None
    # The ledger's hops of a collective: log2 of the group.
    small = median(row[0]["seconds"] for row in links) / log2(len(figures.devices)) if links else None
    memory = median(device.memory_gb_s for device in sound) * 1e9
    return Probed(products=products, memory_bytes_s=memory, link_bytes_s=large, latency_s=small)


def document(figures: NodeFigures, setting: Setting) -> dict[str, Any]:
    """The figures and the ledger's coefficients that follow from them, as ``tune probe --json`` prints them."""
    from pruning.coefficients import prior
    from pruning.probed import with_probe

    before = prior(setting)
    after = with_probe(before, setting, probed_of(figures))
    names = ("gemm_efficiency", "memory_efficiency", "domain_share", "latency_s")
    return {
        "nodes": [figures.to_json()],
        "suspects": [{"node": figures.node, **suspect} for suspect in figures.suspects],
        "coefficients": {
            name: {"prior": before.value(name), "value": after.value(name), "log_sigma": after.sigma(name)}
            for name in names
        },
        "not_measured": ["links across nodes: this machine only"],
        "elapsed_s": figures.elapsed_s,
    }
