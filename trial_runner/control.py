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

STEP_FLOP = {"cpu": 4.0e9, "gpu": 2.0e13}
"""FLOP of one round that its tokens are cut to: about a tenth of a second."""

PARAMETERS = {"cpu": 8.0e6, "gpu": 4.0e8}
"""Most parameters beyond the first block: more than a cache holds, with gradients and optimizer, and little of the
device's memory."""

WINDOWS = {"cpu": 12, "gpu": 6}
"""Windows; the median over them counts."""

WINDOW_S = 0.25
"""How long one is, seconds: about a step. A processor that is taken away now and then slows every step a little, and
most single rounds not at all."""

HEAD = 64
"""Elements of an attention head."""


@dataclass(frozen=True, kw_only=True)
class ControlWork:
    """One round: a small training step of our own. Decoder blocks forward and backward, an optimizer's pass over all
    their parameters, and a word from every rank of the node.

    Arithmetic and memory traffic are in it as in a real step. Large sums are not: through gloo they scatter six times
    as much as a step does (docs/evidence.md).
    """

    blocks: int
    """Decoder blocks, each with its own parameters."""

    tokens: int
    """Tokens that go through them."""

    hidden: int
    """Width of the residual stream, elements."""

    ffn: int
    """Width of the gated feed-forward layer, elements."""

    windows: int
    """Windows of :data:`WINDOW_S` that are timed."""

    @classmethod
    def like(cls, model: ModelShape, seq_len: int, device: str) -> ControlWork:
        """The control of a job: its model's widths and sequence, cut to a round of about a tenth of a second.

        Args:
            model: shape of the job's model.
            seq_len: tokens in one sequence.
            device: ``cpu`` or ``gpu``.
        """
        hidden = max(HEAD, min(model.hidden, HIDDEN[device]) // HEAD * HEAD)
        wide = model.expert_ffn if model.is_moe else model.ffn
        ffn = max(HEAD, min(wide, FFN[device]))
        block = 4.0 * hidden**2 + 3.0 * hidden * ffn
        blocks = int(max(1, min(model.layers, PARAMETERS[device] // block)))
        tokens = int(max(16, min(seq_len, 8192, STEP_FLOP[device] // (6 * block * blocks))))
        return cls(blocks=blocks, tokens=tokens, hidden=hidden, ffn=ffn, windows=WINDOWS[device])

    @property
    def name(self) -> str:
        """What it was: times compare only under one name. The number in front changes when the work does."""
        return f"1:{self.blocks}x{self.tokens}x{self.hidden}x{self.ffn}"

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)
