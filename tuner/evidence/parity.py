"""Loss parity: do two configurations compute the same training, within the noise of one configuration run twice?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from search_space.candidate import Candidate
from search_space.knobs import KNOBS


TOLERANCE = {"fp32": 0.002, "bf16": 0.01}
"""Largest gap of two loss curves, as a share of the loss, that the order of sums in this precision explains."""

FIRST_STEP = {"fp32": 1e-4, "bf16": 2e-3}
"""The same at the first step, where both hold the same weights and nothing has been amplified yet."""

NOISE_FACTOR = 3.0
"""A gap up to this many times that of two baseline runs is noise."""

SMOOTH = 3
"""Steps of the running mean that gaps are taken of."""

FEWEST = 4
"""Steps below which nothing is said."""

LAYOUT = (
    "tensor_parallel",
    "pipeline_parallel",
    "schedule",
    "virtual_stages",
    "context_parallel",
    "expert_parallel",
    "data_parallel_replicate",
    "data_parallel_shard",
)
"""Knobs that the initial weights depend on under one seed."""


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Whether the loss curves agree."""

    verdict: str
    """``agree``, ``differ``, or ``untested``."""

    why: str
    """The figures behind it, or why it could not be tested."""

    gap_pct: float | None = None
    """Largest gap of the smoothed curves, percent of the loss."""

    noise_pct: float | None = None
    """The same between two baseline runs; None: the baseline ran once."""

    bound_pct: float | None = None
    """Gap from which the curves differ, percent."""

    steps: int = 0
    """Steps compared."""

    numeric_changes: tuple[str, ...] = ()
    """Knobs of the candidate that change the numbers computed."""

    @property
    def may_win(self) -> bool:
        """A candidate whose curves differ never wins; one that changes numbers on purpose needs agreeing curves."""
        return self.verdict != "differ" and not (self.numeric_changes and self.verdict != "agree")

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)


def same_start(candidate: Candidate, baseline: Candidate) -> bool:
    """Whether two candidates begin with the same weights from one seed."""
    return all(getattr(candidate, knob) == getattr(baseline, knob) for knob in LAYOUT)


def same_samples(candidate: Candidate, baseline: Candidate, data: str) -> bool:
    """Whether their steps hold the same samples: always from the synthetic source, which is indexed by global sample
    number; from a config's own loader only when as many ranks read their own share of it."""
    return data == "synthetic" or candidate.data_parallel == baseline.data_parallel


def numeric_changes(candidate: Candidate, baseline: Candidate) -> tuple[str, ...]:
    """Knobs that differ and change the numbers computed."""
    changed = candidate.changed(baseline)
    return tuple(knob.name for knob in KNOBS if knob.numeric_change and knob.name in changed)


def compare_curves(
    candidate: Sequence[float],
    baselines: Sequence[Sequence[float]],
    precision: str,
    changes: tuple[str, ...] = (),
) -> Parity:
    """The stated test.

    The largest gap of the running means, as a share of the baseline's, is at most the larger of :data:`TOLERANCE` and
    :data:`NOISE_FACTOR` × the largest gap between two baseline runs; and at the first step at most the larger of
    :data:`FIRST_STEP` and the same factor of the baseline's own.

    Args:
        candidate: loss of each step from the first on.
        baselines: the same of every baseline run that began with the same weights.
        precision: compute precision, ``fp32`` or ``bf16``.
        changes: knobs that change numbers on purpose.
    """
    curves = [np.asarray(curve, dtype=float) for curve in baselines]
    own = np.asarray(candidate, dtype=float)
    steps = min([len(own), *map(len, curves)], default=0)
    if not curves or steps < FEWEST:
        return Parity(verdict="untested", why="too few steps with a known loss", numeric_changes=changes)
    if not np.isfinite(own[:steps]).all():
        return Parity(verdict="differ", why="the loss is not a number", steps=steps, numeric_changes=changes)
    gap = min(_gap(own[:steps], curve[:steps]) for curve in curves)
    first = min(abs(own[0] - curve[0]) / abs(curve[0]) for curve in curves)
    pairs = [(a[:steps], b[:steps]) for i, a in enumerate(curves) for b in curves[:i]]
    noise = max((_gap(a, b) for a, b in pairs), default=None)
    first_noise = max((abs(a[0] - b[0]) / abs(b[0]) for a, b in pairs), default=0.0)
    bound = max(TOLERANCE[precision], NOISE_FACTOR * (noise or 0.0))
    first_bound = max(FIRST_STEP[precision], NOISE_FACTOR * first_noise)
    words = (
        f"largest gap {100 * gap:.3g}% of the loss over {steps} steps (bound {100 * bound:.3g}%), at the first step "
        f"{100 * first:.2g}% (bound {100 * first_bound:.2g}%); "
        + (f"two baseline runs {100 * noise:.2g}% apart" if noise is not None else "the baseline ran once")
    )
    return Parity(
        verdict="agree" if gap <= bound and first <= first_bound else "differ",
        why=words,
        gap_pct=100 * gap,
        noise_pct=None if noise is None else 100 * noise,
        bound_pct=100 * bound,
        steps=steps,
        numeric_changes=changes,
    )


def _gap(one: np.ndarray, other: np.ndarray) -> float:
    """Largest difference of the running means, as a share of the second's."""
    kernel = np.ones(min(SMOOTH, len(one))) / min(SMOOTH, len(one))
    a, b = np.convolve(one, kernel, "valid"), np.convolve(other, kernel, "valid")
    return float(np.max(np.abs(a - b) / np.abs(b)))
