"""Communication: bytes, messages and seconds of every collective of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pruning.accounts.account import Account
from pruning.coefficients import Coefficients
from pruning.ledger.layout import Layout
from pruning.ledger.parameters import expert_share
from pruning.ledger.parameters import local_parameters


@dataclass(frozen=True)
class Traffic:
    """One kind of collective over one dimension; arrays of shape (n,), per device and step."""

    dimension: str
    """``tensor``, ``data``, ``context``, ``pipeline`` or ``expert``."""

    primitive: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``send`` or ``all_to_all``."""

    bytes: np.ndarray
    """Payload: the whole buffer that is gathered, reduced or sent."""

    messages: np.ndarray
    """Collectives."""

    time_s: np.ndarray
    """Seconds when nothing hides them."""

    network: np.ndarray
    """Whether the group leaves the fast domain."""

    hideable: bool
    """Whether compute may run beside it."""

    group: np.ndarray
    """Ranks in the group."""

    @property
    def wire_bytes(self) -> np.ndarray:
        """Bytes that really cross links per device: (g-1)/g of a ring's payload; a send's payload whole."""
        if self.primitive == "send":
            return self.bytes
        return np.asarray(self.bytes * (self.group - 1) / np.maximum(self.group, 1))


def nominal_seconds(payload: float | np.ndarray, bandwidth: float) -> float | np.ndarray:
    """Seconds of a payload at a link's nominal bandwidth, nothing hidden and no latency: bytes / bandwidth."""
    return payload / bandwidth


@dataclass(frozen=True)
class Group:
    """Placement of one dimension's groups on nodes; arrays of shape (n,)."""

    size: np.ndarray
    """Ranks in a group."""

    inside: np.ndarray
    """Ranks of a group that share one fast domain."""


def group_of(size: np.ndarray, stride: np.ndarray, domain: int) -> Group:
    """A group whose neighbours are ``stride`` ranks apart, on nodes of ``domain`` devices.

    Ranks are dealt out tensor-parallel fastest, then context, data-parallel shard, replicate, pipeline slowest
    (torchtitan's device mesh; the same as Megatron's tp-cp-ep-dp-pp order).
    """
    inside = np.clip(np.floor(domain / stride), 1, size)
    return Group(size, inside)


def collective_seconds(
    payload: np.ndarray, messages: np.ndarray, group: Group, layout: Layout, coefficients: Coefficients
) -> np.ndarray:
    """Seconds of ``messages`` ring all-gathers or reduce-scatters that move ``payload`` bytes together.

    time = payload × (g-1)/g / bandwidth + messages × latency × hops. A ring inside the domain runs at the
    domain's bandwidth; one that leaves it is bound by the network cards of the ranks it has in each domain
    (α-β model; hops grow with the logarithm of the group: trees and chunked rings).
    """
    domain = layout.domain_bandwidth * coefficients.value("domain_share")
    network = layout.nic_bandwidth * coefficients.value("network_share")
    bandwidth = np.where(group.size > group.inside, np.minimum(domain, network * group.inside), domain)
    hops = np.log2(np.maximum(2.0, group.size))
    wire = payload * (group.size - 1) / group.size / bandwidth
    seconds = wire + messages * hops * coefficients.value("latency_s")
    return np.asarray(np.where(group.size > 1, seconds, 0.0))


def block_tensor_traffic(layout: Layout, coefficients: Coefficients) -> Traffic:
    """Gathers and scatters around the two halves of each block: 8 per block and micro-batch, forward and backward.

    Payload of one: tokens × hidden × bytes per element (Korthikanti et al. 2022); wire bytes take (t-1)/t of it.
    """
    shape, setting = layout.setting.shape, layout.setting
    element = 2.0 if setting.precision == "bf16" else 4.0
    messages = np.where(layout.tp > 1, 8.0 * shape.layers / layout.pp * layout.micro_batches, 0.0)
    payload = messages * element * layout.tokens * shape.hidden
    group = group_of(layout.tp, np.ones_like(layout.tp), setting.fast_domain)
    seconds = collective_seconds(payload, messages, group, layout, coefficients)
    return Traffic("tensor", "all_gather", payload, messages, seconds, group.size > group.inside, False, group.size)


def context_traffic(layout: Layout, coefficients: Coefficients) -> Traffic:
    """Keys and values passed around the ring: once forward, twice backward, per block and micro-batch."""
    shape, setting = layout.setting.shape, layout.setting
    blocks = shape.layers / layout.pp
    messages = np.where(layout.cp > 1, 3.0 * blocks * layout.micro_batches, 0.0)
    kv = 2.0 * shape.kv_heads * shape.head_dim / layout.tp
    payload = messages * 2.0 * layout.micro_batch * setting.seq_len * kv
    group = group_of(layout.cp, layout.tp, setting.fast_domain)
    seconds = collective_seconds(payload, messages, group, layout, coefficients)
    return Traffic("context", "all_gather", payload, messages, seconds, group.size > group.inside, True, group.size)


def pipeline_traffic(layout: Layout, coefficients: Coefficients) -> Traffic:
    """Boundary activations forward and their gradients backward: 2 × m × v messages of tokens × hidden / tp."""
    shape, setting = layout.setting.shape, layout.setting
    element = 2.0 if setting.precision == "bf16" else 4.0
    messages = np.where(layout.pp > 1, 2.0 * layout.micro_batches * layout.vp, 0.0)
    payload = messages * element * layout.tokens * shape.hidden / layout.tp
    inside = layout.tp * layout.cp * layout.dp * 2 <= setting.fast_domain
    rate = np.where(
        inside,
        layout.domain_bandwidth * coefficients.value("domain_share"),
        layout.nic_bandwidth * coefficients.value("network_share"),
    )
    seconds = payload / rate + messages * coefficients.value("latency_s")
    return Traffic("pipeline", "send", payload, messages, seconds, ~inside, True, layout.pp)


def data_traffic(layout: Layout, account: Account, coefficients: Coefficients) -> list[Traffic]:
    """Parameter gathers and gradient reductions over the data-parallel ranks.

    Fully sharded: per pass one gather of the rank's parameters in bf16 (two when resharded after forward), and one
    reduce-scatter in fp32 each time gradients are synchronised: at every micro-batch without a pipeline unless
    accumulation is told not to, once per step with a pipeline (torchtitan 0.3.0). Otherwise: one reduction and,
    where the optimizer is sharded, one gather per step.
    """
    setting = layout.setting
    local = local_parameters(layout)
    m, pipelined = layout.micro_batches, layout.pp > 1
    stride = layout.tp
    if not account.sharded:
        zero = layout.flag("zero_stage")
        group = group_of(layout.dp * layout.cp, stride, setting.fast_domain)
        buckets = np.maximum(1.0, np.ceil(local * 2 / 80e6))
        out = []
        halves = np.where(zero >= 1, 1.0, 2.0)
        reduce = local * account.reduce_bytes * halves
        seconds = collective_seconds(reduce, buckets, group, layout, coefficients)
        primitive = "reduce_scatter" if np.all(zero >= 1) else "all_reduce"
        network = group.size > group.inside
        out.append(Traffic("data", primitive, reduce, buckets, seconds, network, True, group.size))
        gather = np.where(zero >= 1, 2.0 * local, 0.0)
        gathers = np.where(zero >= 1, buckets, 0.0)
        seconds = collective_seconds(gather, gathers, group, layout, coefficients)
        out.append(Traffic("data", "all_gather", gather, gathers, seconds, network, True, group.size))
        return out
    reshard = layout.pool["reshard_after_forward"]
    keeps = np.where(reshard == 0, pipelined, reshard == 2)
    passes = np.where(keeps, np.where(pipelined, 1.0, m), 2.0 * m)
    syncs = np.where(pipelined | (layout.flag("accumulate_without_sync") > 0), 1.0, m)
    groups = np.maximum(1.0, setting.shape.layers / layout.pp / layout.flag("fsdp_bucket")) + 2
    shares = [("data", local, group_of(layout.shard, stride, setting.fast_domain), groups)]
    if setting.shape.is_moe:
        # Experts have a mesh of their own: the ranks that are left over by expert parallelism.
        experts = expert_share(layout) * setting.shape.layers / layout.pp
        left = np.maximum(1.0, np.floor(layout.shard * layout.tp / layout.ep))
        own = group_of(np.where(layout.ep > 1, left, layout.shard), np.maximum(stride, layout.ep), setting.fast_domain)
        shares[0] = ("data", local - experts, shares[0][2], groups)
        shares.append(("expert_data", experts, own, groups))
    out = []
    for dimension, parameters, group, pieces in shares:
        network = group.size > group.inside
        gather, reduce = passes * 2.0 * parameters, syncs * account.reduce_bytes * parameters
        for primitive, payload, messages in (
            ("all_gather", gather, passes * pieces),
            ("reduce_scatter", reduce, syncs * pieces),
        ):
            seconds = collective_seconds(payload, messages, group, layout, coefficients)
            out.append(Traffic(dimension, primitive, payload, messages, seconds, network, True, group.size))
    copies = group_of(layout.replicate, layout.tp * layout.shard, setting.fast_domain)
    both = np.where(layout.replicate > 1, 2 * syncs * account.reduce_bytes * local / layout.shard, 0.0)
    seconds = collective_seconds(both, syncs * groups, copies, layout, coefficients)
    network = copies.size > copies.inside
    out.append(Traffic("data", "all_reduce", both, syncs * groups, seconds, network, True, copies.size))
    return out


def expert_traffic(layout: Layout, coefficients: Coefficients) -> Traffic:
    """Tokens sent to their experts and back: two exchanges forward, two backward per mixture-of-experts block."""
    shape, setting = layout.setting.shape, layout.setting
    blocks = (shape.layers - shape.dense_layers if shape.is_moe else 0) / layout.pp
    messages = np.where(layout.ep > 1, 4.0 * blocks * layout.micro_batches, 0.0)
    payload = messages * 2.0 * layout.tokens / layout.tp * max(1, shape.experts_active) * shape.hidden
    group = group_of(layout.ep, np.ones_like(layout.ep), setting.fast_domain)
    seconds = collective_seconds(payload, messages, group, layout, coefficients)
    return Traffic("expert", "all_to_all", payload, messages, seconds, group.size > group.inside, False, group.size)
