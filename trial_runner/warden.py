"""The warden: one small process that owns the ranks of a gang's node-share and outlives nothing.

It leads its own process group, starts the ranks in it, and kills the whole group when its standard input
closes (the agent is gone), when the deadline passes, when it is told to stop, or when all is done. So no rank,
and nothing a rank started in the group, survives the gang. Speaks JSON lines on standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from typing import Any


LINGER_S = 5.0
"""After the first rank has failed, how long its peers may take to fail by themselves and say why."""

TERM_S = 1.0
"""Between SIGTERM and SIGKILL when the gang is stopped."""


def say(**facts: Any) -> None:
    """Report one event to the agent; a closed pipe is no reason to leave ranks behind."""
    with contextlib.suppress(OSError):
        sys.stdout.write(json.dumps(facts) + "\n")
        sys.stdout.flush()


def start(ranks: list[dict[str, Any]]) -> dict[int, subprocess.Popen[bytes]]:
    """Start each rank (keys ``rank``, ``argv``, ``env``, ``log``, ``cwd``) in this process group."""
    running = {}
    for order in ranks:
        with open(order["log"], "ab") as log:
            running[order["rank"]] = subprocess.Popen(
                order["argv"],
                env=order["env"],
                cwd=order["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        say(event="rank", rank=order["rank"], pid=running[order["rank"]].pid)
    return running


def watch(running: dict[int, subprocess.Popen[bytes]], deadline: float) -> str:
    """Wait until the gang is over; returns why: ``done``, ``failed``, ``timeout``, ``stopped`` or ``orphaned``."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    first_failure = None
    while True:
        for rank, process in list(running.items()):
            code = process.poll()
            if code is not None:
                del running[rank]
                say(event="exit", rank=rank, code=code, unix_s=time.time())
                if code and first_failure is None:
                    first_failure = time.monotonic()
        if not running:
            return "failed" if first_failure is not None else "done"
        if first_failure is not None and time.monotonic() - first_failure > LINGER_S:
            return "failed"
        if time.monotonic() >= deadline:
            return "timeout"
        for _ in selector.select(timeout=0.05):
            data = os.read(sys.stdin.fileno(), 4096)
            return "stopped" if data else "orphaned"


def main() -> int:
    """Read the order (one JSON line), run the ranks, end the group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    order = json.loads(sys.stdin.readline())
    deadline = time.monotonic() + order["deadline_s"]
    running = start(order["ranks"])
    why = watch(running, deadline)
    if running:
        os.killpg(0, signal.SIGTERM)
        until = time.monotonic() + TERM_S
        while time.monotonic() < until and any(process.poll() is None for process in running.values()):
            time.sleep(0.02)
        for rank, process in running.items():
            say(event="exit", rank=rank, code=process.poll(), killed=True, unix_s=time.time())
    say(event="end", why=why)
    os.killpg(0, signal.SIGKILL)
    return 1


if __name__ == "__main__":
    sys.exit(main())
