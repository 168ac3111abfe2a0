"""Decision rules: closed-form limits that say early which degrees can work, each with its source.

They reason about one matrix-product pair per layer and rings at full bandwidth, so they are rules of thumb that the
ledger's own numbers overrule. Symbols: C peak FLOP/s of a device, W bandwidth bytes/s (bidirectional where the
source says so), B tokens of the global batch, F feed-forward width, N devices, X data-parallel (FSDP) ranks, Y
tensor-parallel ranks, M_X and M_Y mesh axes that each may use. Source, where none is named: Austin et al., How to
Scale Your Model (2025), chapter "Training".
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from math import sqrt


CONTEXT_PARALLEL_FROM = 32768
"""Tokens in a sequence from which splitting the sequence itself is worth a dimension."""

BUBBLE_ROUNDS = 4
"""Micro-batches per pipeline rank that keep the idle share of a plain 1F1B below a fifth (m ≥ 4p)."""


def arithmetic_intensity(peak_flops: float, bandwidth: float) -> float:
    """FLOP per byte, C / W, that compute must do for each byte moved to stay compute-bound.

    With device memory's bandwidth it is the intensity of one matrix product; with a link's bandwidth it is the
    per-device batch in tokens below which that link decides. The two must not be mixed up.
    """
    return peak_flops / bandwidth


def tensor_parallel_limit(ffn: int, intensity: float, axes: int = 1) -> int:
    """Most tensor-parallel ranks that stay compute-bound: floor(axes × F / (C/W)); the batch does not matter."""
    return floor(axes * ffn / intensity)


def data_parallel_critical_tokens(intensity: float, axes: int = 1) -> float:
    """Tokens per device below which (fully sharded) data parallelism is bound by the link: (C/W) / axes."""
    return intensity / axes


@dataclass(frozen=True)
class Mixed:
    """The best split of devices between fully sharded data and tensor parallelism."""

    data: float
    """X_opt, ranks (not rounded)."""

    tensor: float
    """Y_opt, ranks (not rounded)."""


def mixed_optimum(tokens: float, ffn: int, devices: int, axes_data: int = 1, axes_tensor: int = 1) -> Mixed:
    """X_opt = sqrt(B/F × M_X/M_Y × N), Y_opt = N / X_opt: both kinds of traffic take equally long."""
    data = sqrt(tokens / ffn * axes_data / axes_tensor * devices)
    return Mixed(data, devices / data)


def mixed_critical_tokens(ffn: int, intensity: float, axes_product: float = 1.0) -> float:
    """Tokens per device below which even the best mix is bound by the link: (C/W)² / (M_X M_Y F)."""
    return intensity**2 / (axes_product * ffn)


def cross_pod_critical_tokens(peak_flops: float, pod_bandwidth: float) -> float:
    """Tokens per pod below which data parallelism across pods is bound by the pod network: C / W_pod."""
    return peak_flops / pod_bandwidth


def needs_context_parallel(seq_len: int) -> bool:
    """Whether sequences are so long that context parallelism belongs in the pool."""
    return seq_len >= CONTEXT_PARALLEL_FROM


def enough_micro_batches(micro_batches: int, pipeline_parallel: int) -> bool:
    """Whether the pipeline has at least four micro-batches per rank (idle over useful time below a quarter)."""
    return pipeline_parallel == 1 or micro_batches >= BUBBLE_ROUNDS * pipeline_parallel


@dataclass(frozen=True)
class ShardingChoice:
    """Sharding of the state over the data-parallel ranks, with the traffic that decides."""

    choice: str
    """``zero1`` or ``fsdp``."""

    zero1_bytes: float
    """Bytes per device and step with only the optimizer sharded."""

    fsdp_bytes: float
    """Bytes per device and step with everything sharded."""


def zero1_or_fsdp(
    local_parameters: float, micro_batches: int, capacity_bytes: float, reshard: bool = True
) -> ShardingChoice:
    """Shard only the optimizer where the rest fits, since full sharding moves parameters at every micro-batch.

    ZeRO-1 moves 2 + 2 bytes per local parameter and step (bf16 gradients out, bf16 parameters back); full sharding
    m × (2 gathers, 1 when not resharded) × 2 bytes and one fp32 reduction of 4.

    Args:
        local_parameters: parameters on one device after tensor and pipeline parallelism.
        micro_batches: micro-batches per step.
        capacity_bytes: device memory that static state may take; ZeRO-1 keeps 6 bytes per local parameter.
        reshard: whether full sharding frees parameters after forward.
    """
    zero1 = 4.0 * local_parameters
    gathers = 2 if reshard else 1
    fsdp = micro_batches * gathers * 2.0 * local_parameters + 4.0 * local_parameters
    fits = 6.0 * local_parameters <= capacity_bytes
    return ShardingChoice("zero1" if fits and zero1 <= fsdp else "fsdp", zero1, fsdp)


def offload_round_trip_s(size_bytes: float, pcie_bandwidth: float) -> float:
    """Seconds to copy activations to host memory and back: 2 × bytes / one-direction bandwidth."""
    return 2 * size_bytes / pcie_bandwidth


@dataclass(frozen=True)
class Offload:
    """What keeping some blocks' activations in host memory gains and costs."""

    gain_bytes: float
    """Device memory that becomes free."""

    cost_s: float
    """Seconds per micro-batch that copies stay visible."""


def offload(block_bytes: float, blocks: int, inflight: float, pcie_bandwidth: float, block_seconds: float) -> Offload:
    """Offload the activations of ``blocks`` blocks: forward copies them out, backward back in.

    The copies of one block hide behind the computation of one other, forward and backward; what is longer stays
    visible. It pays only where memory is short and a block computes longer than its copies take.

    Args:
        block_bytes: activations of one block and micro-batch.
        blocks: blocks whose activations leave.
        inflight: micro-batches whose activations are held at once.
        pcie_bandwidth: host link, one direction, bytes/s.
        block_seconds: forward and backward time of one block and micro-batch.
    """
    visible = max(0.0, offload_round_trip_s(block_bytes, pcie_bandwidth) - block_seconds)
    return Offload(block_bytes * blocks * inflight, blocks * visible)


def step_seconds(params: float, tokens: float, devices: int, peak_flops: float, mfu: float) -> float:
    """Seconds per step from 6 FLOP per parameter and token: 6·N·tokens / (devices × C × MFU)."""
    return 6 * params * tokens / (devices * peak_flops * mfu)


def tokens_per_second(params: float, devices: int, achieved_flops: float) -> float:
    """Tokens per second of the whole cluster at an achieved FLOP/s per device: devices × FLOP/s / (6·N)."""
    return devices * achieved_flops / (6 * params)
