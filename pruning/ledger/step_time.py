"""Step time as ideal time plus seven losses, with the variance that uncertain coefficients leave."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

import numpy as np

from pruning.accounts.account import Account
from pruning.coefficients import Coefficients
from pruning.coefficients import NAMES
from pruning.ledger.communication import block_tensor_traffic
from pruning.ledger.communication import context_traffic
from pruning.ledger.communication import data_traffic
from pruning.ledger.communication import expert_traffic
from pruning.ledger.communication import pipeline_traffic
from pruning.ledger.communication import Traffic
from pruning.ledger.compute import block_work
from pruning.ledger.compute import head_work
from pruning.ledger.compute import recomputed
from pruning.ledger.layout import Layout
from pruning.ledger.layout import total
from pruning.ledger.parameters import local_parameters
from pruning.ledger.pipeline import Flow


@dataclass(frozen=True)
class Compute:
    """A step without its data-parallel communication; arrays of shape (n,), seconds."""

    bubble: np.ndarray
    """Waiting for the pipeline and for the slowest rank."""

    exposed: np.ndarray
    """Visible tensor, context, expert and pipeline communication."""

    recompute: np.ndarray
    """Kernels that run a second time."""

    wait: np.ndarray
    """Waiting for data."""

    kernels: np.ndarray
    """Kernel time above the ideal."""

    launch: np.ndarray
    """Host time that devices wait for, and host work per step."""

    straggler: np.ndarray
    """Waiting for the slowest rank."""

    window: np.ndarray
    """Compute that may hide data-parallel communication."""

    total: np.ndarray
    """Ideal time and all of the above."""

    own_variance: np.ndarray
    """Variance that the coefficients leave in ``total``, s²."""

    covariances: np.ndarray
    """Covariance of ``total`` with the logarithms of domain, network and data-exposed shares, shape (n, 3), s."""

    def take(self, index: np.ndarray) -> Compute:
        """The rows at ``index``."""
        return Compute(**{name: np.take(getattr(self, name), index, axis=0) for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class DataTime:
    """Data-parallel communication of a step; arrays of shape (n,)."""

    hideable: np.ndarray
    """Seconds that compute may hide."""

    late: np.ndarray
    """Seconds that nothing hides."""

    network: np.ndarray
    """Share of the seconds that crosses the network."""

    def take(self, index: np.ndarray) -> DataTime:
        """The rows at ``index``."""
        return DataTime(np.take(self.hideable, index), np.take(self.late, index), np.take(self.network, index))


@dataclass(frozen=True)
class StepTime:
    """The losses of one step."""

    parts: dict[str, np.ndarray]
    """Seconds by part, shape (n,) each."""

    total: np.ndarray
    """Step time, seconds, shape (n,)."""

    variance: np.ndarray
    """Variance of the logarithm of the step time from the coefficients' uncertainty, shape (n,)."""


def hidden_time(communication: np.ndarray, compute: np.ndarray, exposed: float) -> np.ndarray:
    """Seconds of communication that stay visible beside ``compute`` seconds.

    At least the share ``exposed`` of it (first and last pieces, contention for multiprocessors), and all that
    exceeds the compute.
    """
    return np.maximum(exposed * communication, communication - (1 - exposed) * compute)


OPTIMIZER_BYTES = 30.0
"""Bytes that the optimizer's step moves per parameter: fp32 parameter, gradient and two moments, read and written."""

HIDING_SHARE = 0.9
"""Share of busy time beside which data-parallel communication may run."""

DATA_SHARES = ("domain_share", "network_share", "data_exposed")
"""Coefficients that data-parallel communication depends on."""

SHARPNESS = 8.0
"""How sharply the longer of device and host time decides: an exponent, infinity would be the plain maximum."""


def host_factor(layout: Layout, coefficients: Coefficients) -> np.ndarray:
    """Host time of a block over that of one without parallel collectives, shape (n,).

    Every tensor-parallel collective makes the hosts wait for the slowest of them. A pipeline's blocking exchanges
    take away the lead that hides this: pipeline_host × (ranks in the domain / 2)^host_growth. Groups that span
    nodes wait longer still, (ranks / ranks in the domain)^network_host.
    """
    inside = np.minimum(layout.tp, layout.setting.fast_domain)
    both = (layout.pp > 1) & (layout.tp > 1)
    pipelined = coefficients.value("pipeline_host") * (inside / 2) ** coefficients.value("host_growth")
    return np.asarray(np.where(both, pipelined, 1.0) * (layout.tp / inside) ** coefficients.value("network_host"))


def traffic_of(layout: Layout, account: Account, coefficients: Coefficients) -> list[Traffic]:
    """Every kind of collective of a step."""
    return [
        block_tensor_traffic(layout, coefficients),
        context_traffic(layout, coefficients),
        expert_traffic(layout, coefficients),
        pipeline_traffic(layout, coefficients),
        *data_traffic(layout, account, coefficients),
    ]


def data_time(layout: Layout, account: Account, coefficients: Coefficients) -> DataTime:
    """Data-parallel communication: what compute may hide, what nothing hides, and how much crosses the network."""
    data = data_traffic(layout, account, coefficients)
    late = np.zeros(len(layout))
    if not account.sharded and not account.overlaps_gathers:
        late = data[-1].time_s
    whole = total(traffic.time_s for traffic in data)
    across = total(traffic.network * traffic.time_s for traffic in data)
    return DataTime(whole - late, late, across / np.maximum(whole, 1e-30))


def compute_time(layout: Layout, flow: Flow, account: Account, coefficients: Coefficients) -> Compute:
    """Everything of a step but its data-parallel communication.

    Useful kernel time is the mean over pipeline ranks; what uneven ranks add counts as bubble. Backward products
    take twice the forward ones, fused attention 2.2 times (it computes scores again), pointwise work 1.5 times.
    """
    setting, shape, hardware = layout.setting, layout.setting.shape, layout.setting.hardware
    value = coefficients.value
    m, pp, blocks = layout.micro_batches, layout.pp, shape.layers / layout.pp
    block, head = block_work(layout, account, coefficients), head_work(layout, coefficients)
    gemm = 3 * m * (blocks * block.gemm_s + head.gemm_s / pp)
    attention = 3.2 * m * blocks * block.attention_s
    elementwise = 2.5 * m * (blocks * block.elementwise_s + head.elementwise_s / pp)
    again = recomputed(layout, account, block)
    recompute = m * blocks * again.seconds
    shards = layout.shard if account.sharded else np.where(layout.flag("zero_stage") >= 1, layout.dp, 1)
    state = local_parameters(layout) / shards
    optimizer = OPTIMIZER_BYTES * state / (hardware.memory_bandwidth * value("memory_efficiency"))
    device = gemm + attention + elementwise + recompute

    tensor = block_tensor_traffic(layout, coefficients)
    exchanged = (1 + again.exchanges / 2) * expert_traffic(layout, coefficients).time_s
    other = 0.5 * context_traffic(layout, coefficients).time_s + exchanged
    async_tp = 1 - 0.5 * layout.flag("async_tp")
    tensor_s = (1 + again.collectives / 8) * value("tensor_exposed") * async_tp * tensor.time_s + other
    sends_s = value("pipeline_exposed") * pipeline_traffic(layout, coefficients).time_s

    launches = (3.0 + again.kernels) * blocks * block.kernels + 3.0 * head.kernels / pp
    host = m * launches * value("launch_s") * host_factor(layout, coefficients)
    side = device + value("tensor_exposed") * tensor.time_s
    longest = np.maximum(side, host)
    ratio = np.minimum(side, host) / longest
    both = longest * (1 + ratio**SHARPNESS) ** (1 / SHARPNESS)
    launch = both - side
    busy = device + launch + tensor_s
    bubble = busy * flow.bubble
    nodes = max(1.0, setting.num_devices / 8)
    straggler = value("straggler_share") * (1 + log2(nodes)) * busy
    wait = value("data_wait_share") * busy
    overhead = value("step_overhead_s")
    kernels = gemm + attention + elementwise + optimizer - setting.ideal_s
    launch = launch + overhead
    exposed = tensor_s + sends_s
    whole = setting.ideal_s + bubble + exposed + recompute + wait + kernels + launch + straggler

    stretched = 1 + flow.bubble
    slope = (side / both) ** (SHARPNESS - 1) * stretched
    host_s = (host / both) ** (SHARPNESS - 1) * host * stretched
    inside = np.minimum(layout.tp, setting.fast_domain)
    joined = (pp > 1) & (layout.tp > 1)
    within = np.where(tensor.network, 0.0, tensor_s)
    owned = {
        "gemm_efficiency": -(gemm + m * blocks * again.gemm_s) * slope,
        "gemm_half_size": 0.3 * gemm * slope,
        "attention_efficiency": -attention * slope,
        "memory_efficiency": -elementwise * slope - optimizer,
        "launch_s": host_s,
        "pipeline_host": host_s * joined,
        "host_growth": host_s * joined * value("host_growth") * np.log(np.maximum(inside, 2) / 2),
        "network_host": host_s * value("network_host") * np.log(layout.tp / inside),
        "domain_share": -within * stretched,
        "network_share": -(tensor_s - within) * stretched - sends_s,
        "tensor_exposed": tensor_s * stretched,
        "pipeline_exposed": sends_s,
        "straggler_share": straggler,
        "data_wait_share": wait,
        "step_overhead_s": np.full_like(m, overhead),
    }
    owned_matrix = np.array(list(owned.values()))
    rows = [NAMES.index(name) for name in owned]
    covariance = coefficients.covariance()
    own_variance = np.einsum("kn,kl,ln->n", owned_matrix, covariance[np.ix_(rows, rows)], owned_matrix, optimize=True)
    covariances = covariance[np.ix_([NAMES.index(name) for name in DATA_SHARES], rows)] @ owned_matrix
    slots = np.where(account.sharded & (pp == 1), m, 1.0)
    window = HIDING_SHARE * busy / m * slots
    return Compute(
        bubble, exposed, recompute, wait, kernels, launch, straggler, window, whole, own_variance, covariances.T.copy()
    )


def combine(compute: Compute, data: DataTime, coefficients: Coefficients) -> StepTime:
    """The step from its two sides. Arrays of both must have the same candidates, shape (n,)."""
    data_s = hidden_time(data.hideable, compute.window, coefficients.value("data_exposed")) + data.late
    whole = compute.total + data_s
    parts = {
        "bubble": compute.bubble,
        "exposed_communication": compute.exposed + data_s,
        "recompute": compute.recompute,
        "data_wait": compute.wait,
        "kernel_efficiency": compute.kernels,
        "cpu_launch": compute.launch,
        "straggler": compute.straggler,
    }
    names = [NAMES.index(name) for name in DATA_SHARES]
    sigma = coefficients.covariance()[np.ix_(names, names)]
    # Data-parallel seconds fall with the bandwidth shares they use and grow with what stays exposed.
    across = data.network
    domain, network, exposed = compute.covariances.T
    mixed = exposed - domain + across * (domain - network)
    squared = (sigma[0, 0] - 2 * sigma[0, 2] + sigma[2, 2]) + across * (
        2 * (sigma[0, 1] - sigma[0, 0] + sigma[0, 2] - sigma[1, 2])
        + across * (sigma[0, 0] + sigma[1, 1] - 2 * sigma[0, 1])
    )
    variance = (compute.own_variance + data_s * (2 * mixed + data_s * squared)) / whole**2
    return StepTime(parts, whole, variance)


def step_time(layout: Layout, flow: Flow, account: Account, coefficients: Coefficients) -> StepTime:
    """Ideal time is lost to seven parts; the sum of all is the step time."""
    compute = compute_time(layout, flow, account, coefficients)
    return combine(compute, data_time(layout, account, coefficients), coefficients)
