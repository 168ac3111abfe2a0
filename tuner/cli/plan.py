"""`tune plan`: every candidate of a job priced and ranked, nothing run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import time
from typing import Any

from search_space.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("plan", help="price and rank every candidate of a job, run nothing")
    parser.add_argument("job", metavar="JOB.toml", help="job file")
    parser.add_argument("--top", type=int, default=10, metavar="K", help="candidates to show (default 10)")
    parser.add_argument("--near", type=int, default=5, metavar="K", help="refused candidates to show (default 5)")
    parser.add_argument(
        "--coefficients", metavar="FILE", help="a study's coefficients.json: plan with what its trials calibrated"
    )
    parser.add_argument("--scaling", metavar="N,N,…", help="predicted MFU at these device counts, with what limits it")
    parser.add_argument(
        "--batch",
        choices=("recipe", "per-device"),
        default="recipe",
        help="with --scaling: the global batch stays as the recipe says, or grows with the devices (default recipe)",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="with --scaling: draw it")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan a job; exit code 2 when nothing is feasible.

    Raises:
        UserError: the job cannot be read or resolved.
    """
    started = time.perf_counter()
    from search_space.job_file import load_job

    if args.scaling:
        return _scaling(args, started)
    if args.plot:
        raise UserError("--plot draws a --scaling; give both")
    document = plan(load_job(args.job), args.top, args.near, read_text(args.coefficients))
    document["elapsed_s"] = time.perf_counter() - started
    if args.json:
        print(json.dumps(document))
    else:
        _print(document)
    return 0 if document["feasible"] else 2


def _scaling(args: argparse.Namespace, started: float) -> int:
    from pruning.calibration import load_coefficients
    from search_space.job_file import load_job
    from search_space.resolve import setting_from_job
    from tuner.scaling import parse_scales
    from tuner.scaling import plot
    from tuner.scaling import scaling

    job = load_job(args.job)
    setting = setting_from_job(job)
    text = read_text(args.coefficients)
    known = load_coefficients(text, setting) if text is not None else None
    entries = scaling(setting, job.search, parse_scales(args.scaling), args.batch, known)
    if args.plot:
        title = f"{setting.shape.name} on {setting.hardware.name} with {setting.framework}, batch: {args.batch}"
        plot(entries, Path(args.plot), title)
    document = {
        "model": setting.shape.name,
        "hardware": setting.hardware.name,
        "framework": setting.framework,
        "batch": args.batch,
        "scaling": entries,
        "elapsed_s": time.perf_counter() - started,
    }
    if args.json:
        print(json.dumps(document))
    else:
        _print_scaling(document)
    return 0 if any(entry["feasible"] for entry in entries) else 2


def _print_scaling(document: dict[str, Any]) -> None:
    from rich.table import Table

    from dashboards.console import make_console

    console = make_console()
    batch = "batch as the recipe says" if document["batch"] == "recipe" else "batch grows with the devices"
    console.print(f"{document['model']} on {document['hardware']} with {document['framework']}, {batch}", markup=False)
    table = Table("devices", "batch", "MFU %", "step s", "limited by", "candidate")
    for entry in document["scaling"]:
        first = (str(entry["devices"]), str(entry["global_batch_seqs"]))
        if not entry["feasible"]:
            table.add_row(*first, "", "", "", entry["why"])
            continue
        low, high = entry["mfu_pct_interval"]
        part = entry["limiting_part"]
        limit = f"{part.replace('_', ' ')} ({entry['points'][part]:.0f}% of the step)"
        mfu = f"{entry['mfu_pct']:.1f} [{low:.0f}–{high:.0f}]"
        label = entry["label"] + (" (may not fit)" if entry["may_not_fit"] else "")
        table.add_row(*first, mfu, f"{entry['step_time_s']:.3g}", limit, label)
    console.print(table)


def read_text(path: str | None) -> str | None:
    """The text of a coefficients file; None when none is named.

    Raises:
        UserError: it cannot be read.
    """
    if path is None:
        return None
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"coefficients {path}: cannot be read ({error}); a study writes coefficients.json") from None


def plan(job: Any, top: int, near: int, coefficients: str | None = None) -> dict[str, Any]:
    """The document of the command-line contract, without its elapsed time.

    Args:
        job: a :class:`search_space.job.Job`.
        top: feasible candidates to list, best first.
        near: refused candidates to list, nearest first.
        coefficients: JSON text of calibrated coefficients; absent: the shipped priors.

    Raises:
        UserError: the job cannot be resolved, or the coefficients are for other hardware or another framework.
    """
    import numpy as np

    from pruning.assess import assess
    from pruning.calibration import load_coefficients
    from pruning.explain import plan_entry
    from pruning.shortage import shortage
    from search_space.enumerate import enumerate_pool
    from search_space.resolve import setting_from_job

    setting = setting_from_job(job)
    pool = enumerate_pool(setting, job.search.knobs, job.search.allow_numeric_changes)
    known = load_coefficients(coefficients, setting) if coefficients is not None else None
    assessment = assess(pool, setting, known)
    feasible = np.flatnonzero(assessment.feasible)
    # Whoever runs one of these without a search wants the fastest that fits, so what may not fit comes after.
    order = feasible[np.lexsort((assessment.prices.step_time_s[feasible], assessment.doubtful[feasible]))]
    return {
        "model": setting.shape.name,
        "hardware": setting.hardware.name,
        "devices": setting.num_devices,
        "framework": setting.framework,
        "allowed_gib": assessment.allowed_bytes / 1024**3,
        "enumerated": len(pool),
        "feasible": len(feasible),
        "rejected": assessment.rejected(),
        "candidates": [plan_entry(assessment, int(i)) for i in order[:top]],
        "near_misses": [
            {
                "candidate": pool.candidate(i).to_json(),
                "label": pool.candidate(i).label(),
                "reasons": [reason.to_json() for reason in assessment.reasons(i)],
            }
            for i in assessment.nearest(near)
        ],
        "shortage": shortage(assessment, known),
    }


def _print(document: dict[str, Any]) -> None:
    from rich.table import Table

    from dashboards.console import make_console

    console = make_console()
    console.print(
        f"{document['model']} on {document['devices']} {document['hardware']} with {document['framework']}: "
        f"{document['enumerated']} candidates, {document['feasible']} feasible "
        f"(memory up to {document['allowed_gib']:.1f} GiB), {document['elapsed_s']:.2f} s"
    )
    refused = Table("refused by", "candidates", "example", title="Refused", title_justify="left")
    for group in document["rejected"]:
        refused.add_row(group["code"], str(group["count"]), group["example"])
    console.print(refused)
    best = Table("#", "candidate", "MFU %", "step s", "GiB", title="Fastest predicted", title_justify="left")
    for number, entry in enumerate(document["candidates"], start=1):
        low, high = entry["mfu_pct_interval"]
        memory = " ".join(f"{gib:.1f}" for gib in entry["memory_gib_by_rank"][:4])
        memory += " (may not fit)" if entry["may_not_fit"] else ""
        more = " …" if len(entry["memory_gib_by_rank"]) > 4 else ""
        mfu = f"{entry['mfu_pct']:.1f} [{low:.0f}–{high:.0f}]"
        best.add_row(str(number), entry["label"], mfu, f"{entry['step_time_s']:.3g}", memory + more)
    if document["candidates"]:
        console.print(best)
    parts = Table("#", "ideal", title="Where the step goes, seconds", title_justify="left")
    names = list(document["candidates"][0]["parts_s"]) if document["candidates"] else []
    for name in names:
        parts.add_column(name.replace("_", " "), justify="right")
    for number, entry in enumerate(document["candidates"], start=1):
        cells = [f"{entry['parts_s'][name]:.3f}" for name in names]
        parts.add_row(str(number), f"{entry['ideal_s']:.3f}", *cells)
    if document["candidates"]:
        console.print(parts)
    short = document["shortage"]
    if short is not None:
        term = short["tightest_term"].replace("_", " ")
        console.print(
            f"nothing fits: {short['label']} comes nearest and needs {short['over_gib']:.1f} GiB too much; its largest "
            f"term is {term}, {short['terms_gib'][short['tightest_term']]:.1f} GiB. What would help: "
            + "; ".join(short["help"])
        )
    said: set[tuple[str, ...]] = set()
    for miss in document["near_misses"]:
        texts = tuple(f"  {reason['code']}: {reason['text']}" for reason in miss["reasons"])
        if texts in said:
            continue
        said.add(texts)
        console.print("\n".join([f"nearly: {miss['label']}", *texts]))
