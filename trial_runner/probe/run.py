"""Probes one node: starts a rank on every device, and names the devices that lag behind the median."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
import json
import os
from statistics import median
import subprocess
import sys
import tempfile
import time
from typing import Any

from search_space.errors import UserError
from search_space.model import ModelShape
from trial_runner.gang import free_port
from trial_runner.probe.rank import MARK


SUSPECT = 0.75
"""A device below this share of the median of its node is a suspect."""

MESSAGES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
"""Message sizes of the links' figures, bytes."""


@dataclass(frozen=True, kw_only=True)
class DeviceFigures:
    """What one device gives."""

    rank: int
    """Its rank on the node."""

    products: list[dict[str, Any]]
    """Per shape (rows, depth, width): best and mean TFLOP/s."""

    memory_gb_s: float
    """Bytes read and written by a copy, GB/s."""

    links: list[dict[str, Any]]
    """Per message size: bytes, seconds, GB/s of an all-gather over the node's devices, as this rank saw it."""

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
    """Devices that lag: rank, what lags, its figure, the node's median."""

    elapsed_s: float
    """Wall time, seconds."""

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)


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


def probe_node(
    shapes: Sequence[Sequence[int]],
    *,
    device: str,
    ranks: int,
    precision: str,
    seconds: float = 4.0,
    node: str = "this machine",
    started: Callable[[list[int]], None] | None = None,
    timeout_s: float = 180,
) -> NodeFigures:
    """Measure every device of this machine at once.

    Args:
        shapes: matrix products, (rows, depth, width).
        device: ``cpu`` or ``gpu``.
        ranks: devices.
        precision: ``bf16`` or ``fp32``.
        seconds: how long to measure, start-up not counted.
        node: name for the figures.
        started: called with the ranks' process ids once all run.
        timeout_s: longest wall time, seconds.

    Raises:
        UserError: a rank failed or did not answer in time.
    """
    began = time.perf_counter()
    order = {
        "device": device,
        "precision": precision,
        "shapes": [list(shape) for shape in shapes],
        "messages": MESSAGES,
        "copy_bytes": (1 << 26) if device == "cpu" else (1 << 30),
        "seconds": seconds,
        "repeats": 20,
    }
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if device == "cpu":
        common |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", "trial_runner.probe.rank", json.dumps(order)]
    children = []
    try:
        for rank in range(ranks):
            env = os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            children.append(subprocess.Popen(command, env=env, cwd=tempfile.gettempdir(), **pipes))  # type: ignore[call-overload]
        if started is not None:
            started([child.pid for child in children])
        answers = []
        for rank, child in enumerate(children):
            left = max(1.0, timeout_s - (time.perf_counter() - began))
            try:
                out, err = child.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                raise UserError(f"probe: rank {rank} did not answer in {timeout_s:.0f} s") from None
            if child.returncode:
                raise UserError(f"probe: rank {rank} failed: {err.strip()[-600:]}")
            answers.append(out)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    line = next(line for line in answers[0].splitlines() if line.startswith(MARK))
    found = [DeviceFigures(**values) for values in json.loads(line[len(MARK) :])]
    elapsed = time.perf_counter() - began
    return NodeFigures(node=node, devices=found, suspects=suspects_of(found), elapsed_s=elapsed)


def suspects_of(devices: Sequence[DeviceFigures]) -> list[dict[str, Any]]:
    """Devices below :data:`SUSPECT` of their node's median in what they computed or copied."""
    out = []
    figures = {
        "matrix products": [device.mean_tflops for device in devices],
        "memory bandwidth": [device.memory_gb_s for device in devices],
    }
    for what, values in figures.items():
        middle = median(values)
        for device, value in zip(devices, values):
            if value < SUSPECT * middle:
                out.append({"rank": device.rank, "what": what, "value": value, "median": middle})
    return out
