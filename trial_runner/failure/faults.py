"""Known faults of framework versions: the text that tells each, and the siblings that would fail the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import re

import numpy as np

from search_space.candidate import ACTIVATION_CHECKPOINT
from search_space.pool import Pool


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One known fault."""

    code: str
    """Name."""

    pattern: str
    """Regular expression over an error's type and text."""

    holds: Callable[[Pool], np.ndarray]
    """Candidates that meet the same fault, shape (n,) of bool; only asked after one of them met it."""

    held: str
    """The same in words."""

    kind: str = "framework_bug"
    """Failure class."""

    versions: str
    """Framework versions in which it was seen."""

    advice: str
    """What to do."""


def _checkpoints(pool: Pool) -> np.ndarray:
    return np.asarray(pool["activation_checkpoint"] != ACTIVATION_CHECKPOINT.index("none"))


FAULTS = (
    Fault(
        code="mesh_without_tensor_parallel",
        pattern=r"mesh\S*[^\n]{0,60}['\"]tp['\"][^\n]{0,60}(?:not|invalid|available)|"
        r"(?:no|invalid|unknown)[^\n]{0,40}mesh[^\n]{0,40}['\"]tp['\"]",
        holds=lambda pool: np.asarray((pool["tensor_parallel"] == 1) & (pool["expert_parallel"] > 1)),
        held="expert parallelism without tensor parallelism",
        versions="torchtitan before 0.3.0",
        advice="tensor_parallel of 2 or more beside expert parallelism, or a newer torchtitan",
    ),
    Fault(
        code="micro_batches_of_the_schedule",
        pattern=r"Expecting \d+ (?:arg|kwarg|target)_mbs but got \d+",
        holds=lambda pool: np.asarray(pool["pipeline_parallel"] > 1),
        held="pipelines",
        versions="single torchtitan builds before 0.3.0",
        advice="pipeline_parallel of 1, or another torchtitan build",
    ),
    Fault(
        code="checkpoint_around_compile",
        pattern=r"CheckpointError|trying to save (?:more|fewer) tensors during recomputation",
        kind="checkpoint_mismatch",
        holds=lambda pool: np.asarray(pool["compile"].astype(bool) & _checkpoints(pool)),
        held="compiled blocks under activation checkpointing",
        versions="torch before 2.8",
        advice="checkpoint inside the compiled region, or a newer PyTorch",
    ),
)
"""Every known fault."""


def find_fault(text: str) -> Fault | None:
    """The known fault that a text tells of."""
    return next((fault for fault in FAULTS if re.search(fault.pattern, text)), None)
