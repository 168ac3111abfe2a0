"""What a breakdown says: steps with their parts, stragglers, tables and warnings, and the JSON of it."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from typing import Any


PARTS = (
    "bubble",
    "exposed_communication",
    "recompute",
    "data_wait",
    "kernel_efficiency",
    "cpu_launch",
    "straggler",
)
"""The seven parts of a step beside its useful time."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One class of communication of a step: same kind, group and size."""

    kind: str
    """``all_gather``, ``p2p`` …, or ``unknown``."""

    dimension: str
    """``TP``, ``FSDP``, ``DP``, ``PP``, ``CP``, ``EP``, or empty when nothing tells."""

    name: str
    """Name of the first kernel or annotation of the class."""

    count: int
    """How many in the step."""

    size_bytes: int | None
    """Bytes of each on this rank, when the trace says it."""

    total_s: float
    """Time on the device, waiting included, seconds."""

    exposed_s: float
    """Of it, with no compute beside it, seconds."""

    waiting_s: float
    """Of the exposed time, waiting for late peers or unexplained, seconds."""

    bandwidth_gb_s: float | None
    """Bytes over the shortest transfer (last arrival to end, the fastest rank), GB/s."""


@dataclass(frozen=True, kw_only=True)
class MatrixProduct:
    """All matrix products of one shape in a step."""

    operator: str
    """Operator that asked for it."""

    m: int
    """Rows of the result, batch included."""

    n: int
    """Columns of the result."""

    k: int
    """Contracted length."""

    dtype: str
    """Element type of the first input."""

    count: int
    """How many in the step."""

    time_s: float
    """Time on the device, seconds."""

    tflops: float
    """Achieved rate, TFLOP/s, by 2·M·N·K."""

    efficiency_pct: float | None
    """Share of the peak, when the peak is known."""

    roofline_pct: float | None = None
    """Share of what the shape allows: the peak, or its FLOP per byte times the memory bandwidth where that is less."""

    note: str = ""
    """What is unfriendly about the shape."""


@dataclass(frozen=True, kw_only=True)
class StepBreakdown:
    """One step of one rank: useful time, seven parts and the rest add up to the step, to 1 µs."""

    file: str
    """The trace."""

    rank: int
    """Rank of the process."""

    step: int
    """Number of the step."""

    step_s: float
    """Length of the step, seconds."""

    ideal_s: float | None
    """Model FLOP of this rank / nominal peak, seconds; None when not given."""

    useful_s: float
    """The ideal time where it is known, else all compute that is no recompute, seconds."""

    parts_s: dict[str, float]
    """Seconds of each of :data:`PARTS`."""

    unexplained_s: float
    """Seconds that nothing in the given traces explains."""

    compute_s: float
    """Time with a compute kernel running, seconds."""

    coverage_pct: float
    """Share of kernel time whose kernels are recognised."""

    launches: int
    """Launch calls of the step (a graph replay is one)."""

    launches_without_kernel: int
    """Launch calls whose kernels the trace lacks."""

    kernels: int
    """Kernels of the step; without a device, the CPU operators that compute."""

    unknown_kernels: tuple[dict[str, Any], ...] = ()
    """Kernels that are not recognised: name, count, seconds, share of kernel time."""

    time_by_kind_s: dict[str, float] = field(default_factory=dict)
    """Device time by kind of kernel (sum over kernels, overlaps counted each), seconds."""

    exposed_by_dimension_s: dict[str, float] = field(default_factory=dict)
    """Exposed communication by parallelism, seconds."""

    launch_bound_s: float = 0.0
    """Of the CPU-launch part: idle that ended with a kernel launched after the device had run dry, seconds."""

    sync_calls: int = 0
    """Calls of the step that blocked the CPU on the device."""

    sync_s: float = 0.0
    """Time in them, seconds."""

    collectives: tuple[Collective, ...] = ()
    """Classes of communication, most exposed first (20 at most)."""

    matrix_products: tuple[MatrixProduct, ...] = ()
    """Matrix products by shape, longest first (20 at most)."""

    inferred: str = ""
    """How the step's bounds were found when the trace has no marks."""

    reliable: bool = True
    """False when the trace lost so many kernels that its idle time cannot be believed."""

    recompute_basis: str = ""
    """How recompute was found."""

    measured_step_s: float | None = None
    """The step time without the profiler, when given, seconds."""

    clock_deficit_s: float | None = None
    """Of the kernel-efficiency part: what the device lost by running below its peak clock, seconds."""

    @property
    def overhead_pct(self) -> float | None:
        """How much longer the traced step is than the measured one, percent."""
        return None if not self.measured_step_s else 100 * (self.step_s / self.measured_step_s - 1)

    @property
    def mfu_pct(self) -> float | None:
        """Ideal time over step time; by the step without the profiler where that is known."""
        return None if self.ideal_s is None else 100 * self.ideal_s / (self.measured_step_s or self.step_s)

    @property
    def scaled_parts_s(self) -> dict[str, float] | None:
        """Parts of the step without the profiler, whose overhead slows launches: it is taken from CPU launch first."""
        if not self.measured_step_s:
            return None
        overhead = max(0.0, self.step_s - self.measured_step_s)
        parts = dict(self.parts_s)
        for part in ("cpu_launch", "data_wait"):
            taken = min(parts[part], overhead)
            parts[part] -= taken
            overhead -= taken
        rest = sum(parts.values())
        if overhead > 0 and rest > 0:
            parts = {part: value * max(0.0, 1 - overhead / rest) for part, value in parts.items()}
        return parts

    def points(self, part: str) -> tuple[float, float | None] | None:
        """MFU points that a part costs: (first order, exact), or None without an ideal time.

        First order is Δ·ideal/step²; exact is the MFU of the step without the part minus the MFU of the step (None
        when nothing would be left).
        """
        value = self.unexplained_s if part == "unexplained" else self.parts_s[part]
        if self.ideal_s is None:
            return None
        without = self.step_s - value
        exact = 100 * self.ideal_s / without - 100 * self.ideal_s / self.step_s if without > 0 else None
        return 100 * value * self.ideal_s / self.step_s**2, exact

    def to_json(self) -> dict[str, Any]:
        """The step with the keys of the command-line contract."""
        values = asdict(self)
        values["unknown_kernels"] = list(self.unknown_kernels)
        values["mfu_pct"] = self.mfu_pct
        values["profiler_overhead_pct"] = self.overhead_pct
        values["scaled_parts_s"] = self.scaled_parts_s
        values["mfu_points"] = (
            None
            if self.ideal_s is None
            else {
                part: dict(zip(("first_order", "exact"), self.points(part) or ())) for part in (*PARTS, "unexplained")
            }
        )
        return values


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """A rank that others waited for."""

    rank: int
    """The rank."""

    late_s: float
    """How much later than the median rank it came to collectives, summed over the analysed steps, seconds."""

    collectives: int
    """Collectives to which it came last."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One difference from what was expected, with its likely cause and the change to make."""

    part: str
    """Which part."""

    found_s: float
    """What was found, seconds."""

    expected_s: tuple[float, float]
    """What was expected: (low, high), seconds."""

    group: str
    """``configuration``, ``hardware`` or ``structure``: the order in which to act."""

    cause: str
    """The likely cause."""

    evidence: str
    """What in the trace speaks for it."""

    change: str
    """What to change."""


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """The breakdown of one or more traces."""

    steps: list[StepBreakdown]
    """Every analysed step of every rank, by step and rank."""

    stragglers: list[Straggler]
    """Ranks that others waited for, the latest first."""

    warnings: list[str]
    """What to know before believing the figures."""

    findings: list[Finding] = field(default_factory=list)
    """What is outside the expected ranges, in the order to act."""

    expected_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The expected ranges that were given, seconds."""

    @property
    def straggler_loss_s(self) -> float:
        """Largest straggler part of any rank, summed over the analysed steps, seconds; whoever was late."""
        by_rank: dict[int, float] = {}
        for step in self.steps:
            by_rank[step.rank] = by_rank.get(step.rank, 0.0) + step.parts_s["straggler"]
        return max(by_rank.values(), default=0.0)

    def to_json(self) -> dict[str, Any]:
        """The document of ``tune breakdown --json``."""
        return {
            "steps": [step.to_json() for step in self.steps],
            "stragglers": [asdict(straggler) for straggler in self.stragglers],
            "straggler_loss_s": self.straggler_loss_s,
            "findings": [asdict(finding) for finding in self.findings],
            "expected_s": {part: list(bounds) for part, bounds in self.expected_s.items()},
            "warnings": list(self.warnings),
        }
