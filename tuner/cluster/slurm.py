"""Ray over the nodes of a Slurm allocation: the head here, one worker on each other node through ``srun``."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
from dataclasses import dataclass
import json
import os
from pathlib import Path
import re
import shutil
import socket
import subprocess
import sys
import time
from typing import IO

from search_space.errors import UserError
from trial_runner.gang import free_port
from tuner.processes import stop_group


START_TIMEOUT_S = 180.0
"""Longest wait for the workers to join, seconds."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The Slurm allocation that this process runs in."""

    job_id: str
    """Slurm's job."""

    nodes: tuple[str, ...]
    """Host names, in Slurm's order."""

    here: str
    """Host name of this node."""

    @property
    def others(self) -> tuple[str, ...]:
        """The nodes that a worker must be started on."""
        return tuple(node for node in self.nodes if node != self.here)


def allocation(env: Mapping[str, str] | None = None) -> Allocation | None:
    """The allocation around this process; None outside Slurm.

    Raises:
        UserError: Slurm's node list cannot be read.
    """
    env = os.environ if env is None else env
    job_id, nodes = env.get("SLURM_JOB_ID"), env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not job_id or not nodes:
        return None
    names = tuple(expand(nodes))
    own = env.get("SLURMD_NODENAME") or socket.gethostname()
    here = next((name for name in names if name == own or name.split(".")[0] == own.split(".")[0]), names[0])
    return Allocation(job_id=job_id, nodes=names, here=here)


def expand(text: str) -> list[str]:
    """Host names of a Slurm node list such as ``gpu[001-003,7],login1``.

    ``scontrol show hostnames`` does the same, but is often missing in containers.

    Raises:
        UserError: brackets or ranges do not close.
    """
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        names += _expand_one(part)
    if not names or re.sub(r"\[[^\[\]]*\]", "", text).count("[") or text.count("[") != text.count("]"):
        raise UserError(f"SLURM_JOB_NODELIST = {text!r}: not a node list")
    return names


def _expand_one(part: str) -> list[str]:
    found = re.match(r"([^\[]*)\[([^\]]*)\](.*)$", part)
    if found is None:
        return [part]
    prefix, ranges, rest = found.groups()
    tails = _expand_one(rest)
    names = []
    for piece in ranges.split(","):
        first, dash, last = piece.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UserError(f"SLURM_JOB_NODELIST: found the range {piece!r} in {part!r}, needs numbers")
        numbers = range(int(first), int(last or first) + 1)
        names += [f"{prefix}{number:0{len(first)}d}{tail}" for number in numbers for tail in tails]
    return names


@contextlib.contextmanager
def ray_over(found: Allocation, resources: Mapping[str, int], log_folder: Path) -> Iterator[str]:
    """Start Ray on every node of an allocation and stop it at the end.

    Args:
        found: the allocation.
        resources: custom resources of each node.
        log_folder: where the output of Ray's starting commands goes.

    Yields:
        The address of the head.

    Raises:
        UserError: ``srun`` is missing, or workers did not join in time.
    """
    if found.others and shutil.which("srun") is None:
        raise UserError(
            f"Slurm job {found.job_id} has {len(found.nodes)} nodes, but srun is not on the path here; start Ray on "
            "the nodes yourself and give --address"
        )
    head_ip = _own_address()
    port = free_port(head_ip)
    log_folder.mkdir(parents=True, exist_ok=True)
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    ray += [f"--resources={json.dumps(dict(resources))}"] if resources else []
    processes: list[subprocess.Popen[bytes]] = []
    with (
        (log_folder / "ray-head.log").open("wb") as head_log,
        (log_folder / "ray-workers.log").open("wb") as worker_log,
    ):
        try:
            head = [*ray, "--head", f"--node-ip-address={head_ip}", f"--port={port}", "--dashboard-host=127.0.0.1"]
            processes.append(_start(head, head_log))
            _wait(lambda: _listens(head_ip, port), processes, "the head of Ray", head_log.name)
            if found.others:
                srun = [
                    "srun",
                    f"--jobid={found.job_id}",
                    f"--nodes={len(found.others)}",
                    f"--ntasks={len(found.others)}",
                ]
                srun += ["--ntasks-per-node=1", f"--nodelist={','.join(found.others)}", "--overlap", "--export=ALL"]
                processes.append(_start([*srun, *ray, f"--address={head_ip}:{port}"], worker_log))
            yield f"{head_ip}:{port}"
        finally:
            for process in reversed(processes):
                stop_group(process, 15.0)


def prepare_token() -> None:
    """Make Ray's token where there is none, so that its ports answer nobody else; a mode set by the user is respected.

    Must run before Ray is imported here, which reads the mode then. ``srun`` exports mode and token to the nodes, whose
    home folders need not be this one's.

    Raises:
        UserError: the token cannot be made.
    """
    if "RAY_AUTH_MODE" in os.environ or "RAY_AUTH_TOKEN" in os.environ:
        return
    command = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"]
    done = subprocess.run(command, capture_output=True, text=True)
    token = done.stdout.strip()
    if done.returncode or not token:
        raise UserError(f"Ray's token cannot be made by `ray get-auth-token --generate`: {done.stderr.strip()[-500:]}")
    with contextlib.suppress(OSError):
        (Path.home() / ".ray" / "auth_token").chmod(0o600)
    os.environ.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})


def wait_for_nodes(count: int, log: Path) -> None:
    """Wait until so many nodes have joined the Ray that this process is connected to.

    Raises:
        UserError: they did not in time.
    """
    import ray

    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        alive = sum(node["Alive"] for node in ray.nodes())
        if alive >= count:
            return
        if time.monotonic() > deadline:
            raise UserError(f"{alive} of {count} nodes joined Ray within {START_TIMEOUT_S:.0f} s; see {log}")
        time.sleep(0.5)


def _start(command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait(ready: Callable[[], bool], processes: list[subprocess.Popen[bytes]], what: str, log: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ready():
        if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
            raise UserError(f"{what} did not start; see {log}")
        time.sleep(0.2)


def _own_address() -> str:
    """Address of this node that others reach it at: host names often mean the loopback interface here."""
    from ray._private.services import get_node_ip_address

    return str(get_node_ip_address())


def _listens(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((address, port)) == 0
