"""Published memory figures of torchtitan runs against dry run plus allowance."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
import time
from typing import Any

import numpy as np

from pruning.validate.rows import read_table
from pruning.validate.rows import Row
from pruning.validate.translate import CannotPrice
from pruning.validate.translate import Priced
from pruning.validate.translate import translate
from search_space.errors import UserError
from trial_runner.dry_run import dry_run
from trial_runner.dry_run import Session
from trial_runner.recipe.base import describe
from trial_runner.recipe.config_file import Recipe
from tuner.referee.allowance import allowances


FUNCTIONS = {
    "llama3-8b": "llama3:llama3_8b",
    "llama3-70b": "llama3:llama3_70b",
    "qwen3-14b": "qwen3:qwen3_14b",
    "deepseek_v3-16b": "deepseek_v3:deepseek_v3_16b",
}
"""Models of the tables and torchtitan's functions of the same shape."""


@dataclass(frozen=True)
class Group:
    """Rows that are one program to a dry run."""

    priced: Priced
    """The first of them."""

    model: str
    """torchtitan function."""

    measured: tuple[float, ...]
    """Reserved GiB of each."""


def usable(row: Row) -> tuple[Priced, str] | str:
    """The row as a candidate and its torchtitan function; or why a dry run cannot stand for it."""
    if not row["framework"].startswith("torchtitan") or row.number("peak_mem_gib") is None:
        return "no torchtitan run with a memory figure"
    if row["model"] not in FUNCTIONS:
        return f"model {row['model']} is none of torchtitan's functions here"
    try:
        priced = translate(row)
    except CannotPrice as error:
        return str(error)
    candidate = priced.candidate
    precision = row["precision"].lower()
    if candidate.float8 or "fp8" in precision or "params" in precision.split("(")[0]:
        return "float8 or bf16 parameters: another program than the dry run's"
    if candidate.context_parallel > 1:
        return "context parallelism has no CPU kernels to go through"
    if candidate.activation_checkpoint not in ("none", "selective", "full"):
        return "checkpointing by memory budget is the compiler's"
    if "selective layer" in row["act_ckpt"]:
        return "checkpointing of every second layer is no longer there"
    return priced, FUNCTIONS[row["model"]]


def groups_of(rows: Sequence[Row]) -> tuple[list[Group], dict[str, int]]:
    """Rows by program, and how many were left out for which reason."""
    found: dict[tuple[Any, ...], Group] = {}
    left_out: dict[str, int] = {}
    for row in rows:
        use = usable(row)
        if isinstance(use, str):
            left_out[use] = left_out.get(use, 0) + 1
            continue
        priced, model = use
        setting = priced.setting
        key = (row.table, row["framework_version"], model, setting.seq_len, setting.global_batch_seqs, priced.candidate)
        memory = row.number("peak_mem_gib") or 0.0
        old = found.get(key)
        found[key] = Group(priced, model, (*(old.measured if old else ()), memory))
    return list(found.values()), left_out


def judge(group: Group, session: Session) -> dict[str, Any]:
    """One program: measured against dry run plus allowance."""
    priced, candidate = group.priced, group.priced.candidate
    setting = priced.setting
    recipe = Recipe(seq_len=setting.seq_len, global_batch_seqs=setting.global_batch_seqs, precision="bf16")
    row: dict[str, Any] = {
        "table": priced.row.table,
        "row_id": priced.row.row_id,
        "rows": len(group.measured),
        "version": priced.row["framework_version"],
        "model": group.model,
        "label": f"{candidate.label()} seq {setting.seq_len}",
        "measured_reserved_gib": median(group.measured),
        "measured_range_gib": [min(group.measured), max(group.measured)],
        "error": None,
    }
    try:
        found = dry_run(candidate, describe(group.model), recipe, session=session)
    except UserError as error:
        return row | {"error": str(error)}
    if not found.valid:
        return row | {"error": found.error}
    worst = max(rank.peak_allocated_bytes for rank in found.ranks)
    allowance = allowances(candidate, setting, [worst])[0]
    off = 100 * (allowance["reserved_gib"] / row["measured_reserved_gib"] - 1)
    low, high = allowance["reserved_gib_interval"]
    return row | {
        "dry_run_allocated_gib": worst / 2**30,
        "predicted_reserved_gib": allowance["reserved_gib"],
        "difference_pct": off,
        "in_interval": low <= row["measured_reserved_gib"] <= high,
        "compiled": found.compiled,
    }


def compare_tables(
    tables: Sequence[str], parallel: int = 2, told: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Every usable program of the tables.

    Raises:
        UserError: a table cannot be read.
    """
    started = time.perf_counter()
    groups, left_out = groups_of([row for table in tables for row in read_table(table)])

    def one(group: Group) -> dict[str, Any]:
        row = judge(group, session)
        if told:
            told(f"{row['table']} {row['label']}: {row.get('difference_pct', row['error'])}")
        return row

    with Session(parallel=parallel) as session, ThreadPoolExecutor(parallel) as pool:
        rows = list(pool.map(one, groups))
    judged = [row for row in rows if row["error"] is None]
    overall: dict[str, Any] = {"programs": len(rows), "judged": len(judged)}
    for table in sorted({row["table"] for row in judged}):
        off = np.abs([row["difference_pct"] for row in judged if row["table"] == table])
        overall[f"{table}_mape_pct"] = float(off.mean())
        overall[f"{table}_max_pct"] = float(off.max())
    worst = sorted(judged, key=lambda row: -abs(row["difference_pct"]))[:5]
    return {
        "programs": rows,
        "overall": overall,
        "worst": [row["row_id"] for row in worst],
        "left_out": left_out,
        "elapsed_s": time.perf_counter() - started,
    }
