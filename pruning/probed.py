"""Coefficients from a probe: what devices and links were measured to give, before the first trial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pruning.coefficients import Coefficients
from pruning.coefficients import INDEX
from search_space.setting import Setting


PROBE_SIGMA = 0.1
"""Standard deviation of the logarithm of a probed figure: probes repeat within 10%, and a step is not a probe."""


@dataclass(frozen=True, kw_only=True)
class Probed:
    """Medians over the sound devices of a probe."""

    products: Sequence[tuple[tuple[int, int, int], float]]
    """(rows, depth, width) and FLOP/s."""

    memory_bytes_s: float
    """Bytes read and written in a second."""

    link_bytes_s: float | None = None
    """Bytes that a rank takes in per second in a large all-gather inside the node; None: one device."""

    network_bytes_s: float | None = None
    """The same between nodes, every rank of a node taking part; None: one node."""

    latency_s: float | None = None
    """Seconds of a small all-gather over the number of its hops; None: one device."""


def with_probe(coefficients: Coefficients, setting: Setting, probed: Probed) -> Coefficients:
    """Coefficients updated by a probe's observations, each in proportion to its certainty.

    Both prior and observation are lognormal, so the logarithms combine by inverse variance. Product efficiency is
    observed as FLOP/s over the declared peak, corrected for the size of the product as
    :func:`pruning.ledger.compute.gemm_seconds` has it; the rest over the hardware's nominal figures.
    """
    half = coefficients.value("gemm_half_size")
    peak = setting.hardware.peak(setting.precision)
    efficiency = [rate / peak * float(np.prod([1 + half / size for size in shape])) for shape, rate in probed.products]
    observed = {
        "gemm_efficiency": float(np.median(efficiency)),
        "memory_efficiency": probed.memory_bytes_s / setting.hardware.memory_bandwidth,
    }
    if probed.link_bytes_s is not None:
        observed["domain_share"] = probed.link_bytes_s / setting.hardware.domain_bandwidth
    if probed.network_bytes_s is not None and setting.fast_domain <= setting.devices_per_node:
        observed["network_share"] = probed.network_bytes_s / setting.hardware.nic_bandwidth
    if probed.latency_s is not None:
        observed["latency_s"] = probed.latency_s
    log, covariance = coefficients.log_values(), coefficients.covariance()
    for name, value in observed.items():
        i = INDEX[name]
        gain = covariance[:, i] / (covariance[i, i] + PROBE_SIGMA**2)
        log = log + gain * (np.log(value) - log[i])
        covariance = covariance - np.outer(gain, covariance[i, :])
    return coefficients.with_logs(log, covariance)
