"""`tune probe`: what devices, links and nodes really give, and which of them lag."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import sys
from typing import Any


BUSY = 0.1
"""Share of a node's cores in other hands that is worth a word."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("probe", help="measure matrix products, memory and links; name what lags")
    parser.add_argument("job", nargs="?", metavar="JOB.toml", help="job file (default: the shipped example)")
    parser.add_argument("--seconds", type=float, default=30.0, metavar="S", help="how long to measure (default 30)")
    parser.add_argument(
        "--address", help="address of a running Ray cluster, or auto: probe its nodes (default: this machine)"
    )
    parser.add_argument(
        "--nodes", type=int, metavar="N", help="with --address: so many nodes (default: all that fit the job)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Probe.

    Raises:
        UserError: the job cannot be read on this machine, the cluster does not answer or has too few nodes, or a rank
            failed.
    """
    from search_space.errors import UserError
    from search_space.job_file import load_job
    from trial_runner.probe import probe_node
    from tuner.cli.start import embedded_job
    from tuner.probing.node import document
    from tuner.probing.node import order_for
    from tuner.study.plan import make_plan

    if args.seconds <= 0:
        raise UserError(f"--seconds {args.seconds:g}: how long to measure must be more than 0")
    if args.nodes is not None and args.address is None:
        raise UserError("--nodes: this machine is one node; name a cluster with --address (auto: the one here)")
    if args.nodes is not None and args.nodes < 1:
        raise UserError(f"--nodes {args.nodes}: at least 1")
    plan = make_plan(load_job(args.job) if args.job else embedded_job())
    setting = plan.setting
    order = order_for(setting, plan.device, args.seconds)
    if args.address is not None:
        nodes = _of_cluster(args, plan, order)
    else:
        print(f"probing {order.ranks_per_node} {plan.device} devices for {args.seconds:g} s …", file=sys.stderr)
        nodes = [probe_node(order)]
    found = document(nodes, setting)
    if args.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0


def _of_cluster(args: argparse.Namespace, plan: Any, order: Any) -> Any:
    import shutil
    import tempfile

    from search_space.errors import UserError
    from tuner.cluster.session import join
    from tuner.cluster.session import Needs
    from tuner.probing.cluster import able_nodes
    from tuner.probing.cluster import probe_cluster
    from tuner.records.layout import studies_root

    width = order.ranks_per_node
    root = studies_root()
    root.mkdir(parents=True, exist_ok=True)
    # Beside the studies: what every node sees.
    folder = Path(tempfile.mkdtemp(prefix=".probe-", dir=root))
    needs = Needs(nodes=args.nodes or 1, devices=width, wait_s=plan.job.cluster.wait_s)
    try:
        with join(plan.device, width, args.address, folder, needs) as session:
            count = args.nodes or able_nodes(session, width)
            what = f"{count} node{'s' * (count > 1)} of {width} {plan.device} device{'s' * (width > 1)}"
            print(f"probing {what} for {args.seconds:g} s …", file=sys.stderr)
            probed = probe_cluster(session, order, count, folder / "ranks", plan.job.cluster.wait_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if probed.failed:
        raise UserError(f"probe: {probed.failed}")
    return probed.nodes


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    from dashboards.console import make_console
    from tuner.probing.node import suspect_text

    console = make_console()
    several = len(found["nodes"]) > 1
    first = found["nodes"][0]["devices"][0]
    shapes = [" × ".join(map(str, product["shape"])) for product in first["products"]]
    head = [*(["node"] if several else []), "device", *[f"{shape} TFLOP/s" for shape in shapes], "memory GB/s"]
    table = Table(*head, box=None, pad_edge=False, caption="best (mean)", caption_justify="left")
    for node in found["nodes"]:
        for device in node["devices"]:
            rates = [_pair(product["tflops"], product["mean_tflops"]) for product in device["products"]]
            name = [node["node"]] if several else []
            table.add_row(*name, str(device["rank"]), *rates, _pair(device["memory_gb_s"], device["memory_mean_gb_s"]))
    console.print(table)
    everyone = [device for node in found["nodes"] for device in node["devices"]]
    for key, where in (("links", "inside a node"), ("network", "between nodes")):
        for row in zip(*[device[key] for device in everyone if device[key]]):
            slowest = min(row, key=lambda link: link["gb_s"])
            rate = _pair(slowest["gb_s"], slowest["mean_gb_s"])
            console.print(f"all-gather of {slowest['bytes']:,} bytes {where}: {rate} GB/s", markup=False)
    for suspect in found["suspects"]:
        console.print(f"suspect: {suspect_text(suspect['node'], suspect)}; left out", markup=False)
    for node in found["nodes"]:
        if node["others_share"] > BUSY:
            console.print(
                f"{node['node']}: other work took {100 * node['others_share']:.0f}% of its cores meanwhile; "
                "on a CPU, and for links, what was found is less than it can give",
                markup=False,
            )
    for name, row in found["coefficients"].items():
        console.print(
            f"{name}: {row['prior']:.3g} → {row['value']:.3g} (± {100 * row['log_sigma']:.0f}%)", markup=False
        )
    for text in found["not_measured"]:
        console.print(f"not measured: {text}", markup=False)


def _pair(best: float, mean: float) -> str:
    return f"{best:.3g} ({mean:.3g})"
