"""Features that were asked for and did not run: a trial belongs to the configuration that really ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
import gzip
from pathlib import Path
import re

from search_space.candidate import Candidate
from trial_runner.spec import rank_log
from trial_runner.spec import rank_trace


GAVE_UP = re.compile(
    r"(?:cache_size_limit|recompile_limit|accumulated_cache_size_limit|accumulated_recompile_limit)\b[^\n]*(?:hit|reached"
    r"|exceed)|(?:hit|reached|exceeded)[^\n]*(?:cache_size_limit|recompile_limit|accumulated_recompile_limit)"
)
"""The compiler's own words when it stops compiling and runs the rest eagerly."""

FUSED = (b"fused_all_gather_matmul", b"fused_matmul_reduce_scatter", b"fused_all_gather_scaled_matmul")
"""Operators that async tensor parallelism puts in the place of a collective and a product."""

LOG_BYTES = 4_000_000
"""How much of a rank's log is searched."""


def compiler_gave_up(folder: Path, world_size: int) -> bool:
    """Whether a rank's log says that the compiler hit its limit of recompilations."""
    for rank in range(world_size):
        try:
            with rank_log(folder, rank).open("rb") as log:
                if GAVE_UP.search(log.read(LOG_BYTES).decode(errors="replace")):
                    return True
        except OSError:
            continue
    return False


def names_fused_operators(trace: Path) -> bool:
    """Whether a profiler trace names an operator of async tensor parallelism."""
    before = b""
    with gzip.open(trace, "rb") as stream:
        while chunk := stream.read(1 << 20):
            if any(name in before + chunk for name in FUSED):
                return True
            before = chunk[-64:]
    return False


def inactive_features(candidate: Candidate, folder: Path) -> tuple[str, ...]:
    """Knobs of a measured trial that did not take effect: ``compile``, ``async_tp``.

    Args:
        candidate: what was asked for.
        folder: the trial's folder, with logs and, where they were taken, traces.
    """
    found = []
    if candidate.compile and compiler_gave_up(folder, candidate.num_devices):
        found.append("compile")
    if candidate.async_tp:
        traces = [rank_trace(folder, rank) for rank in range(candidate.num_devices)]
        traces = [trace for trace in traces if trace.exists()]
        if "compile" in found or (traces and not any(names_fused_operators(trace) for trace in traces)):
            found.append("async_tp")
    return tuple(found)


def effective(candidate: Candidate, inactive: Sequence[str]) -> Candidate:
    """The candidate that really ran: async tensor parallelism off where it was not active.

    A compiler that gave up has still compiled a part, so ``compile`` stays and the flag alone says it.
    """
    return replace(candidate, async_tp=False) if "async_tp" in inactive else candidate
