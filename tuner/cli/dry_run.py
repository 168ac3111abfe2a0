"""`tune dry-run`: the real program on fake tensors: valid or not, and the memory of each pipeline rank."""

from __future__ import annotations

import argparse
from dataclasses import replace
import json
import sys
from typing import Any
from typing import TYPE_CHECKING

from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.job import Job


if TYPE_CHECKING:
    from search_space.setting import Setting
    from trial_runner.dry_run import DryRun


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("dry-run", help="one candidate's real program on fake tensors")
    parser.add_argument("job", metavar="JOB.toml", help="job file; the model must be a torchtitan function")
    parser.add_argument("--candidate", metavar="K=V,…", help="knobs, such as tp=8,pp=4,b=1")
    parser.add_argument(
        "--ranks",
        choices=("all", "worst"),
        default="all",
        help="pipeline ranks (worst: by the ledger)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="train the same steps for real on CPU ranks here and compare (small models, few ranks)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run it; exit code 2 when the framework refuses the candidate.

    Raises:
        UserError: bad job, bad candidate, or a knob that has no place in a torchtitan config.
    """
    from search_space.job_file import load_job
    from search_space.resolve import setting_from_job
    from trial_runner.dry_run import dry_run
    from trial_runner.dry_run import truth
    from trial_runner.recipe.base import describe
    from trial_runner.recipe.config_file import Recipe

    job = load_job(args.job)
    if job.model.torchtitan is None:
        raise UserError('model: a dry run needs torchtitan = "module:function"')
    base = describe(job.model.torchtitan, job.model.path)
    setting = setting_from_job(job, shape=base.shape)
    candidate = choose_candidate(job, args.candidate, setting.num_devices)
    recipe = Recipe(seq_len=setting.seq_len, global_batch_seqs=setting.global_batch_seqs, precision=setting.precision)
    ranks = [worst_rank(candidate, setting)] if args.ranks == "worst" else None
    if not args.json:
        print(f"dry run of {candidate.label()} at {candidate.num_devices} ranks …", file=sys.stderr)
    # Checked against CPU ranks, the dry run must keep for backward what CPU kernels keep.
    found = dry_run(candidate, base, recipe, ranks, parallel=2, gpu_kernels=not args.check)
    facts: dict[str, Any] = {
        "candidate": candidate.to_json(),
        "valid": found.valid,
        "error": found.error,
        "unknown": found.unknown,
        "compiled": found.compiled,
        "routing": found.routing,
        "ranks": [
            {
                "pp_rank": rank.pp_rank,
                "peak_allocated_gib": rank.peak_allocated_bytes / 2**30,
                "by_kind_gib": {kind: size / 2**30 for kind, size in rank.by_kind_bytes.items()},
                "flop": rank.flop,
                "collectives": rank.collectives,
            }
            for rank in found.ranks
        ],
        "elapsed_s": found.elapsed_s,
    }
    if found.valid and not setting.on_cpu:
        from tuner.referee.allowance import allowances
        from tuner.referee.allowance import SOURCES

        sizes = [rank.peak_allocated_bytes for rank in found.ranks]
        facts["allowance"] = {"ranks": allowances(candidate, setting, sizes), "sources": SOURCES}
    if args.check and found.valid:
        facts["check"] = compare_with_truth(found, truth(candidate, base, recipe))
    if args.json:
        print(json.dumps(facts))
    else:
        _show(facts)
    return 0 if found.valid else 2


def compare_with_truth(computed: DryRun, trained: DryRun) -> dict[str, Any]:
    """Dry run and real training side by side, by pipeline rank.

    Raises:
        UserError: the real training failed, so there is nothing to compare with.
    """
    if not trained.valid:
        raise UserError(f"check: training it for real on this machine's CPU failed: {trained.error}")
    real = {rank.pp_rank: rank for rank in trained.ranks}
    return {
        "ranks": [
            {
                "pp_rank": rank.pp_rank,
                "trained_peak_allocated_gib": real[rank.pp_rank].peak_allocated_bytes / 2**30,
                "difference_pct": 100 * (rank.peak_allocated_bytes / real[rank.pp_rank].peak_allocated_bytes - 1),
                "flop_equal": rank.flop == real[rank.pp_rank].flop,
                "collectives_equal": rank.collectives == real[rank.pp_rank].collectives,
            }
            for rank in computed.ranks
        ],
        "elapsed_s": trained.elapsed_s,
    }


def worst_rank(candidate: Candidate, setting: Setting) -> int:
    """The pipeline rank that the ledger expects to hold most memory."""
    import numpy as np

    from pruning.ledger.prices import price
    from search_space.pool import Pool

    return int(np.nanargmax(price(Pool.from_candidates([candidate]), setting).memory_by_rank_bytes[0]))


def choose_candidate(job: Job, text: str | None, num_devices: int) -> Candidate:
    """The asked candidate; degrees that are not named come from the baseline, the rest of the devices is sharded.

    Raises:
        UserError: the degrees do not multiply to the device count.
    """
    from search_space.knobs import parse_assignment
    from search_space.pool import canonical

    values = dict(job.baseline)
    if text:
        values |= parse_assignment(text)
    if "dp" in values:
        values["data_parallel_shard"] = values.pop("dp")
    candidate = Candidate.from_json(values)
    if "data_parallel_shard" not in values:
        others = candidate.num_devices
        candidate = replace(candidate, data_parallel_shard=max(1, num_devices // others))
    if candidate.num_devices != num_devices:
        raise UserError(
            f"candidate: its degrees multiply to {candidate.num_devices}, the cluster has {num_devices} devices"
        )
    return canonical(candidate)


def _show(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from dashboards.console import make_console

    console = make_console()
    if not facts["valid"]:
        who = "the dry run cannot tell" if facts["unknown"] else "refused by the framework"
        console.print(f"{who}: {facts['error']}", markup=False)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    kinds = list(facts["ranks"][0]["by_kind_gib"])
    for name in ("pipeline rank", "peak allocated GiB", *kinds, "FLOP"):
        table.add_column(name, justify="right")
    for rank in facts["ranks"]:
        cells = [f"{rank['by_kind_gib'][kind]:.3f}" for kind in kinds]
        table.add_row(str(rank["pp_rank"]), f"{rank['peak_allocated_gib']:.3f}", *cells, f"{rank['flop']:.4g}")
    console.print(table)
    if facts["compiled"]:
        console.print(f"compiled: {facts['compiled']}", markup=False)
    if facts["routing"]:
        console.print(f"routing: {facts['routing']}", markup=False)
    if "allowance" in facts:
        for shown, row in zip(facts["ranks"], facts["allowance"]["ranks"]):
            low, high = row["reserved_gib_interval"]
            console.print(
                f"rank {shown['pp_rank']}: reserved {row['reserved_gib']:.1f} GiB [{low:.1f}, {high:.1f}] with the "
                f"allocator's {row['allocator_gib']:.1f} and workspaces of {row['workspaces_gib']:.2f}; "
                f"device {row['device_gib']:.1f} with context {row['context_gib']:.1f} and communicators "
                f"{row['communicators_gib']:.1f}",
                markup=False,
            )
    for rank in facts.get("check", {}).get("ranks", []):
        console.print(
            f"rank {rank['pp_rank']} trained for real: {rank['trained_peak_allocated_gib']:.3f} GiB "
            f"(dry run {rank['difference_pct']:+.2f}%), FLOP {'equal' if rank['flop_equal'] else 'differ'}, "
            f"collectives {'equal' if rank['collectives_equal'] else 'differ'}",
            markup=False,
        )
    console.print(
        f"two steps of the eager program in {facts['elapsed_s']:.0f} s; the table shows allocated bytes",
        markup=False,
    )
