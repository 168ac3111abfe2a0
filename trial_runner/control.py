"""The control of a measurement: work of our own, done by a trial's ranks before anything of the user's is loaded.

A step time says how fast code and machine are together. The control's time says how fast the machine is, so that two
step times of different hours can be told apart: slower code, or a slower machine.
"""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

from search_space.model import ModelShape


HIDDEN = {"cpu": 1024, "gpu": 8192}
"""Widest residual stream of the control's block, by kind of device."""

FFN = {"cpu": 4096, "gpu": 28672}
"""Widest feed-forward layer."""

BLOCK_FLOP = {"cpu": 1.0e9, "gpu": 2.0e13}
"""FLOP of one round that its tokens are cut to: some hundredths of a second."""

WINDOWS = {"cpu": 12, "gpu": 6}
"""Windows; the median over them counts."""

WINDOW_S = 0.25
"""How long one is, seconds: about a step. A processor that is taken away now and then slows every step a little, and
most single rounds not at all."""

HEAD = 64
"""Elements of an attention head."""


@dataclass(frozen=True, kw_only=True)
class ControlWork:
    """One round: a decoder block forward and backward, and a word from every rank of the node.

    Neither memory bandwidth nor large sums: on a shared machine they scatter ten times as much as a step does, and say
    nothing of it (docs/evidence.md).
    """

    tokens: int
    """Tokens that go through the block."""

    hidden: int
    """Width of the residual stream, elements."""

    ffn: int
    """Width of the gated feed-forward layer, elements."""

    windows: int
    """Windows of :data:`WINDOW_S` that are timed."""

    @classmethod
    def like(cls, model: ModelShape, seq_len: int, device: str) -> ControlWork:
        """The control of a job: its model's widths and sequence, cut to a round of some hundredths of a second.

        Args:
            model: shape of the job's model.
            seq_len: tokens in one sequence.
            device: ``cpu`` or ``gpu``.
        """
        hidden = max(HEAD, min(model.hidden, HIDDEN[device]) // HEAD * HEAD)
        wide = model.expert_ffn if model.is_moe else model.ffn
        ffn = max(HEAD, min(wide, FFN[device]))
        per_token = 6.0 * (4 * hidden**2 + 3 * hidden * ffn)
        tokens = int(max(16, min(seq_len, 8192, BLOCK_FLOP[device] // per_token)))
        return cls(tokens=tokens, hidden=hidden, ffn=ffn, windows=WINDOWS[device])

    @property
    def name(self) -> str:
        """What it was: times compare only under one name. The number in front changes when the work does."""
        return f"1:{self.tokens}x{self.hidden}x{self.ffn}"

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)
