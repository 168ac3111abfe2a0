"""Step time as ideal time plus seven losses, with the variance that uncertain coefficients leave."""

from __future__ import annotations

from dataclasses import dataclass

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
from pruning.ledger.layout import Ranks
from pruning.ledger.layout import total
from pruning.ledger.parameters import local_parameters
from pruning.ledger.pipeline import Flow


@dataclass(frozen=True)
class StepTime:
    """The losses of one step."""

    parts: dict[str, np.ndarray]
    """Seconds by part, shape (n,) each."""

    variance: np.ndarray
    """Variance of the logarithm of the step time from the coefficients' uncertainty, shape (n,)."""


def hidden_time(communication: np.ndarray, compute: np.ndarray, exposed: float) -> np.ndarray:
    """Seconds of communication that stay visible beside ``compute`` seconds.

    At least the share ``exposed`` of it (first and last pieces, contention for multiprocessors), and all that
    exceeds the compute.
    """
    return np.maximum(exposed * communication, communication - (1 - exposed) * compute)


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
    return np.asarray(
        np.where(both, pipelined, 1.0) * (layout.tp / inside) ** coefficients.value("network_host")
    )


def traffic_of(layout: Layout, account: Account, coefficients: Coefficients) -> list[Traffic]:
    """Every kind of collective of a step."""
    return [
        block_tensor_traffic(layout, coefficients),
        context_traffic(layout, coefficients),
        expert_traffic(layout, coefficients),
        pipeline_traffic(layout, coefficients),
        *data_traffic(layout, account, coefficients),
    ]


def step_parts(layout: Layout, ranks: Ranks, flow: Flow, account: Account, coefficients: Coefficients) -> StepTime:
    """Ideal time is lost to seven parts; the sum of all is the step time.

    Useful kernel time is the mean over pipeline ranks; what uneven ranks add counts as bubble.
    """
    setting, shape, hardware = layout.setting, layout.setting.shape, layout.setting.hardware
    value = coefficients.value
    m, pp = layout.micro_batches, layout.pp
    block, head = block_work(layout, account, coefficients), head_work(layout, coefficients)
    blocks = shape.layers / pp
    gemm = 3 * m * (blocks * block.gemm_s + head.gemm_s / pp)
    attention = 3.2 * m * blocks * block.attention_s
    elementwise = 2.5 * m * (blocks * block.elementwise_s + head.elementwise_s / pp)
    again = recomputed(layout, account, block)
    recompute = m * blocks * again.seconds
    local = local_parameters(layout)
    state = local / (layout.shard if account.sharded else np.where(layout.flag("zero_stage") >= 1, layout.dp, 1))
    optimizer = 30.0 * state / (hardware.memory_bandwidth * value("memory_efficiency"))
    micro_gpu = (gemm + attention + elementwise + recompute) / m
    kernels = (3.0 + again.kernels) * blocks * block.kernels + 3.0 * head.kernels / pp
    micro_cpu = kernels * value("launch_s") * host_factor(layout, coefficients)
    side = micro_gpu + value("tensor_exposed") * traffic_of(layout, account, coefficients)[0].time_s / m
    longest = np.maximum(side, micro_cpu)
    both = longest * ((side / longest) ** SHARPNESS + (micro_cpu / longest) ** SHARPNESS) ** (1 / SHARPNESS)
    launch = m * (both - side)

    tensor, context, expert, sends, *data = traffic_of(layout, account, coefficients)
    async_tp = 1 - 0.5 * layout.flag("async_tp")
    more = 1 + again.collectives / 8
    tensor_s = more * value("tensor_exposed") * async_tp * tensor.time_s + context.time_s * 0.5 + expert.time_s
    sends_s = value("pipeline_exposed") * sends.time_s
    busy = micro_gpu * m + launch + tensor_s
    slots = np.where(account.sharded & (pp == 1), m, 1.0)
    late = data.pop() if not account.sharded and not account.overlaps_gathers else None
    data_s = hidden_time(total(t.time_s for t in data), busy / m * slots * 0.9, value("data_exposed"))
    if late is not None:
        data_s = data_s + late.time_s
        data.append(late)

    bubble = busy * flow.bubble

    nodes = np.maximum(1.0, setting.num_devices / 8)
    straggler = value("straggler_share") * (1 + np.log2(nodes)) * busy
    wait = value("data_wait_share") * busy
    overhead = value("step_overhead_s") + 0 * busy
    useful = gemm + attention + elementwise + optimizer
    parts = {
        "bubble": bubble,
        "exposed_communication": tensor_s + sends_s + data_s,
        "recompute": recompute,
        "data_wait": wait,
        "kernel_efficiency": useful - setting.ideal_s,
        "cpu_launch": launch + overhead,
        "straggler": straggler,
    }
    whole = setting.ideal_s + total(parts.values())
    stretched = 1 + bubble / np.maximum(busy, 1e-30)
    kernel_share = side / np.maximum(both, 1e-30)
    host_s = both * m * stretched * (micro_cpu / np.maximum(both, 1e-30)) ** SHARPNESS
    owned = {
        "gemm_efficiency": (gemm + m * blocks * again.gemm_s) * stretched * kernel_share ** (SHARPNESS - 1),
        "gemm_half_size": 0.3 * gemm * stretched * kernel_share ** (SHARPNESS - 1),
        "attention_efficiency": attention * stretched * kernel_share ** (SHARPNESS - 1),
        "memory_efficiency": elementwise * stretched * kernel_share ** (SHARPNESS - 1) + optimizer,
        "launch_s": host_s,
        "pipeline_host": np.where((pp > 1) & (layout.tp > 1), host_s, 0.0),
        "host_growth": np.where(
            (pp > 1) & (layout.tp > 1),
            host_s * value("host_growth") * np.log(np.minimum(layout.tp, setting.fast_domain) / 2),
            0.0,
        ),
        "network_host": host_s * value("network_host") * np.log(layout.tp / np.minimum(layout.tp, setting.fast_domain)),
        "domain_share": np.where(tensor.network, 0, tensor_s) * stretched
        + sum(np.where(t.network, 0, 1) * t.time_s for t in data)
        * data_s
        / np.maximum(1e-30, total(t.time_s for t in data)),
        "network_share": np.where(tensor.network, tensor_s, 0) * stretched
        + sends_s
        + sum(np.where(t.network, 1, 0) * t.time_s for t in data)
        * data_s
        / np.maximum(1e-30, total(t.time_s for t in data)),
        "tensor_exposed": tensor_s * stretched,
        "data_exposed": data_s,
        "pipeline_exposed": sends_s,
        "straggler_share": straggler,
        "data_wait_share": wait,
        "step_overhead_s": overhead,
    }
    sensitivity = np.zeros((len(layout), len(NAMES)))
    for name, seconds in owned.items():
        sensitivity[:, NAMES.index(name)] = seconds / whole
    for name in ("gemm_efficiency", "attention_efficiency", "memory_efficiency", "domain_share", "network_share"):
        sensitivity[:, NAMES.index(name)] *= -1
    variance = ((sensitivity @ coefficients.covariance()) * sensitivity).sum(axis=1)
    return StepTime(parts, variance)
