"""What the ranks of a probe are told to measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
import json

import psutil

from search_space.model import ModelShape


ORDER = "LEDGERTUNE_PROBE"
"""Environment variable that carries the order to a rank."""

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
