"""What a small run says about a large one: budget tables, candidates to try there, and what stays unknown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
import time
from typing import Any

import numpy as np

from pruning.assess import assess
from pruning.assess import Assessment
from pruning.coefficients import Coefficients
from pruning.coefficients import key_of
from pruning.coefficients import prior
from pruning.explain import plan_entry
from pruning.extrapolate import carried_over
from pruning.extrapolate import extrapolate
from pruning.extrapolate import Extrapolation
from pruning.extrapolate import Ratio
from pruning.ledger.prices import PARTS
from search_space.candidate import Candidate
from search_space.enumerate import enumerate_pool
from search_space.errors import UserError
from search_space.pool import Pool
from search_space.setting import Setting
from tuner.evidence.small_run import coefficient_ratios
from tuner.evidence.small_run import SmallRun
from tuner.evidence.target import Target
from tuner.evidence.unknown import unknown_of


OTHER_SCALE = 0.1
"""Log standard deviation by which each coefficient may differ at another scale or in another model."""

OTHER_DEVICE = 0.3
"""The same on another kind of GPU; combined with what is believed about that kind."""

SHORTLIST = 256
"""Candidates, the fastest by the ledger, among which ratios decide."""

TO_TRY = 3
"""Candidates that are proposed."""

DEGREES = (
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "data_parallel_replicate",
    "data_parallel_shard",
    "virtual_stages",
    "schedule",
    "micro_batch",
    "activation_checkpoint",
)
"""Knobs that another scale chooses anew, whatever the small job restricted them to."""


@dataclass(frozen=True)
class Carried:
    """Coefficients and ratios for the target."""

    coefficients: Coefficients
    """The ledger's coefficients at the target."""

    ratios: list[Ratio]
    """Ratios beside them: from measured pairs, or given by hand."""

    shown: list[Ratio]
    """All of what was used, coefficients included."""

    refused: str | None
    """Why nothing that was measured carries over; None where it does."""


def carry(run: SmallRun, target: Setting, given: Sequence[Ratio]) -> Carried:
    """What holds at the target: measured coefficients with more room, stated ratios in their place.

    CPU slots say nothing about GPUs. Another kind of GPU keeps shares with much room, combined with its own priors.
    """
    hardware, framework = key_of(target)
    refused = None
    measured = run.measured()
    pairs = list(run.ratios)
    if run.setting.on_cpu != target.on_cpu:
        refused = (
            f"measured on {run.setting.hardware.name}, asked for {target.hardware.name}: no ratio carries over between "
            "CPU slots and GPUs, so the shipped priors speak"
        )
        coefficients, measured, pairs = prior(target), [], []
    elif run.setting.hardware.name != target.hardware.name:
        coefficients = carried_over(run.coefficients, hardware, framework, OTHER_DEVICE, prior(target))
    elif not run.observations:
        coefficients = prior(target)
    else:
        coefficients = carried_over(run.coefficients, hardware, framework, OTHER_SCALE)
    names = [ratio.name for ratio in given]
    ratios = [ratio for ratio in pairs if ratio.name not in names] + list(given)
    shown = coefficient_ratios(coefficients, measured, names) + ratios
    return Carried(coefficients, ratios, shown, refused)


def document(
    run: SmallRun, target: Target, given: Sequence[Ratio] = (), asked: Sequence[Candidate] = (), near: int = 3
) -> dict[str, Any]:
    """The document of ``tune extrapolate``.

    Args:
        run: the small run.
        target: where to.
        given: ratios stated by hand.
        asked: candidates to price at the target; none: the two or three that are worth trying there.
        near: refused candidates to list.

    Raises:
        UserError: an asked candidate does not fit the target's devices.
    """
    started = time.perf_counter()
    setting = target.setting
    carried = carry(run, setting, given)
    knobs = {name: values for name, values in run.knobs.items() if name not in (*DEGREES, "env")}
    pool = enumerate_pool(setting, knobs, run.numeric_changes)
    assessment = assess(pool, setting, carried.coefficients)
    notes = list(target.notes) + ([carried.refused] if carried.refused else [])
    entries = _asked(asked, setting, carried) if asked else _worth_trying(assessment, carried)
    for entry in entries:
        entry["carried"] = [ratio.to_json() for ratio in carried.shown]
        entry["unknown"] = unknown_of(run, setting, entry, carried.shown)
    return {
        "study": run.name,
        "measured_on": {
            "model": run.setting.shape.name,
            "hardware": run.setting.hardware.name,
            "devices": run.setting.num_devices,
            "trials": len(run.observations),
        },
        "model": setting.shape.name,
        "hardware": setting.hardware.name,
        "devices": setting.num_devices,
        "seq_len": setting.seq_len,
        "global_batch_seqs": setting.global_batch_seqs,
        "framework": setting.framework,
        "allowed_gib": assessment.allowed_bytes / 1024**3,
        "enumerated": len(pool),
        "feasible": int(assessment.feasible.sum()),
        "rejected": assessment.rejected(),
        "candidates": entries,
        "winner_scaled": _scaled_winner(run, setting, carried),
        "near_misses": [
            {
                "candidate": pool.candidate(i).to_json(),
                "label": pool.candidate(i).label(),
                "reasons": [reason.to_json() for reason in assessment.reasons(i)],
            }
            for i in assessment.nearest(near)
        ],
        "carried": [ratio.to_json() for ratio in carried.shown],
        "unknown": list(
            {line.split(";")[0]: line for entry in reversed(entries) for line in entry["unknown"]}.values()
        ),
        "notes": notes,
        "elapsed_s": time.perf_counter() - started,
    }


def _asked(asked: Sequence[Candidate], setting: Setting, carried: Carried) -> list[dict[str, Any]]:
    for candidate in asked:
        if candidate.num_devices != setting.num_devices:
            raise UserError(
                f"--candidate {candidate.label()}: takes {candidate.num_devices} devices, the target has "
                f"{setting.num_devices}"
            )
    pool = Pool.from_candidates(list(asked))
    assessment = assess(pool, setting, carried.coefficients)
    found = extrapolate(pool, setting, carried.coefficients, carried.ratios)
    return [budget_entry(assessment, i, found, i) for i in range(len(pool))]


def _worth_trying(assessment: Assessment, carried: Carried) -> list[dict[str, Any]]:
    """The fastest feasible candidates of different layouts whose intervals reach the best one's median."""
    feasible = np.flatnonzero(assessment.feasible)
    if not len(feasible):
        return []
    order = feasible[np.lexsort((assessment.prices.step_time_s[feasible], assessment.doubtful[feasible]))][:SHORTLIST]
    pool = assessment.pool.take(order)
    found = extrapolate(pool, assessment.setting, carried.coefficients, carried.ratios)
    ranked = np.lexsort((found.median.step, assessment.doubtful[order]))
    chosen: list[int] = []
    layouts = set()
    for i in ranked:
        candidate = pool.candidate(int(i))
        degrees = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
        layout = tuple(getattr(candidate, name) for name in degrees)
        reaches = not chosen or found.low["step"][i] <= found.median.step[chosen[0]]
        if layout not in layouts and reaches:
            chosen.append(int(i))
            layouts.add(layout)
        if len(chosen) == TO_TRY:
            break
    return [budget_entry(assessment, int(order[i]), found, i) for i in chosen]


def _scaled_winner(run: SmallRun, setting: Setting, carried: Carried) -> dict[str, Any] | None:
    """The study's winner with more data-parallel ranks, as somebody would naively scale it; None where it cannot."""
    if run.winner is None:
        return None
    factor, rest = divmod(setting.num_devices, run.winner.num_devices)
    if rest or not factor:
        return None
    candidate = replace(run.winner, data_parallel_shard=run.winner.data_parallel_shard * factor)
    pool = Pool.from_candidates([candidate])
    assessment = assess(pool, setting, carried.coefficients)
    entry = budget_entry(assessment, 0, extrapolate(pool, setting, carried.coefficients, carried.ratios), 0)
    entry["feasible"] = bool(assessment.feasible[0])
    entry["reasons"] = [reason.to_json() for reason in assessment.reasons(0)]
    return entry


def budget_entry(assessment: Assessment, position: int, found: Extrapolation, row: int) -> dict[str, Any]:
    """One candidate with the keys of ``tune plan`` and its budget table.

    Args:
        assessment: memory and verdict.
        position: the candidate's position in it.
        found: the extrapolation.
        row: the candidate's row in it.
    """
    entry = plan_entry(assessment, position)
    ends = float(found.low["step"][row]), float(found.high["step"][row])
    step = float(found.median.step[row])
    entry |= {
        "feasible": bool(assessment.feasible[position]),
        "step_time_s": step,
        "step_time_interval_s": list(ends),
        "mfu_pct": 100 * found.ideal_s / step,
        "mfu_pct_interval": [100 * found.ideal_s / ends[1], 100 * found.ideal_s / ends[0]],
        "parts_s": {part: float(found.median.seconds[part][row]) for part in PARTS},
        "parts_interval_s": {part: [float(found.low[part][row]), float(found.high[part][row])] for part in PARTS},
        "reserve_s": float(found.median.reserve[row]),
        "ideal_s": found.ideal_s,
        "decided_by": [
            {"ratio": name, "half_width_s": float(width[row])} for name, width in found.drivers[:5] if width[row] > 0
        ],
    }
    return entry
