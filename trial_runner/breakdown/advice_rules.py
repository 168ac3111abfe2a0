"""The rule table of the advice: for each part its causes, what in a trace speaks for each, and the change to make.

The order inside a part is the order of asking. A rule's test looks at :class:`Evidence` and returns what it saw, or
None. The causes and their order (configuration errors before hardware before structure) follow the second seed
document, chapters 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import statistics

from trial_runner.breakdown.result import Breakdown
from trial_runner.breakdown.result import Collective


GROUPS = ("configuration", "hardware", "structure", "expectation")
"""Order in which to act."""


class Evidence:
    """What the analysed steps say, as means over steps and ranks."""

    def __init__(self, breakdown: Breakdown) -> None:
        self.steps = breakdown.steps
        self.stragglers = breakdown.stragglers
        self.step_s = statistics.fmean(step.step_s for step in self.steps)

    def mean(self, part: str) -> float:
        """Mean seconds of a part."""
        return statistics.fmean(step.parts_s[part] for step in self.steps)

    def collectives(self, *dimensions: str) -> list[Collective]:
        """Collectives of the given parallelisms (all when none is given), point to point left out."""
        rows = [row for step in self.steps for row in step.collectives if row.kind != "p2p"]
        return [row for row in rows if not dimensions or row.dimension in dimensions]

    def kind_share(self, *kinds: str) -> float:
        """Share of compute-kernel time of the given kinds of kernel."""
        total = sum(
            value for step in self.steps for kind, value in step.time_by_kind_s.items() if kind != "communication"
        )
        mine = sum(value for step in self.steps for kind, value in step.time_by_kind_s.items() if kind in kinds)
        return mine / total if total else 0.0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One cause of one part."""

    part: str
    """Which part."""

    group: str
    """When to act: one of :data:`GROUPS`."""

    cause: str
    """The cause."""

    change: str
    """The change to make."""

    seen: Callable[[Evidence], str | None]
    """What in the trace speaks for it, or None."""


def _overlap_off(evidence: Evidence) -> str | None:
    rows = evidence.collectives("FSDP", "DP", "")
    total, exposed = sum(row.total_s for row in rows), sum(row.exposed_s for row in rows)
    if total and exposed > 0.7 * total:
        return f"{100 * exposed / total:.0f}% of data-parallel communication time has no compute beside it"
    return None


def _bucket_large(evidence: Evidence) -> str | None:
    rows = [row for row in evidence.collectives("FSDP", "DP", "") if row.exposed_s > 0.05 * evidence.step_s]
    rows = [row for row in rows if row.count <= 4 and (row.size_bytes or 0) > 64 << 20]
    if rows:
        worst, size = rows[0], (rows[0].size_bytes or 0) / 2**20
        return f"{worst.count} {worst.kind} of {size:.0f} MiB each, exposed {worst.exposed_s:.4f} s"
    return None


def _bucket_small(evidence: Evidence) -> str | None:
    rows = [row for row in evidence.collectives("FSDP", "DP", "") if row.size_bytes is not None]
    small = [row for row in rows if (row.size_bytes or 0) < 1 << 20]
    count = sum(row.count for row in small) / len(evidence.steps)
    if count > 50 and sum(row.exposed_s for row in small) > 0.3 * sum(row.exposed_s for row in rows):
        return f"{count:.0f} collectives below 1 MiB per step"
    return None


def _tensor_parallel(evidence: Evidence) -> str | None:
    rows = evidence.collectives("TP")
    exposed = sum(row.exposed_s for row in rows) / len(evidence.steps)
    if exposed > 0.3 * evidence.mean("exposed_communication") and exposed > 0.01 * evidence.step_s:
        return f"tensor-parallel collectives are exposed for {exposed:.4f} s a step"
    return None


def _contention(evidence: Evidence) -> str | None:
    for row in evidence.collectives():
        hidden = row.total_s - row.exposed_s
        if row.size_bytes and row.bandwidth_gb_s and row.count > 1 and hidden > 0.5 * row.total_s:
            alone = row.count * row.size_bytes / (row.bandwidth_gb_s * 1e9)
            if row.total_s > 1.6 * alone:
                return f"{row.kind} beside compute take {row.total_s / alone:.1f} times as long as the fastest alone"
    return None


def _synchronises(evidence: Evidence) -> str | None:
    calls = statistics.fmean(step.sync_calls for step in evidence.steps)
    seconds = statistics.fmean(step.sync_s for step in evidence.steps)
    if calls >= 4 and seconds > 0.02 * evidence.step_s:
        return f"{calls:.0f} synchronising calls a step block the CPU for {seconds:.4f} s"
    return None


def _late_launches(evidence: Evidence) -> str | None:
    bound = statistics.fmean(step.launch_bound_s for step in evidence.steps)
    if bound > 0.3 * evidence.mean("cpu_launch") and bound > 0.01 * evidence.step_s:
        return f"for {bound:.4f} s the device waits for a kernel that the CPU had not launched yet"
    return None


def _small_kernels(evidence: Evidence) -> str | None:
    kernels = statistics.fmean(step.kernels for step in evidence.steps)
    compute = statistics.fmean(step.compute_s for step in evidence.steps)
    if kernels > 500 and compute / kernels < 50e-6:
        return f"{kernels:.0f} kernels a step, {1e6 * compute / kernels:.0f} µs each"
    return None


def _shapes(evidence: Evidence) -> str | None:
    for step in evidence.steps:
        for row in step.matrix_products:
            if row.note and row.time_s > 0.01 * step.compute_s:
                rate = "" if row.efficiency_pct is None else f" at {row.efficiency_pct:.0f}% of peak"
                return f"{row.operator} {row.m}×{row.n}×{row.k}{rate}, {row.time_s:.4f} s: {row.note}"
    return None


def _far_from_peak(evidence: Evidence) -> str | None:
    rows = [row for step in evidence.steps for row in step.matrix_products if row.efficiency_pct is not None]
    seconds = sum(row.time_s for row in rows)
    if not seconds:
        return None
    share = sum((row.efficiency_pct or 0.0) * row.time_s for row in rows) / seconds
    worst = max(rows, key=lambda row: row.time_s * (100 - (row.efficiency_pct or 0.0)))
    if share < 70:
        shape = f"{worst.m}×{worst.n}×{worst.k} at {worst.efficiency_pct:.0f}%"
        return f"matrix products run at {share:.0f}% of the peak; most is lost in {shape}"
    return None


def _unfused(evidence: Evidence) -> str | None:
    share = 1 - evidence.kind_share("gemm", "attention", "convolution")
    if evidence.steps[0].time_by_kind_s and share > 0.3:
        return f"{100 * share:.0f}% of compute-kernel time is neither matrix product nor attention"
    return None


def _clock(evidence: Evidence) -> str | None:
    lost = [step.clock_deficit_s for step in evidence.steps if step.clock_deficit_s]
    if lost and statistics.fmean(lost) > 0.01 * evidence.step_s:
        return f"clocks below the peak clock cost {statistics.fmean(lost):.4f} s a step"
    return None


def _recomputes(evidence: Evidence) -> str | None:
    if evidence.mean("recompute") > 0:
        return f"forward runs again inside backward for {evidence.mean('recompute'):.4f} s a step"
    return None


def _imbalance(evidence: Evidence) -> str | None:
    by_rank: dict[int, list[float]] = {}
    for step in evidence.steps:
        by_rank.setdefault(step.rank, []).append(step.compute_s)
    means = {rank: statistics.fmean(values) for rank, values in by_rank.items()}
    middle = statistics.median(means.values())
    if len(means) > 1 and max(means.values()) > 1.05 * middle:
        rank = max(means, key=lambda key: means[key])
        return f"rank {rank} computes {means[rank]:.4f} s a step, the median rank {middle:.4f} s"
    return None


def _slow_rank(evidence: Evidence) -> str | None:
    if evidence.stragglers:
        first = evidence.stragglers[0]
        return f"rank {first.rank} came to {first.collectives} collectives last, {first.late_s:.4f} s late in sum"
    return None


def _always(text: str) -> Callable[[Evidence], str | None]:
    return lambda evidence: text


RULES = (
    Rule(
        part="exposed_communication",
        group="configuration",
        cause="communication is not overlapped with compute",
        change="turn prefetching on (forward_prefetch), keep reshard_after_forward at its default, and check that no "
        "CUDA_DEVICE_MAX_CONNECTIONS=1 or blocking wait serialises the streams",
        seen=_overlap_off,
    ),
    Rule(
        part="exposed_communication",
        group="configuration",
        cause="communication buckets are too large: the first and the last cannot hide",
        change="fewer blocks per group (fsdp_bucket)",
        seen=_bucket_large,
    ),
    Rule(
        part="exposed_communication",
        group="configuration",
        cause="communication buckets are too small: latency, not bandwidth, is paid",
        change="more blocks per group (fsdp_bucket), or accumulate_without_sync",
        seen=_bucket_small,
    ),
    Rule(
        part="exposed_communication",
        group="configuration",
        cause="tensor-parallel collectives stand on the critical path",
        change="async_tp, a smaller tensor_parallel, or a larger micro_batch",
        seen=_tensor_parallel,
    ),
    Rule(
        part="exposed_communication",
        group="configuration",
        cause="the CPU synchronises with the device",
        change="remove .item(), prints of tensors and explicit synchronisation from the step",
        seen=_synchronises,
    ),
    Rule(
        part="exposed_communication",
        group="configuration",
        cause="communication and compute kernels compete for the same multiprocessors",
        change="fewer communication channels (an env list with NCCL_MAX_NCHANNELS), or copy-engine collectives",
        seen=_contention,
    ),
    Rule(
        part="exposed_communication",
        group="configuration",
        cause="communication is launched late because the CPU is behind",
        change="compile, or CUDA graphs where the schedule allows them",
        seen=_late_launches,
    ),
    Rule(
        part="cpu_launch",
        group="configuration",
        cause="many small kernels",
        change="compile; a larger micro_batch halves the share each time it doubles; CUDA graphs",
        seen=_small_kernels,
    ),
    Rule(
        part="cpu_launch",
        group="configuration",
        cause="kernels are launched late",
        change="compile, or CUDA graphs where the schedule allows them; keep other processes off the trainer's cores",
        seen=_late_launches,
    ),
    Rule(
        part="cpu_launch",
        group="configuration",
        cause="the CPU synchronises with the device",
        change="remove .item(), prints of tensors and explicit synchronisation from the step",
        seen=_synchronises,
    ),
    Rule(
        part="kernel_efficiency",
        group="configuration",
        cause="matrix products of unfriendly shape",
        change="pad the vocabulary to a multiple of 128 × tensor_parallel, fuse QKV, a larger micro_batch",
        seen=_shapes,
    ),
    Rule(
        part="kernel_efficiency",
        group="configuration",
        cause="matrix products far below the peak",
        change="longer products: a larger micro_batch or less tensor_parallel; check that the precision is the job's",
        seen=_far_from_peak,
    ),
    Rule(
        part="kernel_efficiency",
        group="configuration",
        cause="unfused kernels beside the matrix products",
        change="compile, fused norms, rotary embedding, activation and loss",
        seen=_unfused,
    ),
    Rule(
        part="kernel_efficiency",
        group="hardware",
        cause="the device runs below its peak clock",
        change="check power cap and cooling; compare throttle reasons of the nodes",
        seen=_clock,
    ),
    Rule(
        part="recompute",
        group="configuration",
        cause="activation checkpointing that memory may not need",
        change="compare the peak reserved memory with the device; if it fits, selective, none, or first_n of each "
        "stage",
        seen=_recomputes,
    ),
    Rule(
        part="data_wait",
        group="configuration",
        cause="the data loader is slower than the step",
        change="more loader workers with prefetch and pinned memory; tokenise before training; read from local disks",
        seen=_always("the device is idle while the training loop waits for its next batch"),
    ),
    Rule(
        part="straggler",
        group="hardware",
        cause="a slow rank keeps the others waiting",
        change="compare its clocks, memory errors and links with the others, and take its node out",
        seen=_slow_rank,
    ),
    Rule(
        part="bubble",
        group="structure",
        cause="stages of unequal work",
        change="fewer layers on the first and last stage (module_fqns_per_model_part)",
        seen=_imbalance,
    ),
    Rule(
        part="bubble",
        group="structure",
        cause="too few micro-batches for the number of stages",
        change="first balance the stages, then more virtual_stages, then more micro-batches or fewer pipeline stages",
        seen=_always("the device waits for its neighbour's activations or gradients"),
    ),
)
"""All causes, in the order of asking inside each part."""
