"""Runs a dry run: one child process per pipeline rank, and what they say together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time
from typing import Any

from search_space.candidate import Candidate
from trial_runner.recipe.base import BaseFunction
from trial_runner.recipe.config_file import Recipe
from trial_runner.recipe.config_file import render


KINDS = ("parameters", "gradients", "optimizer", "activations", "other")
"""Kinds of memory: ``activations`` is everything made during the step that is none of the others."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What one pipeline rank does in a step. Bytes and FLOP are of this rank."""

    pp_rank: int
    """Pipeline rank."""

    peak_allocated_bytes: int
    """Largest sum of storages alive during a step with optimizer states."""

    by_kind_bytes: dict[str, int]
    """What they hold at that moment, by :data:`KINDS`."""

    flop: float
    """Matrix products and attention, forward, backward and recompute."""

    collectives: list[dict[str, Any]] = field(default_factory=list)
    """Each kind of collective: operation, ranks of its group, count, bytes."""

    elapsed_s: float = 0.0
    """Time the child took, seconds."""


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The outcome over the asked pipeline ranks."""

    valid: bool
    """Whether every asked rank ran two steps."""

    error: str | None
    """The framework's own error, if one did not."""

    ranks: list[RankFacts]
    """Facts of the ranks that ran."""

    elapsed_s: float
    """Wall time, seconds."""


def dry_run(
    candidate: Candidate,
    base: BaseFunction,
    recipe: Recipe,
    pp_ranks: Sequence[int] | None = None,
    timeout_s: float = 600,
    parallel: int = 1,
) -> DryRun:
    """Run the candidate's real program on fake tensors.

    Args:
        candidate: the knobs.
        base: the user's config function.
        recipe: sequence length, global batch, precision.
        pp_ranks: pipeline ranks to run; None for all.
        timeout_s: longest time of one rank, seconds.
        parallel: children at once.

    Raises:
        UserError: the candidate cannot be written as a config function.
    """
    started = time.perf_counter()
    ranks = list(range(candidate.pipeline_parallel)) if pp_ranks is None else list(pp_ranks)
    with tempfile.TemporaryDirectory(prefix="tune-dry-run-") as scratch:
        config_file = Path(scratch) / "dry_run_config.py"
        config_file.write_text(render(candidate, base, recipe, function="dry_run", header="dry run"))

        def one(pp_rank: int) -> dict[str, Any]:
            order = {
                "config_file": str(config_file),
                "config_function": "dry_run",
                "user_path": base.user_path,
                "folder": scratch,
                "world_size": candidate.num_devices,
                # The pipeline is the outermost dimension of torchtitan's device mesh.
                "rank": pp_rank * (candidate.num_devices // candidate.pipeline_parallel),
                "micro_batch": candidate.micro_batch,
                "seq_len": recipe.seq_len,
                "tensor_parallel": candidate.tensor_parallel,
                "hidden": base.shape.hidden,
                "precision": recipe.precision,
            }
            return _child(order, timeout_s)

        with ThreadPoolExecutor(parallel) as pool:
            outcomes = list(pool.map(one, ranks))
    error = next((outcome["error"] for outcome in outcomes if not outcome["valid"]), None)
    facts = [
        RankFacts(
            pp_rank=pp_rank,
            peak_allocated_bytes=outcome["peak_allocated_bytes"],
            by_kind_bytes={kind: outcome["by_kind_bytes"].get(kind, 0) for kind in KINDS},
            flop=outcome["flop"],
            collectives=outcome["collectives"],
            elapsed_s=outcome["elapsed_s"],
        )
        for pp_rank, outcome in zip(ranks, outcomes)
        if outcome["valid"]
    ]
    return DryRun(valid=error is None, error=error, ranks=facts, elapsed_s=time.perf_counter() - started)


def _child(order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    from trial_runner.dry_run.child import MARK

    command = [sys.executable, "-P", "-m", "trial_runner.dry_run.child", json.dumps(order)]
    env = {key: value for key, value in os.environ.items()} | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, cwd=order["folder"])
    except subprocess.TimeoutExpired:
        return {"valid": False, "error": f"the dry run of rank {order['rank']} took more than {timeout_s:.0f} s"}
    line = next((line for line in done.stdout.splitlines() if line.startswith(MARK)), None)
    if line is None:
        return {"valid": False, "error": done.stderr.strip()[-2000:] or f"the child left with code {done.returncode}"}
    facts: dict[str, Any] = json.loads(line[len(MARK) :])
    return facts
