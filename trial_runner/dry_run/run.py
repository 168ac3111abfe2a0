"""Runs a dry run: one child process per pipeline rank, and what they say together."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time
from typing import Any

from search_space.candidate import Candidate
from trial_runner.gang import free_port
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
    gpu_kernels: bool = True,
) -> DryRun:
    """Run the candidate's real program on fake tensors.

    Args:
        candidate: the knobs.
        base: the user's config function.
        recipe: sequence length, global batch, precision.
        pp_ranks: pipeline ranks to run; None for all.
        timeout_s: longest time of one rank, seconds.
        parallel: children at once.
        gpu_kernels: keep for backward what CUDA kernels keep, not what CPU kernels keep.

    Raises:
        UserError: the candidate cannot be written as a config function.
    """
    ranks = list(range(candidate.pipeline_parallel)) if pp_ranks is None else list(pp_ranks)
    # The pipeline is the outermost dimension of torchtitan's device mesh.
    width = candidate.num_devices // candidate.pipeline_parallel
    orders = [{"rank": rank * width, "real": False, "gpu_kernels": gpu_kernels, "port": 1} for rank in ranks]
    return _run(candidate, base, recipe, ranks, orders, timeout_s, parallel)


def truth(candidate: Candidate, base: BaseFunction, recipe: Recipe, timeout_s: float = 300) -> DryRun:
    """Train the same two steps for real, on CPU ranks with gloo, counted by the same tracker: what a dry run of the
    CPU's kernels must agree with.

    Args:
        candidate: the knobs; every rank becomes a process here, so few ranks and a small model.
        base: the user's config function.
        recipe: sequence length, global batch, precision.
        timeout_s: longest time of one rank, seconds.

    Returns:
        Facts of the first rank of each pipeline rank.
    """
    world = candidate.num_devices
    port = free_port()
    orders = [{"rank": rank, "real": True, "gpu_kernels": False, "port": port} for rank in range(world)]
    width = world // candidate.pipeline_parallel
    found = _run(candidate, base, recipe, list(range(world)), orders, timeout_s, world)
    firsts = [replace(facts, pp_rank=facts.pp_rank // width) for facts in found.ranks if facts.pp_rank % width == 0]
    return replace(found, ranks=firsts)


def _run(
    candidate: Candidate,
    base: BaseFunction,
    recipe: Recipe,
    names: list[int],
    orders: list[dict[str, Any]],
    timeout_s: float,
    parallel: int,
) -> DryRun:
    """Run one child per order; ``names`` are what their facts are filed under."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tune-dry-run-") as scratch:
        config_file = Path(scratch) / "dry_run_config.py"
        config_file.write_text(render(candidate, base, recipe, function="dry_run", header="dry run"))
        common = {
            "config_file": str(config_file),
            "config_function": "dry_run",
            "user_path": base.user_path,
            "folder": scratch,
            "world_size": candidate.num_devices,
            "micro_batch": candidate.micro_batch,
            "seq_len": recipe.seq_len,
            "tensor_parallel": candidate.tensor_parallel,
            "hidden": base.shape.hidden,
            "precision": recipe.precision,
        }
        with ThreadPoolExecutor(parallel) as pool:
            outcomes = list(pool.map(lambda order: _child(common | order, timeout_s), orders))
    error = next((outcome["error"] for outcome in outcomes if not outcome["valid"]), None)
    facts = [
        RankFacts(
            pp_rank=name,
            peak_allocated_bytes=outcome["peak_allocated_bytes"],
            by_kind_bytes={kind: outcome["by_kind_bytes"].get(kind, 0) for kind in KINDS},
            flop=outcome["flop"],
            collectives=outcome["collectives"],
            elapsed_s=outcome["elapsed_s"],
        )
        for name, outcome in zip(names, outcomes)
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
