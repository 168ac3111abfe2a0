"""`tune explain`: the whole account of one candidate."""

from __future__ import annotations

import argparse
import json
from typing import Any

from search_space.errors import UserError


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("explain", help="the whole account of one candidate, term by term")
    parser.add_argument("job", metavar="JOB.toml", help="job file")
    parser.add_argument("--candidate", required=True, metavar="K=V,…", help="knobs, such as tp=8,pp=4,vp=4,dp=32,b=1")
    parser.add_argument("--account", choices=("torchtitan", "megatron", "simple"), help="whose account (default: job)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain one candidate, feasible or not.

    Raises:
        UserError: the job or the candidate cannot be read, or its degrees do not fit the devices.
    """
    from pruning.explain import explain
    from search_space.job_file import load_job
    from search_space.resolve import setting_from_job

    setting = setting_from_job(load_job(args.job))
    framework = args.account if args.account in ("torchtitan", "megatron") else setting.framework
    candidate = candidate_from(args.candidate, framework, setting.num_devices)
    document = explain(candidate, setting, account_name=args.account)
    if args.json:
        print(json.dumps(document))
    else:
        _print(document)
    return 0


def candidate_from(text: str, framework: str, devices: int) -> Any:
    """A candidate from ``tp=8,pp=4,dp=32``; the data-parallel ranks that are not stated take what is left.

    ``dp`` is sharded with torchtitan, replicated (with ZeRO stage 1 unless stated) with other frameworks. Several
    virtual stages without a schedule mean the interleaved one.

    Raises:
        UserError: the text is no assignment, or the degrees do not multiply to the device count.
    """
    from search_space.candidate import Candidate
    from search_space.knobs import parse_assignment

    values = parse_assignment(text)
    sharded = framework == "torchtitan"
    key = "data_parallel_shard" if sharded else "data_parallel_replicate"
    if "dp" in values:
        values[key] = values.pop("dp")
    if values.get("virtual_stages", 1) > 1 and "schedule" not in values:
        values["schedule"] = "Interleaved1F1B"
    if not sharded:
        values.setdefault("zero_stage", 1)
        values.setdefault("loss_chunks", 1)
    candidate = Candidate.from_json(values)
    if not {"data_parallel_shard", "data_parallel_replicate"} & set(values):
        left, rest = divmod(devices, candidate.num_devices)
        if not rest:
            candidate = Candidate.from_json(values | {key: left})
    if candidate.num_devices != devices:
        raise UserError(wrong_product(candidate, devices))
    return candidate


def wrong_product(candidate: Any, devices: int) -> str:
    """What to say when degrees do not multiply to the device count: the product, and splits that would fit."""
    product = candidate.num_devices
    fixed = candidate.tensor_parallel * candidate.pipeline_parallel
    left, rest = divmod(devices, fixed)
    text = (
        f"candidate: tensor_parallel × pipeline_parallel × context_parallel × data_parallel = {product}, "
        f"the job has {devices} devices"
    )
    if rest:
        return f"{text}; {fixed} does not divide {devices}, choose other tensor or pipeline degrees"
    dp, cp = candidate.data_parallel, candidate.context_parallel
    splits = [(left // c, c) for c in range(1, left + 1) if left % c == 0]
    splits.sort(key=lambda split: min(abs(split[0] - dp) + abs(split[1] - 1), abs(split[1] - cp) + abs(split[0] - 1)))
    nearest = " or ".join(f"dp={d},cp={c}" for d, c in splits[:2])
    return f"{text}; nearest legal splits: {nearest}"


def _print(document: dict[str, Any]) -> None:
    from rich.table import Table

    from dashboards.console import make_console

    console = make_console()
    verdict = document["verdict"]
    console.print(f"{document['label']} by the {document['account']} account")
    low, high = document["step_time_interval_s"]
    console.print(
        f"step {document['step_time_s']:.4g} s [{low:.3g}, {high:.3g}] · MFU {document['mfu_pct']:.1f}% · "
        f"{'feasible' if verdict['feasible'] else 'refused'}"
    )
    for reason in verdict["reasons"]:
        console.print(f"  {reason['code']}: {reason['text']}")
    for change in document["to_become_feasible"]:
        console.print(f"  would fit with {change}")
    memory = Table(
        "GiB", *[f"rank {r}" for r in range(len(document["memory_gib_by_rank"]))], title="Memory", title_justify="left"
    )
    for name, values in document["memory_terms_gib"].items():
        if any(value > 0.005 for value in values):
            memory.add_row(name.replace("_", " "), *[f"{value:.2f}" for value in values])
    memory.add_row("all", *[f"{value:.2f}" for value in document["memory_gib_by_rank"]])
    console.print(memory)
    kept = Table("kept per block and micro-batch", "GiB")
    for name, value in document["activation_tensors_gib"].items():
        kept.add_row(name, f"{value:.3f}")
    console.print(kept)
    traffic = Table("communication", "link", "group", "GB a step", "messages", "seconds", "hideable")
    for row in document["communication"]:
        traffic.add_row(
            f"{row['dimension']} {row['primitive']}",
            row["link"],
            str(row["group"]),
            f"{row['bytes'] / 1e9:.2f}",
            str(row["messages"]),
            f"{row['time_s']:.3f}",
            "yes" if row["hideable"] else "no",
        )
    console.print(traffic)
    pipeline = document["pipeline"]
    console.print(
        f"pipeline: {pipeline['micro_batches']} micro-batches, bubble {pipeline['bubble_over_useful']:.1%} of useful "
        f"time ({pipeline['bubble_share_of_total']:.1%} of all); even closed form "
        f"{pipeline['bubble_over_useful_even']:.1%}; in flight {pipeline['inflight_by_rank']}"
    )
    parts = Table("ideal and parts", "seconds")
    parts.add_row("ideal", f"{document['ideal_s']:.4f}")
    for name, seconds in document["parts_s"].items():
        parts.add_row(name.replace("_", " "), f"{seconds:.4f}")
    console.print(parts)
    for step in document["decisions"]:
        console.print(f"{step['step']} = {step['value']}: {step['text']}")
    for row in document["placement"]:
        console.print(
            f"{row['dimension']}: {row['size']} ranks, {row['stride']} apart, on the {row['link']}; "
            f"first group's ranks {row['first_ranks']} on nodes {row['first_nodes']}"
        )
    if "simple" in document:
        console.print(f"simple account: {document['simple']}")
    for name, source in document["sources"].items():
        console.print(f"source, {name}: {source}")
