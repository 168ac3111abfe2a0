"""Ledger and dry run side by side: allocated bytes, FLOP and collectives of every pipeline rank."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import replace
import time
from typing import Any

import numpy as np

from pruning.accounts.account import find_account
from pruning.coefficients import prior
from pruning.ledger.executed import executed_collectives
from pruning.ledger.executed import executed_flop
from pruning.ledger.layout import layout_of
from pruning.ledger.layout import ranks_of
from pruning.ledger.memory import memory_of
from pruning.ledger.pipeline import flow_of
from search_space.candidate import Candidate
from search_space.candidate import SPLIT_BACKWARD
from search_space.hardware import find_hardware
from search_space.model import ModelShape
from search_space.pool import Pool
from search_space.setting import Setting
from trial_runner.dry_run import dry_run
from trial_runner.dry_run import RankFacts
from trial_runner.dry_run import Session
from trial_runner.dry_run import with_layers
from trial_runner.recipe.base import describe
from trial_runner.recipe.config_file import Recipe
from tuner.referee.cases import Case


OPERATIONS = {
    "allgather_base": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "send": "send",
    "alltoall": "all_to_all",
}
"""Operations as PyTorch names them, and the ledger's primitives."""

DIMENSIONS = {
    "tp": "tensor",
    "dp_shard": "data",
    "default_pg": "data",
    "efsdp": "expert_data",
    "dp_replicate": "replicate",
    "pp": "pipeline",
    "ep": "expert",
}
"""Mesh dimensions as torchtitan names them, and the ledger's. ``default_pg`` is whichever spans all devices."""

EXPERTS_ONLY = "all_to_all"
"""Only experts exchange tokens, over a group that may span all devices."""


@dataclass(frozen=True, kw_only=True)
class Counted:
    """One pipeline rank as one side counts it."""

    allocated_bytes: float
    """Largest sum of live tensors."""

    flop: float
    """FLOP of a step."""

    collectives: dict[tuple[str, str], tuple[int, float]]
    """(dimension, primitive) → calls and payload bytes."""


def ledger_counts(candidate: Candidate, setting: Setting) -> list[Counted]:
    """Every pipeline rank by the ledger."""
    pool = Pool.from_candidates([candidate])
    # A dry run routes tokens evenly; the ledger otherwise counts on a fullest rank.
    account = replace(find_account(setting.framework), expert_imbalance=1.0)
    layout = layout_of(pool, setting)
    ranks = ranks_of(layout, account.balances_head)
    memory = memory_of(layout, ranks, flow_of(layout, ranks), account, prior(setting))
    flop = executed_flop(layout, ranks)
    collectives = executed_collectives(layout, ranks, account)
    found = []
    for rank in range(candidate.pipeline_parallel):
        calls = {(c.dimension, c.primitive): (int(c.count[0, rank]), float(c.bytes[0, rank])) for c in collectives}
        found.append(
            Counted(
                allocated_bytes=float(memory.allocated[0, rank]),
                flop=float(flop[0, rank]),
                collectives={key: value for key, value in calls.items() if value[0]},
            )
        )
    return found


def dry_counts(facts: RankFacts) -> Counted:
    """One pipeline rank by the dry run, in the ledger's words.

    Payload is the whole buffer: of what a gather or scatter takes in and gives out, g/(g+1) parts for g ranks, and
    half of what an exchange does. Receives are the other side of sends.
    """
    calls: dict[tuple[str, str], tuple[int, float]] = {}
    for row in facts.collectives:
        primitive, dimension = OPERATIONS.get(row["operation"]), DIMENSIONS.get(row["group"])
        if primitive == EXPERTS_ONLY:
            dimension = "expert"
        if primitive is None or dimension is None or (dimension, primitive) == ("data", "all_reduce"):
            continue
        share = row["ranks"] / (row["ranks"] + 1) if primitive in ("all_gather", "reduce_scatter") else 1.0
        share = 0.5 if primitive == EXPERTS_ONLY else share
        count, size = calls.get((dimension, primitive), (0, 0.0))
        calls[dimension, primitive] = count + row["count"], size + share * row["bytes"]
    return Counted(allocated_bytes=facts.peak_allocated_bytes, flop=facts.flop, collectives=calls)


def setting_of(case: Case, shape: ModelShape) -> Setting:
    """The setting that a case is priced in: GPUs, since it is their memory that is asked for."""
    devices = case.candidate.num_devices
    return Setting(
        shape=shape,
        hardware=find_hardware("H100-SXM"),
        devices_per_node=min(8, devices),
        nodes=max(1, devices // 8),
        seq_len=case.seq_len,
        global_batch_seqs=case.global_batch_seqs,
    )


def compare_case(case: Case, session: Session) -> dict[str, Any]:
    """One case, rank by rank; the dry run's own error where it refused."""
    base = with_layers(describe(case.model), case.layers)
    recipe = Recipe(seq_len=case.seq_len, global_batch_seqs=case.global_batch_seqs, precision="bf16")
    found = dry_run(case.candidate, base, recipe, session=session)
    row: dict[str, Any] = {
        "model": case.model,
        "layers": case.layers,
        "candidate": case.candidate.to_json(),
        "label": case.name(),
        "error": found.error,
        "unmodelled": unmodelled(case.candidate),
        "elapsed_s": found.elapsed_s,
        "ranks": [],
    }
    if found.valid:
        ledger = ledger_counts(case.candidate, setting_of(case, base.shape))
        row["ranks"] = [compare_rank(rank.pp_rank, ledger[rank.pp_rank], dry_counts(rank)) for rank in found.ranks]
    return row


def unmodelled(candidate: Candidate) -> str | None:
    """Why the ledger is not expected to agree, if so."""
    if candidate.schedule in SPLIT_BACKWARD and candidate.activation_checkpoint != "none":
        return "PyTorch 2.14 recomputes checkpointed blocks several times when the backward pass is split"
    return None


def compare_rank(pp_rank: int, ledger: Counted, dry: Counted) -> dict[str, Any]:
    """Differences of one pipeline rank; ``collectives_differ`` names those whose calls or bytes are not equal.

    Equal means to one part in a million for FLOP and one in a thousand for bytes: the ledger knows nothing of the
    rows that FSDP pads a shard with.
    """
    keys = sorted(set(ledger.collectives) | set(dry.collectives))
    differ = []
    for key in keys:
        mine, theirs = ledger.collectives.get(key, (0, 0.0)), dry.collectives.get(key, (0, 0.0))
        if mine[0] != theirs[0] or not np.isclose(mine[1], theirs[1], rtol=1e-3, atol=1.0):
            differ.append({"kind": " ".join(key), "ledger": list(mine), "dry_run": list(theirs)})
    return {
        "pp_rank": pp_rank,
        "ledger_allocated_gib": ledger.allocated_bytes / 2**30,
        "dry_run_allocated_gib": dry.allocated_bytes / 2**30,
        "allocated_difference_pct": 100 * (ledger.allocated_bytes / dry.allocated_bytes - 1),
        "flop_difference_pct": 100 * (ledger.flop / dry.flop - 1),
        "flop_equal": bool(np.isclose(ledger.flop, dry.flop, rtol=1e-6)),
        "collectives_equal": not differ,
        "collectives_differ": differ,
    }


def compare(cases: Sequence[Case], parallel: int = 2, told: Callable[[str], None] | None = None) -> dict[str, Any]:
    """All cases through one warm process.

    Args:
        cases: what to compare.
        parallel: ranks simulated at once.
        told: called with one line per finished case.
    """
    started = time.perf_counter()
    for model in sorted({case.model for case in cases}):
        describe(model)

    def one(case: Case) -> dict[str, Any]:
        row = compare_case(case, session)
        if told:
            off = ", ".join(f"{rank['allocated_difference_pct']:+.1f}%" for rank in row["ranks"])
            told(f"{row['label']}: {off or row['error']}")
        return row

    with Session(parallel=parallel) as session, ThreadPoolExecutor(parallel) as pool:
        rows = list(pool.map(one, cases))
    return {"cases": rows, "overall": summary(rows), "elapsed_s": time.perf_counter() - started}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures over all ranks; those of cases that the ledger is not expected to agree on are kept apart."""
    ran = [row for row in rows if row["ranks"]]
    modelled = [rank for row in ran if row["unmodelled"] is None for rank in row["ranks"]]
    apart = [rank for row in ran if row["unmodelled"] is not None for rank in row["ranks"]]
    out: dict[str, Any] = {
        "cases": len(rows),
        "refused_by_framework": len(rows) - len(ran),
        "ranks": len(modelled),
        "flop_equal_ranks": sum(rank["flop_equal"] for rank in modelled),
        "collectives_equal_ranks": sum(rank["collectives_equal"] for rank in modelled),
        "ranks_apart": len(apart),
    }
    for name, ranks in (("", modelled), ("apart_", apart)):
        off = np.abs([rank["allocated_difference_pct"] for rank in ranks])
        if len(off):
            out |= {
                f"{name}allocated_mean_pct": float(off.mean()),
                f"{name}allocated_max_pct": float(off.max()),
                f"{name}allocated_within_5_pct": float(100 * (off <= 5).mean()),
            }
    return out
