"""A gang's share of one node: starts the rank processes of a trial, watches them, stops them for good."""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
import json
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

from trial_runner import transport
from trial_runner.compile_cache import cache_environment
from trial_runner.devices import SLEEPING_THREADS
from trial_runner.host_memory import oom_kills
from trial_runner.spec import rank_log
from trial_runner.spec import TrialSpec


KILL_GRACE_S = 5.0
"""Longest time between the decision to stop a gang and its processes being gone, seconds."""


KEEP_FREED_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 28),
}
"""glibc settings of CPU ranks: freed memory stays with the process, as with a GPU's caching allocator. Without them
every large tensor of every step is mapped and cleared anew, which costs up to a third of a step and scatters it."""


ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""Allocator of GPU ranks unless the job or the surroundings say otherwise: without it fragmentation alone can end a
configuration that fits."""


def free_port(host: str = "127.0.0.1", prefer: int = 0) -> int:
    """A TCP port of ``host`` that is free now: ``prefer`` if it is one, else any."""
    with contextlib.suppress(OSError), socket.socket() as probe:
        probe.bind((host, prefer))
        return int(probe.getsockname()[1])
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@dataclass
class GangState:
    """What is known of a running node-share."""

    pids: dict[int, int] = field(default_factory=dict)
    """Process id by rank."""

    exit_codes: dict[int, int | None] = field(default_factory=dict)
    """Exit code by rank; negative for a signal, None for a rank that had to be killed."""

    exit_unix_s: dict[int, float] = field(default_factory=dict)
    """When each rank ended, seconds since the epoch."""

    host_oom_kills: int = 0
    """Processes that the kernel killed for memory on this node while the ranks ran."""

    ended: str | None = None
    """Why it is over (``done``, ``failed``, ``timeout``, ``stopped``, ``killed``), or None while it runs."""


class NodeShare:
    """The rank processes of one trial on one node."""

    def __init__(
        self,
        spec: TrialSpec,
        *,
        ranks: list[int],
        node: int,
        master: tuple[str, int],
        deadline_s: float,
        devices: list[str] | None = None,
        program: Sequence[str] | None = None,
    ) -> None:
        """Start the ranks.

        Args:
            spec: the trial's order.
            ranks: global rank numbers of this node-share.
            node: index of this node in the gang.
            master: address and port of the rendezvous.
            deadline_s: seconds of wall time after which the ranks are killed, whatever happens to us.
            devices: device ids that the ranks may use, one a rank; None leaves visibility as it is.
            program: what Python runs as a rank, its last argument is the path of the order; None: the order's module.
        """
        self.state = GangState()
        self._kills_before = oom_kills()
        folder = Path(spec.folder)
        spec_path = folder / f"order-node{node}.json"
        spec.write(spec_path)
        orders = []
        for local, rank in enumerate(ranks):
            log = rank_log(folder, rank)
            log.write_bytes(b"")
            orders.append(
                {
                    "rank": rank,
                    "argv": [sys.executable, "-P", *(program or ("-m", spec.program)), str(spec_path)],
                    "env": rank_environment(spec, rank, local, len(ranks), node, master, devices),
                    "log": str(log),
                    "cwd": spec.workdir or str(folder),
                }
            )
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-S", str(Path(__file__).with_name("warden.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd=folder,
        )
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps({"ranks": orders, "deadline_s": deadline_s}) + "\n").encode())
        self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def group(self) -> int:
        """Process group of the warden and everything it started."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            facts: dict[str, Any] = json.loads(line)
            if facts["event"] == "rank":
                self.state.pids[facts["rank"]] = facts["pid"]
            elif facts["event"] == "exit":
                self.state.exit_codes[facts["rank"]] = facts["code"]
                self.state.exit_unix_s[facts["rank"]] = facts["unix_s"]
            elif facts["event"] == "end":
                self.state.host_oom_kills = max(0, oom_kills() - self._kills_before)
                self.state.ended = facts["why"]
        self._process.wait()
        if self.state.ended is None:
            # The warden died without a word: its ranks are ours to end now.
            self._kill_group()
            self.state.ended = "killed"

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.group, signal.SIGKILL)

    def poll(self) -> GangState:
        """The present state; ``ended`` is only set once every process of the group is gone."""
        if self.state.ended is not None and group_alive(self.group):
            return replace(self.state, ended=None)
        return self.state

    def stop(self) -> GangState:
        """Stop the ranks and wait until nothing of the group is left (at most :data:`KILL_GRACE_S`)."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.write(b"stop\n")
            self._process.stdin.close()
        until = time.monotonic() + KILL_GRACE_S / 2
        while time.monotonic() < until and self.poll().ended is None:
            time.sleep(0.02)
        if self.poll().ended is None:
            self._kill_group()
            self._reader.join(timeout=KILL_GRACE_S / 4)
            until += KILL_GRACE_S / 4
            while time.monotonic() < until and group_alive(self.group):
                time.sleep(0.02)
        return self.state


def group_alive(group: int) -> bool:
    """Whether a process of the group still exists (zombies that wait for their parent do not count)."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    import psutil

    for process in psutil.process_iter(["pid", "status"]):
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.info["pid"]) == group:
                return True
    return False


def rank_environment(
    spec: TrialSpec,
    rank: int,
    local_rank: int,
    local_world: int,
    node: int,
    master: tuple[str, int],
    devices: list[str] | None,
) -> dict[str, str]:
    """The environment of one rank: torchrun's variables, the candidate's list, device visibility."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "PYTHONPATH"))}
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": str(local_world),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": master[0],
        "MASTER_PORT": str(master[1]),
        "NGPU": str(spec.world_size),
        "PYTHONUNBUFFERED": "1",
        **cache_environment(os.environ),
    }
    if spec.device == "cpu":
        env |= {
            "OMP_NUM_THREADS": str(spec.threads),
            "MKL_NUM_THREADS": str(spec.threads),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            **KEEP_FREED_MEMORY,
            **SLEEPING_THREADS,
        }
    else:
        for name, value in (ALLOCATOR | transport.ASK).items():
            env.setdefault(name, value)
        if devices is not None:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    source = package_root()
    if source is not None:
        env["PYTHONPATH"] = source
    return env | spec.env


def package_root() -> str | None:
    """Folder to put on a rank's import path when our packages are not installed where the rank looks; else None.

    Ranks start with a safe path, so a checkout that runs by PYTHONPATH alone must name itself.
    """
    return str(Path(__file__).resolve().parent.parent) if "PYTHONPATH" in os.environ else None
