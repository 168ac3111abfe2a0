"""From trace files to a breakdown: read, find steps, align ranks, attribute, check."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from search_space.errors import UserError
from trial_runner.breakdown import intervals
from trial_runner.breakdown.advice import compare
from trial_runner.breakdown.align import align
from trial_runner.breakdown.attribute import find_work
from trial_runner.breakdown.attribute import own
from trial_runner.breakdown.attribute import Owned
from trial_runner.breakdown.attribute import Work
from trial_runner.breakdown.communication import Communication
from trial_runner.breakdown.communication import find_communication
from trial_runner.breakdown.doubts import check_trace
from trial_runner.breakdown.doubts import lost_text
from trial_runner.breakdown.doubts import warn_step
from trial_runner.breakdown.gemm import find_products
from trial_runner.breakdown.gemm import product_table
from trial_runner.breakdown.integrity import check
from trial_runner.breakdown.links import Links
from trial_runner.breakdown.read import find_rank
from trial_runner.breakdown.read import read_trace
from trial_runner.breakdown.result import Breakdown
from trial_runner.breakdown.result import StepBreakdown
from trial_runner.breakdown.steps import find_steps
from trial_runner.breakdown.steps import Step
from trial_runner.breakdown.stragglers import find_stragglers
from trial_runner.breakdown.tables import collective_table
from trial_runner.breakdown.trace import KERNEL
from trial_runner.breakdown.trace import Trace


if TYPE_CHECKING:
    from trial_runner.clocks import ClockSample


@dataclass(kw_only=True)
class _Rank:
    """One rank on the way."""

    rank: int
    trace: Trace
    links: Links
    steps: list[Step]
    communication: list[Communication]


def break_down(
    paths: Sequence[Path],
    *,
    ideal_s: float | None = None,
    ideal_by_rank_s: Mapping[int, float] | None = None,
    step: str | int = "all",
    expected: Mapping[str, tuple[float, float]] | None = None,
    measured_step_s: float | None = None,
    peak_flops: float | None = None,
    memory_bandwidth: float | None = None,
    clocks: Sequence[ClockSample] | None = None,
) -> Breakdown:
    """Break the steps of one or more traces (one per rank) down into useful time and seven parts.

    Args:
        paths: traces of one job, one per rank.
        ideal_s: ideal time of every rank, seconds.
        ideal_by_rank_s: ideal time by rank, seconds; wins over ``ideal_s``.
        step: ``all``, ``median`` (of the first rank's steps by length) or a step's number.
        expected: range of each part, seconds; what is outside becomes a finding.
        measured_step_s: step time without the profiler, seconds; MFU then comes from it.
        peak_flops: peak of the device, FLOP/s, for the efficiency of matrix products.
        memory_bandwidth: of the device, bytes/s, for the roofline of matrix products.
        clocks: samples of the nodes' clocks; the kernel part is then split by them.

    Raises:
        UserError: a trace cannot be read, two have the same rank, the step is not there, a trace of several ranks
            shows no communication, or an ideal time is above the compute time.
    """
    if not paths:
        raise UserError("no trace given; give one trace per rank")
    for name, value in (("ideal time", ideal_s), ("measured step time", measured_step_s)):
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"{name} {value} s: it must be a positive number of seconds")
    warnings: list[str] = []
    ranks = _read_ranks([Path(path) for path in paths], warnings)
    matches, notes = align({r.rank: r.trace for r in ranks}, {r.rank: r.communication for r in ranks})
    warnings += notes
    numbers = _chosen(ranks, step, warnings)
    steps: list[StepBreakdown] = []
    for rank in ranks:
        ideal = (ideal_by_rank_s or {}).get(rank.rank, ideal_s)
        work = find_work(rank.links, rank.communication)
        chosen = _with_enough_compute(rank, [one for one in rank.steps if one.number in numbers], work, ideal, warnings)
        for one in chosen:
            done = _break_step(rank, one, work, ideal, measured_step_s, (peak_flops, memory_bandwidth), warnings)
            steps.append(_with_clocks(done, rank.trace, one, clocks))
    steps.sort(key=lambda item: (item.step, item.rank))
    result = Breakdown(
        steps=steps,
        stragglers=find_stragglers(
            {rank.rank: [one for one in rank.steps if one.number in numbers] for rank in ranks},
            matches,
            sum(step.step_s for step in steps) / len(ranks),
        ),
        warnings=list(dict.fromkeys(warnings)),
        expected_s=dict(expected or {}),
    )
    if expected:
        result.findings.extend(compare(result, expected))
    return result


def _read_ranks(paths: list[Path], warnings: list[str]) -> list[_Rank]:
    ranks: list[_Rank] = []
    files: dict[int, Path] = {}
    for path in paths:
        trace = read_trace(path)
        rank = trace.rank if trace.rank is not None else _manifest_rank(path)
        if rank is None:
            if len(paths) > 1:
                raise UserError(
                    f"trace {path}: no rank in the file (distributedInfo), in its name (rank3_trace.json) or in a "
                    "manifest.json beside it ({name: rank}); with several traces each needs one"
                )
            rank = find_rank(path) or 0
            warnings.append(f"{path.name}: no rank in the file or its name; taken as rank 0")
        if rank in files:
            raise UserError(
                f"trace {path}: rank {rank} again, it is also the rank of {files[rank]}; give one trace per rank"
            )
        files[rank] = path
        links = Links(trace)
        steps, notes = find_steps(trace)
        if not steps:
            raise UserError(f"trace {path}: no step marks (ProfilerStep#N) and no work in it, so nothing to break down")
        warnings += [f"{path.name}: {note}" for note in notes]
        communication = find_communication(trace, links)
        check_trace(trace, links, communication, warnings)
        ranks.append(_Rank(rank=rank, trace=trace, links=links, steps=steps, communication=communication))
    return sorted(ranks, key=lambda item: item.rank)


def _manifest_rank(path: Path) -> int | None:
    """Rank from a ``manifest.json`` beside the trace that maps file names to ranks."""
    try:
        ranks = json.loads((path.parent / "manifest.json").read_text())
        value = ranks.get(path.name) if isinstance(ranks, dict) else None
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, int) and value >= 0 else None


def _chosen(ranks: list[_Rank], step: str | int, warnings: list[str]) -> set[int]:
    """Numbers of the steps to analyse."""
    per_rank = [{one.number for one in rank.steps} for rank in ranks]
    everywhere = set.intersection(*per_rank)
    if step != "all" and step != "median":
        try:
            number = int(step)
        except ValueError:
            raise UserError(f"step {step!r}: give a step's number, all or median") from None
        if number not in set.union(*per_rank):
            known = ", ".join(map(str, sorted(set.union(*per_rank))))
            raise UserError(f"step {number} is not in the given traces; they hold {known}")
        for rank in ranks:
            for one in rank.steps:
                if one.number == number and not (found := check(rank.links, one)).reliable:
                    warnings.append(lost_text(rank.trace, one, found))
        return {number}
    numbers = everywhere or set.union(*per_rank)
    bad = set()
    for rank in ranks:
        for one in rank.steps:
            found = check(rank.links, one)
            if one.number in numbers and not found.reliable:
                bad.add(one.number)
                warnings.append(lost_text(rank.trace, one, found))
    if bad and bad != numbers:
        warnings.append(f"unusable steps left out: {', '.join(map(str, sorted(bad)))}")
        numbers = numbers - bad
    if step == "median":
        lengths = sorted((one.end - one.start, one.number) for one in ranks[0].steps if one.number in numbers)
        return {lengths[(len(lengths) - 1) // 2][1]}
    return numbers


def _with_enough_compute(
    rank: _Rank, steps: list[Step], work: Work, ideal: float | None, warnings: list[str]
) -> list[Step]:
    """The steps whose compute time is not below the ideal time; the others are reported, and an error when all are."""
    trace = rank.trace
    kept, faults = [], []
    for step in steps:
        busy = intervals.total(work.busy(trace, step.start, step.end))
        if ideal is None or ideal * 1e9 <= busy + 500:
            kept.append(step)
        else:
            faults.append(
                f"step {step.number}: ideal time {ideal:.6f} s is above the {busy / 1e9:.6f} s in which compute "
                "kernels ran, so it cannot be right: check the model's FLOP on this rank, the peak and the precision"
            )
    if faults and not kept:
        raise UserError(f"trace {trace.path}: {faults[0]}")
    warnings += [f"error: {trace.path.name}: {fault}; this step is left out" for fault in faults]
    return kept


def _break_step(
    rank: _Rank,
    step: Step,
    work: Work,
    ideal: float | None,
    measured_step_s: float | None,
    roof: tuple[float | None, float | None],
    warnings: list[str],
) -> StepBreakdown:
    trace, links = rank.trace, rank.links
    owned = own(links, step, work, rank.communication)
    found = check(links, step)
    where = f"{trace.path.name}: step {step.number}"
    busy = intervals.total(owned.compute)
    recompute = owned.recompute_ns
    useful, efficiency = busy - recompute, 0
    if ideal is not None:
        useful = min(round(ideal * 1e9), busy)
        if useful > busy - recompute:
            warnings.append(
                f"{where}: ideal time and recompute together exceed the compute time; recompute is cut from "
                f"{recompute / 1e9:.6f} to {(busy - useful) / 1e9:.6f} s"
            )
            recompute = busy - useful
        efficiency = busy - useful - recompute
    warn_step(where, found, measured_step_s, step, warnings)
    products = find_products(links, owned.compute_rows)
    parts = {
        "bubble": intervals.total(owned.bubble),
        "exposed_communication": intervals.total(owned.exposed),
        "recompute": recompute + intervals.total(owned.recompute_between),
        "data_wait": intervals.total(owned.data_wait),
        "kernel_efficiency": efficiency,
        "cpu_launch": intervals.total(owned.cpu_launch),
        "straggler": intervals.total(owned.straggler),
    }
    table, by_dimension = collective_table(step, owned, rank.communication, trace)
    return StepBreakdown(
        file=str(trace.path),
        rank=rank.rank,
        step=step.number,
        step_s=(step.end - step.start) / 1e9,
        ideal_s=ideal,
        useful_s=useful / 1e9,
        parts_s={part: value / 1e9 for part, value in parts.items()},
        unexplained_s=intervals.total(owned.unexplained) / 1e9,
        compute_s=busy / 1e9,
        coverage_pct=found.coverage_pct,
        launches=found.launches,
        launches_without_kernel=found.lost,
        kernels=found.kernels if links.on_device else _begun(trace, owned.compute_rows, step),
        unknown_kernels=found.unknown,
        time_by_kind_s=found.time_by_kind_s,
        exposed_by_dimension_s=by_dimension,
        launch_bound_s=_launch_bound(links, owned) / 1e9,
        sync_calls=found.sync_calls,
        sync_s=found.sync_s,
        collectives=table,
        matrix_products=product_table(links, owned.compute_rows, products, *roof),
        inferred=step.inferred,
        reliable=found.reliable,
        recompute_basis=owned.recompute.basis,
        measured_step_s=measured_step_s,
    )


def _begun(trace: Trace, rows: np.ndarray, step: Step) -> int:
    return int((trace.start[rows] >= step.start).sum())


def _with_clocks(done: StepBreakdown, trace: Trace, step: Step, clocks: Sequence[ClockSample] | None) -> StepBreakdown:
    """Split the kernel part: what a lower clock than the peak clock cost of the compute time, and the rest."""
    if not clocks:
        return done
    from trial_runner.clocks import clock_share

    begin = (trace.origin_ns + step.start) / 1e9
    share = clock_share(clocks, begin, begin + done.step_s)
    if share is None:
        return done
    lost = min(done.parts_s["kernel_efficiency"], (1 - share) * done.compute_s)
    return replace(done, clock_deficit_s=lost)


def _launch_bound(links: Links, owned: Owned) -> int:
    """Nanoseconds of CPU-launch idle that ended with a kernel whose launch began after the device had run dry."""
    trace, idle = links.trace, owned.cpu_launch
    kernels = trace.rows(KERNEL)
    if not len(idle) or not len(kernels):
        return 0
    place = np.searchsorted(trace.start[kernels], idle[:, 1])
    hit = (place < len(kernels)) & (trace.start[kernels[np.minimum(place, len(kernels) - 1)]] == idle[:, 1])
    called = links.called_at[kernels[np.minimum(place, len(kernels) - 1)]]
    late = hit & (called >= idle[:, 0])
    return int((idle[late, 1] - idle[late, 0]).sum())
