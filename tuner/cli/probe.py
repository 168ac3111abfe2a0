"""`tune probe`: what the devices and links of this machine really give, and which devices lag."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("probe", help="measure matrix products, memory and links of this machine")
    parser.add_argument("job", nargs="?", metavar="JOB.toml", help="job file (default: the shipped example)")
    parser.add_argument("--seconds", type=float, default=8.0, metavar="S", help="how long to measure (default 8)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Probe.

    Raises:
        UserError: the job cannot be read on this machine, or a rank failed.
    """
    from search_space.job_file import load_job
    from tuner.cli.start import embedded_job
    from tuner.probing.node import document
    from tuner.probing.node import probe
    from tuner.study.plan import make_plan

    plan = make_plan(load_job(args.job) if args.job else embedded_job())
    setting = plan.setting
    if not args.json:
        print(f"probing {setting.devices_per_node} {plan.device} devices for {args.seconds:.0f} s …", file=sys.stderr)
    found = document(probe(setting, plan.device, setting.devices_per_node, args.seconds), setting)
    if args.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 0


def _print(found: dict[str, Any]) -> None:
    from rich.table import Table

    from dashboards.console import make_console

    console = make_console()
    for node in found["nodes"]:
        shapes = [" × ".join(map(str, product["shape"])) for product in node["devices"][0]["products"]]
        table = Table("device", *[f"{shape} TFLOP/s" for shape in shapes], "memory GB/s", box=None, pad_edge=False)
        for device in node["devices"]:
            rates = [f"{product['tflops']:.4g}" for product in device["products"]]
            table.add_row(str(device["rank"]), *rates, f"{device['memory_gb_s']:.1f}")
        console.print(table)
        for row in zip(*[device["links"] for device in node["devices"]]):
            rate = min(link["gb_s"] for link in row)
            console.print(f"all-gather of {row[0]['bytes']:,} bytes: {rate:.3g} GB/s", markup=False)
    for suspect in found["suspects"]:
        console.print(
            f"suspect: device {suspect['rank']}: {suspect['what']} {suspect['value']:.3g}, "
            f"its node's median {suspect['median']:.3g}; left out",
            markup=False,
        )
    for name, row in found["coefficients"].items():
        console.print(
            f"{name}: {row['prior']:.3g} → {row['value']:.3g} (± {100 * row['log_sigma']:.0f}%)", markup=False
        )
    for text in found["not_measured"]:
        console.print(f"not measured: {text}", markup=False)
