"""`tune extrapolate`: what a small run's ratios mean at another scale."""

from __future__ import annotations

import argparse
import json
from math import floor
from math import log10
from pathlib import Path
from typing import Any

from search_space.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser(
        "extrapolate",
        help="what a small run means at another scale: budget table, candidates, what stays unknown",
        description="Ratios that a study measured carry over with their uncertainty; communication, bubble and "
        "memory are "
        "computed anew for the target. With a job file, ratios come from --ratios, or are the shipped priors.",
    )
    parser.add_argument("source", metavar="STUDY|JOB.toml", help="name or folder of a study, or a job file")
    parser.add_argument(
        "--to",
        metavar="K=V,…",
        help="the target (default: the job's [extrapolate]): gpus=1024, and where they differ model=llama3_70b, "
        "gpu=H100-SXM, gpus_per_node, seq_len, "
        "global_batch_tokens or global_batch_seqs",
    )
    parser.add_argument("--ratios", metavar="FILE", help="TOML of ratios stated by hand, in place of measured ones")
    parser.add_argument(
        "--candidate",
        action="append",
        default=[],
        metavar="K=V,…",
        help="price this one at the target (may be repeated)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Extrapolate; exit code 2 when nothing is feasible at the target.

    Raises:
        UserError: study, job, target, ratios or candidate cannot be used.
    """
    from tuner.cli.explain import candidate_from
    from tuner.evidence.extrapolate import document
    from tuner.evidence.ratios_file import load_ratios
    from tuner.evidence.target import make_target
    from tuner.evidence.target import parse_target

    small = small_run(args.source)
    if args.to is None and not small.meant_for:
        raise UserError("extrapolate: no target; give --to gpus=1024,…, or [extrapolate] in the job")
    values = parse_target(args.to) if args.to is not None else small.meant_for
    target = make_target(small.setting, values)
    given = load_ratios(args.ratios) if args.ratios else []
    setting = target.setting
    asked = [candidate_from(text, setting.framework, setting.num_devices) for text in args.candidate]
    found = document(small, target, given, asked)
    if args.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0 if found["candidates"] else 2


def small_run(source: str) -> Any:
    """A study by name or folder, or a job file whose setting stands for a run that has not been made.

    Raises:
        UserError: it is neither.
    """
    from pruning.coefficients import prior
    from search_space.job_file import load_job
    from tuner.evidence.small_run import read_small_run
    from tuner.evidence.small_run import SmallRun
    from tuner.export.find import job_setting
    from tuner.records.layout import find_folder

    if not source.endswith(".toml"):
        return read_small_run(find_folder(source))
    job = load_job(source)
    setting, _ = job_setting(job)
    return SmallRun(
        name=Path(source).name,
        setting=setting,
        knobs=dict(job.search.knobs),
        numeric_changes=job.search.allow_numeric_changes,
        coefficients=prior(setting),
        meant_for=job.extrapolate.model_dump(exclude_none=True),
    )


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    from dashboards.console import make_console

    console = make_console()
    where = found["measured_on"]
    console.print(
        f"{found['model']} on {found['devices']} {found['hardware']}, sequence {found['seq_len']}, batch "
        f"{found['global_batch_seqs']}; from {found['study']} ({where['trials']} trials of {where['model']} on "
        f"{where['devices']} {where['hardware']})",
        markup=False,
    )
    for note in found["notes"]:
        console.print(f"assumed: {note}", markup=False)
    if not found["candidates"]:
        console.print("nothing fits there:", markup=False)
        for miss in found["near_misses"]:
            console.print(f"  nearly: {miss['label']}: {miss['reasons'][0]['text']}", markup=False)
        return
    digits = digits_for(found["candidates"][0]["step_time_s"])
    table = Table("seconds", title="Budget", title_justify="left")
    for entry in found["candidates"]:
        table.add_column(entry["label"], justify="right")
    rows = {"ideal": [f"{entry['ideal_s']:.{digits + 1}f}" for entry in found["candidates"]]}
    for part in found["candidates"][0]["parts_s"]:
        rows[part.replace("_", " ")] = [
            _range(entry["parts_s"][part], entry["parts_interval_s"][part], digits) for entry in found["candidates"]
        ]
    if any(entry["reserve_s"] for entry in found["candidates"]):
        rows["reserve (plans are optimistic)"] = [f"{entry['reserve_s']:.{digits}f}" for entry in found["candidates"]]
    rows["step"] = [
        _range(entry["step_time_s"], entry["step_time_interval_s"], digits) for entry in found["candidates"]
    ]
    rows["MFU %"] = [_range(entry["mfu_pct"], entry["mfu_pct_interval"], 1) for entry in found["candidates"]]
    rows["GiB, largest rank"] = [
        f"{max(entry['memory_gib_by_rank']):.1f}"
        + ("" if entry["feasible"] else " (refused)")
        + (" (may not fit)" if entry["may_not_fit"] else "")
        for entry in found["candidates"]
    ]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
    scaled = found["winner_scaled"]
    if scaled is not None:
        verdict = "" if scaled["feasible"] else "; refused: " + scaled["reasons"][0]["text"]
        console.print(
            f"the study's winner with more replicas: {scaled['label']}, MFU {scaled['mfu_pct']:.1f}%{verdict}",
            markup=False,
        )
    ratios = Table("ratio", "value", "interval", "from", title="Carried", title_justify="left")
    for ratio in found["carried"]:
        if ratio["source"] != "prior":
            low, high = ratio["interval"]
            value = f"{ratio['value']:.3g} {ratio['unit']}"
            ratios.add_row(ratio["name"].replace("_", " "), value, f"{low:.3g} to {high:.3g}", ratio["source"])
    priors = [ratio["name"] for ratio in found["carried"] if ratio["source"] == "prior"]
    if ratios.row_count:
        console.print(ratios)
    if priors:
        console.print("shipped priors for the rest: " + ", ".join(priors).replace("_", " "), markup=False)
    console.print("what cannot be known from this run:", markup=False)
    for line in found["unknown"]:
        console.print(f"  - {line}", markup=False)


def digits_for(step_s: float) -> int:
    """Decimals that show a hundredth of a step, at least two."""
    return max(2, 2 - floor(log10(step_s)))


def _range(value: float, ends: list[float], digits: int) -> str:
    return f"{value:.{digits}f} [{ends[0]:.{digits}f}–{ends[1]:.{digits}f}]"
