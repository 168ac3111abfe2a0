"""What a probe measures and finds, as data: the order to its ranks, figures by device and node, devices that lag."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
import json
from statistics import median
from typing import Any

import psutil

from search_space.errors import UserError
from search_space.model import ModelShape


MARK = "ledgertune-probe:"
"""Starts the line that carries the figures."""

ORDER = "LEDGERTUNE_PROBE"
"""Environment variable that carries the order to a rank."""

SUSPECT = 0.75
"""What gives less than this share of the median is a suspect."""

MESSAGES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
"""Message sizes of the links' figures, bytes."""

ROUND_S = 1.5
"""About how long a round over all parts takes, seconds."""


@dataclass(frozen=True, kw_only=True)
class ProbeOrder:
    """What the ranks of a probe measure."""

    device: str
    """``cpu`` or ``gpu``."""

    precision: str
    """``bf16`` or ``fp32``."""

    shapes: Sequence[Sequence[int]]
    """Matrix products: (rows, depth, width)."""

    ranks_per_node: int
    """Devices of a node."""

    seconds: float
    """How long to measure, start-up not counted."""

    rounds: int
    """Rounds over all parts in that time."""

    copy_bytes: int
    """Bytes of the buffer that is copied: several times any cache."""

    copy_pieces: int
    """Pieces in which it is copied, each timed by itself."""

    messages: Sequence[int] = MESSAGES
    """Message sizes of the links' figures, bytes."""

    def environment(self) -> dict[str, str]:
        """The variable that carries it to a rank."""
        return {ORDER: json.dumps(asdict(self))}


def make_order(
    shapes: Sequence[Sequence[int]], *, device: str, precision: str, ranks_per_node: int, seconds: float
) -> ProbeOrder:
    """The order for devices like these; a copy takes at most an eighth of the free host memory on a CPU."""
    copied = 1 << 30
    if device == "cpu":
        free = psutil.virtual_memory().available // (16 * ranks_per_node)
        copied = max(1 << 24, min(1 << 28, free >> 20 << 20))
    return ProbeOrder(
        device=device,
        precision=precision,
        shapes=[list(shape) for shape in shapes],
        ranks_per_node=ranks_per_node,
        seconds=seconds,
        rounds=max(1, round(seconds / ROUND_S)),
        copy_bytes=copied,
        # Short pieces find a moment in which nobody else wants the memory; on a GPU they would time the launch.
        copy_pieces=16 if device == "cpu" else 1,
    )


@dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """What one device gives. A best figure is what can be had, a mean one what was had."""

    rank: int
    """Its place on the node."""

    products: list[dict[str, Any]]
    """Per shape (rows, depth, width): best and mean TFLOP/s."""

    memory_gb_s: float
    """Bytes read and written by a copy, best GB/s."""

    memory_mean_gb_s: float = 0.0
    """The same in the mean."""

    links: list[dict[str, Any]]
    """Per message size: bytes, best seconds, best and mean GB/s of an all-gather over the node's devices, as this rank
    saw it."""

    network: list[dict[str, Any]] = field(default_factory=list)
    """The same over the devices at this place of every node; empty: one node."""

    exchange_gb_s: float | None = None
    """GB/s each way with a neighbouring node, the better of two neighbours; None: one node."""

    own_cpu_s: float = 0.0
    """CPU seconds of its rank while it measured."""

    host_busy_s: float = 0.0
    """CPU seconds for which the node's cores were busy meanwhile."""

    host_cores_s: float = 0.0
    """CPU seconds that they had."""

    @property
    def mean_tflops(self) -> float:
        """Mean TFLOP/s over all shapes."""
        return sum(product["mean_tflops"] for product in self.products) / len(self.products)


@dataclass(frozen=True, kw_only=True)
class NodeFigures:
    """What one node gives."""

    node: str
    """Its name."""

    devices: list[DeviceFigures]
    """Every device."""

    suspects: list[dict[str, Any]]
    """What lags on it: rank (None: the node's links), what, its figure, the median."""

    elapsed_s: float
    """Wall time, seconds."""

    others_share: float = 0.0
    """Share of the node's cores that went to anything but the probe while it measured."""

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)


def read_figures(lines: Iterable[str]) -> list[DeviceFigures]:
    """Every rank's figures, in the order of ranks, from what rank 0 printed.

    Raises:
        UserError: it did not print any.
    """
    for line in lines:
        if line.startswith(MARK):
            return [DeviceFigures(**values) for values in json.loads(line[len(MARK) :])]
    raise UserError("probe: rank 0 ended without figures")


def node_figures(devices: Sequence[DeviceFigures], names: Sequence[str], elapsed_s: float) -> list[NodeFigures]:
    """Figures by node, suspects named.

    Args:
        devices: figures in the order of ranks, equally many a node.
        names: the nodes' names.
        elapsed_s: wall time, seconds.
    """
    width = len(devices) // len(names)
    groups = [list(devices[i * width : (i + 1) * width]) for i in range(len(names))]
    found = suspects_of(groups)
    return [
        NodeFigures(node=name, devices=group, suspects=suspects, elapsed_s=elapsed_s, others_share=others_share(group))
        for name, group, suspects in zip(names, groups, found)
    ]


def others_share(devices: Sequence[DeviceFigures]) -> float:
    """Share of a node's cores that others used: (busy - the ranks' own) / what the cores had."""
    first = devices[0]
    if first.host_cores_s <= 0:
        return 0.0
    others = first.host_busy_s - sum(device.own_cpu_s for device in devices)
    return min(1.0, max(0.0, others / first.host_cores_s))


def suspects_of(nodes: Sequence[Sequence[DeviceFigures]]) -> list[list[dict[str, Any]]]:
    """What lags on each node: below :data:`SUSPECT` of the median over all devices (over all nodes, for links).

    A device is judged by what it gave in the mean, for one that is held up now and then can still be fast at best. The
    links of a node are judged together, since one slow link holds up every rank of a collective, and among three nodes
    or more, since of two none is the usual one.
    """
    out: list[list[dict[str, Any]]] = [[] for _ in nodes]
    everything = [device for node in nodes for device in node]
    for what, value in (("matrix products", _computed), ("memory bandwidth", _copied)):
        middle = median(value(device) for device in everything)
        for suspects, node in zip(out, nodes):
            for device in node:
                if value(device) < SUSPECT * middle:
                    suspects.append({"rank": device.rank, "what": what, "value": value(device), "median": middle})
    if len(nodes) < 3:
        return out
    for what, rate in (("links inside the node", _inside), ("links to other nodes", _outside)):
        rates = [rate(node) for node in nodes]
        middle = median(rates)
        for suspects, found in zip(out, rates):
            if found < SUSPECT * middle:
                suspects.append({"rank": None, "what": what, "value": found, "median": middle})
    return out


def _computed(device: DeviceFigures) -> float:
    return device.mean_tflops


def _copied(device: DeviceFigures) -> float:
    return device.memory_mean_gb_s


def _inside(node: Sequence[DeviceFigures]) -> float:
    return min((device.links[-1]["gb_s"] for device in node if device.links), default=0.0)


def _outside(node: Sequence[DeviceFigures]) -> float:
    return min((device.exchange_gb_s for device in node if device.exchange_gb_s is not None), default=0.0)


def shapes_of(model: ModelShape, tokens: int, tensor_parallel: int = 1, limit: int = 1 << 31) -> list[list[int]]:
    """(rows, depth, width) of a block's products: query/key/value, attention output, up, down.

    Rows are cut so that the largest product takes at most ``limit`` multiply-adds: on a CPU a whole micro-batch would
    take minutes.
    """
    hidden, tp = model.hidden, tensor_parallel
    wide = model.ffn if not model.is_moe else model.expert_ffn
    pairs = [
        (hidden, (model.query_width + 2 * model.kv_heads * model.head_dim) // tp),
        (model.value_width // tp, hidden),
        (hidden, max(1, wide // tp)),
        (max(1, wide // tp), hidden),
    ]
    largest = max(depth * width for depth, width in pairs)
    rows = max(16, min(tokens, limit // largest))
    return [[rows, depth, width] for depth, width in pairs]
