"""The simple account: closed forms on the back of an envelope, for teaching and cross-checks, never for verdicts.

One dense transformer; sizes in elements, results in bytes (SI) and seconds. Sources: Korthikanti et al. 2022 for
34·s·b·h/t, Rajbhandari et al. 2020 for the ZeRO stages, Narayanan et al. 2021 for the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass


ALLOWANCE = 1.2
"""Factor on activations for a gated feed-forward layer's extra tensors."""

OVERHEAD_BYTES = 8e9
"""Flat allowance for logits, context, communicators and fragmentation."""


def layer_activation_bytes(seq_len: int, micro_batch: int, hidden: int, tensor_parallel: int) -> float:
    """Activations of one layer and micro-batch with sequence parallelism and fused attention: 34·s·b·h/t."""
    return 34.0 * seq_len * micro_batch * hidden / tensor_parallel


def layer_input_bytes(seq_len: int, micro_batch: int, hidden: int, tensor_parallel: int) -> float:
    """What full recomputation keeps of one layer: its bf16 input, 2·s·b·h/t."""
    return 2.0 * seq_len * micro_batch * hidden / tensor_parallel


@dataclass(frozen=True)
class SimpleMemory:
    """Memory of one device by the simple account, bytes."""

    parameters: float
    """bf16 parameters, 2w."""

    gradients: float
    """fp32 gradients, 4w."""

    optimizer: float
    """fp32 master copy and Adam moments, 12w / d (ZeRO-1)."""

    activations: float
    """Layer activations in flight × the allowance."""

    overhead: float = OVERHEAD_BYTES
    """The flat allowance."""

    @property
    def static(self) -> float:
        """State without activations."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """Everything."""
        return self.static + self.activations + self.overhead


def simple_memory(
    params: float,
    tensor_parallel: int,
    pipeline_parallel: int,
    data_parallel: int,
    layer_bytes: float,
    inflight_layers: float,
) -> SimpleMemory:
    """2w + 4w + 12w/d + 1.2 × layer bytes × layers in flight + 8 GB, with w = N/(t·p)."""
    local = params / (tensor_parallel * pipeline_parallel)
    return SimpleMemory(2 * local, 4 * local, 12 * local / data_parallel, ALLOWANCE * layer_bytes * inflight_layers)


def interleaved_inflight_layers(pipeline_parallel: int, virtual_stages: int, layers_per_chunk: int) -> int:
    """Layer-micro-batches that the first rank of an interleaved pipeline holds: (2(p-1) + (v-1)p + 1) chunks.

    The plain 1F1B count (p micro-batches of all its layers) is too low for it.
    """
    chunks = 2 * (pipeline_parallel - 1) + (virtual_stages - 1) * pipeline_parallel + 1
    return chunks * layers_per_chunk


def data_parallel_state_bytes(params: float, ranks: int = 1) -> float:
    """bf16 parameters and gradients and fp32 Adam moments, 12 bytes per parameter, sharded over ``ranks``.

    It leaves out an fp32 master copy; with one it is 16.
    """
    return 12.0 * params / ranks


def zero1_bytes(params: float, ranks: int) -> float:
    """ZeRO-1, optimizer sharded: 4P + 8P/X."""
    return 4.0 * params + 8.0 * params / ranks


def zero2_bytes(params: float, ranks: int) -> float:
    """ZeRO-2, optimizer and gradients sharded: 2P + 10P/X."""
    return 2.0 * params + 10.0 * params / ranks


def parameters_and_moments_bytes(params: float) -> float:
    """bf16 parameters and two fp32 moments without gradients: 10 bytes per parameter."""
    return 10.0 * params


def checkpointed_activation_bytes(layers: int, tokens: float, hidden: int, ffn: int) -> float:
    """Three bf16 tensors per layer and token, two of the feed-forward width and one hidden: 2·L·B·(2F + D)."""
    return 2.0 * layers * tokens * (2 * ffn + hidden)


def optimizer_bytes(params: float, tensor_parallel: int, pipeline_parallel: int, data_parallel: int) -> float:
    """fp32 Adam moments sharded over all ranks: 8N/(t·p·d)."""
    return 8.0 * params / (tensor_parallel * pipeline_parallel * data_parallel)


def full_recompute_bytes(layers: int, layer_input: float) -> float:
    """Layer inputs of all layers × the allowance."""
    return ALLOWANCE * layers * layer_input


def block_recompute(layers: int, of: int, inflight: int, layer_bytes: float) -> tuple[float, float]:
    """Bytes saved by recomputing ``layers`` of ``of`` layers, and the extra FLOP as a share: n/of × 1/3."""
    return layers * layer_bytes * inflight, layers / of / 3


def fully_sharded_bytes(
    local_parameters: float, micro_batches: int, reshard: bool = True, sync_every_micro_batch: bool = False
) -> float:
    """Traffic of one device and step: m × (2 gathers, 1 without resharding) × 2w and 4w per gradient reduction."""
    gathers = micro_batches * (2 if reshard else 1) * 2.0 * local_parameters
    return gathers + (micro_batches if sync_every_micro_batch else 1) * 4.0 * local_parameters


def micro_batch_sweep(
    params: float,
    tensor_parallel: int,
    pipeline_parallel: int,
    data_parallel: int,
    global_batch_seqs: int,
    layer_bytes: float,
    inflight_layers: float,
    virtual_stages: int,
    micro_batches: list[int],
) -> list[tuple[int, float, float, float]]:
    """For each micro-batch size: (m, bubble, bubble interleaved, total bytes), bubbles over useful time."""
    rows = []
    for size in micro_batches:
        m = global_batch_seqs // (data_parallel * size)
        bubble = (pipeline_parallel - 1) / m
        memory = simple_memory(
            params, tensor_parallel, pipeline_parallel, data_parallel, layer_bytes * size, inflight_layers
        )
        rows.append((m, bubble, bubble / virtual_stages, memory.total))
    return rows


def budget_seconds(
    kernel_s: float,
    bubble: float,
    communication_s: float,
    recompute_s: float = 0.0,
    data_s: float = 0.0,
    launch_s: float = 0.0,
    straggler_s: float = 0.0,
) -> float:
    """A step as kernel time, its bubble share and the other losses added up."""
    return kernel_s * (1 + bubble) + communication_s + recompute_s + data_s + launch_s + straggler_s


def overruns(items: list[float], points: float) -> tuple[float, list[float]]:
    """Sum of overruns in seconds, and how many MFU points of a gap of ``points`` each explains."""
    whole = sum(items)
    return whole, [item / whole * points for item in items]


def fp8_saving(gemm_share: float, gemm_saving: float) -> float:
    """Share of compute time that fp8 saves: only matrix products get faster. Of the step it is less."""
    return gemm_share * gemm_saving
