"""What a probe finds, as data: figures by device and by node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
import json
from typing import Any

from search_space.errors import UserError


MARK = "ledgertune-probe:"
"""Starts the line that carries the figures."""


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
