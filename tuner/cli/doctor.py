"""`tune doctor`: what is installed, what is found, what would fail."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib import metadata
import json
import os
from pathlib import Path
import shutil
from typing import Any


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    ok: bool
    found: str
    advice: str = ""
    fatal: bool = True


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("doctor", help="what is installed, what is found, what would fail")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the findings; exit code 0 when trials can run here, 2 when not."""
    checks = [*_packages(), *_devices(), *_machine()]
    bad = [check for check in checks if not check.ok and check.fatal]
    if args.json:
        rows = [{"check": c.name, "ok": c.ok, "found": c.found, "advice": c.advice} for c in checks]
        print(json.dumps({"ok": not bad, "checks": rows}))
    else:
        for check in checks:
            mark = "ok  " if check.ok else "FAIL" if check.fatal else "note"
            print(f"{mark} {check.name}: {check.found}" + ("" if check.ok else f" — {check.advice}"))
        print("trials can run here" if not bad else f"{len(bad)} problem(s): trials would fail here")
    return 2 if bad else 0


def _packages() -> list[Check]:
    wanted = {"torch": "2.14", "torchtitan": "0.3.0", "ray": "2.60", "optuna": "5.0", "mlflow": "3.17", "pydantic": "2"}
    checks = []
    for package, prefix in wanted.items():
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            checks.append(Check(package, False, "not installed", "pip install -r requirements.lock"))
            continue
        advice = f"tested with {prefix}; pip install -r requirements.lock"
        checks.append(Check(package, found.startswith(prefix), found, advice, fatal=package in ("torch", "torchtitan")))
    return checks


def _devices() -> list[Check]:
    from search_space.hardware import TABLE
    from trial_runner import devices

    names = devices.gpu_names()
    if not names:
        slots = devices.num_cpu_slots()
        return [
            Check(
                "devices",
                slots > 1,
                f"no GPU; {slots} CPU slots (gloo)",
                "one slot leaves no parallelism to tune",
                False,
            )
        ]
    known = any(name != "cpu" and name.upper().split("-")[0] in names[0].upper() for name in TABLE)
    return [
        Check("devices", True, f"{len(names)} × {names[0]}"),
        Check("hardware table", known, names[0], "set cluster.peak_tflops and hbm_gib in the job file", fatal=False),
    ]


def _machine() -> list[Check]:
    import psutil

    from trial_runner import devices

    git = shutil.which("git")
    compiler = shutil.which("g++")
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    shm = psutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").exists() else 0.0
    memory = psutil.virtual_memory().available / 2**30
    return [
        Check("git", git is not None, git or "not found", "the winner's commit needs it"),
        Check("g++", compiler is not None, compiler or "not found", "torch.compile on a CPU needs it", fatal=False),
        Check("free disk", free > 2, f"{free:.1f} GiB", "a study keeps traces and logs; free some space"),
        _shared_memory(shm, devices.num_gpus()),
        Check("free memory", memory > 4, f"{memory:.1f} GiB", "two CPU ranks take about 2.5 GiB", fatal=False),
        Check("working folder", os.access(Path.cwd(), os.W_OK), str(Path.cwd()), "studies are written here"),
    ]


def _shared_memory(free_gib: float, num_gpus: int) -> Check:
    """Whether /dev/shm holds what a node's ranks may need; without enough for Ray itself nothing runs."""
    from trial_runner.devices import shared_memory_gib

    least = 0.2
    needed = shared_memory_gib(num_gpus) if num_gpus else least
    advice = (
        f"Ray and NCCL between {num_gpus} ranks may need {needed:g} GiB; raise --shm-size, or the size of the pod's "
        "memory volume"
    )
    return Check("shared memory", free_gib > needed, f"{free_gib:.1f} GiB in /dev/shm", advice, fatal=free_gib <= least)
