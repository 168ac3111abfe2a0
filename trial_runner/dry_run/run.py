"""Runs a dry run: one child per pipeline rank, forked from a warm process, and what they say together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextlib import nullcontext
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from pathlib import Path
import tempfile
import time
from typing import Any

from search_space.candidate import Candidate
from trial_runner.dry_run.routing import BALANCED
from trial_runner.dry_run.session import Session
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
    """Each kind of collective: operation, mesh dimension and ranks of its group, count, bytes."""

    blocks_held: int = 0
    """Blocks, one for each micro-batch, whose inner activations are held at the peak."""

    compiled_saves_bytes: int = 0
    """What compiled blocks keep less of them, already taken off the peak and its activations."""

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

    compiled: str | None = None
    """What was done about compiled blocks; None for an eager candidate."""

    routing: str | None = None
    """How tokens were assumed to be routed to experts; None where nothing hangs on it."""

    unknown: bool = False
    """Whether it failed for what fake tensors cannot do, which says nothing about the real program."""


def with_layers(base: BaseFunction, layers: int) -> BaseFunction:
    """The same model with its first ``layers`` layers only."""
    shape = replace(base.shape, layers=layers, dense_layers=min(base.shape.dense_layers, layers))
    return replace(base, shape=shape, num_params=shape.num_params)


def dry_run(
    candidate: Candidate,
    base: BaseFunction,
    recipe: Recipe,
    pp_ranks: Sequence[int] | None = None,
    timeout_s: float = 600,
    parallel: int = 2,
    gpu_kernels: bool = True,
    session: Session | None = None,
) -> DryRun:
    """Run the candidate's real program on fake tensors.

    Args:
        candidate: the knobs.
        base: the user's config function; a shape of fewer layers (:func:`with_layers`) runs the first of them.
        recipe: sequence length, global batch, precision.
        pp_ranks: pipeline ranks to run; None for all.
        timeout_s: longest time of one rank, seconds.
        parallel: children at once, when the session is not given.
        gpu_kernels: keep for backward what CUDA kernels keep, not what CPU kernels keep.
        session: a warm process to use; absent: one is started for this candidate.

    Raises:
        UserError: the candidate cannot be written as a config function.
    """
    ranks = list(range(candidate.pipeline_parallel)) if pp_ranks is None else list(pp_ranks)
    # The pipeline is the outermost dimension of torchtitan's device mesh.
    width = candidate.num_devices // candidate.pipeline_parallel
    orders = [{"rank": rank * width, "gpu_kernels": gpu_kernels, "port": 1} for rank in ranks]
    with session_or(session, real=False, parallel=parallel) as used:
        found = _run(candidate, base, recipe, ranks, orders, timeout_s, used)
        if candidate.compile and found.valid:
            found = _compiled(found, candidate, base, recipe, timeout_s, used)
        spread = found.valid and base.shape.is_moe and candidate.expert_parallel > 1
        return replace(found, routing=BALANCED) if spread else found


def _compiled(
    found: DryRun, candidate: Candidate, base: BaseFunction, recipe: Recipe, timeout_s: float, session: Session
) -> DryRun:
    """Take off what compiled blocks keep less than eager ones, by the saved set of one block."""
    if candidate.tensor_parallel > 1 or candidate.activation_checkpoint not in ("none", "full"):
        why = "tensor-parallel ranks" if candidate.tensor_parallel > 1 else "this activation checkpointing"
        return replace(found, compiled=f"eager figures: the compiled saved set is not known with {why}")
    facts = _outcomes(candidate, base, recipe, [{"rank": 0, "block": True, "port": 1}], timeout_s, session)[0]
    if not facts["valid"]:
        return replace(found, compiled=f"eager figures: one block could not be partitioned ({facts['error']})")
    less = facts["eager_bytes"] - facts["compiled_bytes"]
    ranks = []
    for rank in found.ranks:
        saves = rank.blocks_held * less
        kinds = rank.by_kind_bytes | {"activations": rank.by_kind_bytes["activations"] - saves}
        peak = rank.peak_allocated_bytes - saves
        ranks.append(replace(rank, peak_allocated_bytes=peak, by_kind_bytes=kinds, compiled_saves_bytes=saves))
    eager, compiled = facts["eager_bytes"] / 2**30, facts["compiled_bytes"] / 2**30
    text = f"one compiled block keeps {compiled:.3f} GiB by the AOT partitioner, an eager one {eager:.3f}"
    return replace(found, ranks=ranks, compiled=text)


def truth(
    candidate: Candidate, base: BaseFunction, recipe: Recipe, timeout_s: float = 300, session: Session | None = None
) -> DryRun:
    """Train the same two steps for real, on CPU ranks with gloo, counted by the same tracker: what a dry run of the
    CPU's kernels must agree with.

    Args:
        candidate: the knobs; every rank becomes a process here, so few ranks and a small model.
        base: the user's config function.
        recipe: sequence length, global batch, precision.
        timeout_s: longest time of one rank, seconds.
        session: a warm process of real tensors with as many slots as ranks; absent: one is started.

    Returns:
        Facts of the first rank of each pipeline rank.
    """
    world = candidate.num_devices
    port = free_port()
    orders = [{"rank": rank, "gpu_kernels": False, "port": port} for rank in range(world)]
    width = world // candidate.pipeline_parallel
    with session_or(session, real=True, parallel=world) as used:
        found = _run(candidate, base, recipe, list(range(world)), orders, timeout_s, used)
    firsts = [replace(facts, pp_rank=facts.pp_rank // width) for facts in found.ranks if facts.pp_rank % width == 0]
    return replace(found, ranks=firsts)


def session_or(session: Session | None, *, real: bool, parallel: int) -> AbstractContextManager[Session]:
    """The given session, left open; or a new one that closes."""
    return nullcontext(session) if session is not None else Session(real=real, parallel=parallel)


def _run(
    candidate: Candidate,
    base: BaseFunction,
    recipe: Recipe,
    names: list[int],
    orders: list[dict[str, Any]],
    timeout_s: float,
    session: Session,
) -> DryRun:
    """Run one child per order; ``names`` are what their facts are filed under."""
    started = time.perf_counter()
    outcomes = _outcomes(candidate, base, recipe, orders, timeout_s, session)
    error = next((outcome["error"] for outcome in outcomes if not outcome["valid"]), None)
    facts = [
        RankFacts(
            pp_rank=name,
            peak_allocated_bytes=outcome["peak_allocated_bytes"],
            by_kind_bytes={kind: outcome["by_kind_bytes"].get(kind, 0) for kind in KINDS},
            flop=outcome["flop"],
            collectives=outcome["collectives"],
            blocks_held=outcome["blocks_held"],
            elapsed_s=outcome["elapsed_s"],
        )
        for name, outcome in zip(names, outcomes)
        if outcome["valid"]
    ]
    failed = [outcome for outcome in outcomes if not outcome["valid"]]
    unknown = bool(failed) and all(outcome.get("unknown", True) for outcome in failed)
    elapsed = time.perf_counter() - started
    return DryRun(valid=error is None, error=error, ranks=facts, elapsed_s=elapsed, unknown=unknown)


def _outcomes(
    candidate: Candidate,
    base: BaseFunction,
    recipe: Recipe,
    orders: list[dict[str, Any]],
    timeout_s: float,
    session: Session,
) -> list[dict[str, Any]]:
    """What each child had to say."""
    with tempfile.TemporaryDirectory(prefix="candidate-", dir=session.folder) as scratch:
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
            "layers": base.shape.layers,
            "precision": recipe.precision,
            "timeout_s": timeout_s,
        }
        futures = [session.submit(common | order) for order in orders]
        return [future.result() for future in futures]
