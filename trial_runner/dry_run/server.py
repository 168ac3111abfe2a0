"""A warm process: imports torchtitan once and forks a child for every rank that is asked for.

Orders come in on standard input, one JSON document a line; each answer goes out the same way when its child is done.
"""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
import select
import signal
import sys
import time
from typing import Any


SLICE_S = 0.02
"""How often the process looks for finished children, seconds."""


def warm(real: bool) -> None:
    """Import what every child needs."""
    from trial_runner.dry_run import patches

    patches.prepare(real)
    import torchtitan.models.common.attention
    import torchtitan.trainer  # noqa: F401

    from trial_runner.dry_run import child
    from trial_runner.rank import tokens  # noqa: F401

    assert child.answer is not None
    gc.collect()
    gc.freeze()


def start(order: dict[str, Any]) -> int:
    """Fork a child that answers the order into its own file; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        log = os.open(order["result"] + ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from trial_runner.dry_run.child import write_answer

        write_answer(order, order["result"])
        code = 0
    finally:
        os._exit(code)


def collect(order: dict[str, Any], status: int, late: bool) -> dict[str, Any]:
    """What a finished child has to say."""
    path = Path(order["result"])
    if path.exists() and path.stat().st_size:
        facts: dict[str, Any] = json.loads(path.read_text())
        return facts
    if late:
        return {
            "valid": False,
            "error": f"the dry run of rank {order['rank']} took more than {order['timeout_s']:.0f} s",
        }
    log = Path(order["result"] + ".log")
    tail = log.read_text(errors="replace").strip()[-2000:] if log.exists() else ""
    return {"valid": False, "error": tail or f"the child left with status {status}"}


def serve(real: bool) -> None:
    """Answer orders until standard input closes and all children are done."""
    warm(real)
    running: dict[int, tuple[dict[str, Any], float]] = {}
    late: set[int] = set()
    buffer, open_input = b"", True
    while open_input or running:
        ready = select.select([0], [], [], SLICE_S)[0] if open_input else []
        if ready:
            chunk = os.read(0, 1 << 16)
            open_input = bool(chunk)
            *lines, buffer = (buffer + chunk).split(b"\n")
            for line in lines:
                order = json.loads(line)
                running[start(order)] = (order, time.monotonic() + order["timeout_s"])
        elif not open_input:
            time.sleep(SLICE_S)
        for pid, (order, deadline) in list(running.items()):
            if time.monotonic() > deadline and pid not in late:
                late.add(pid)
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[pid]
                text = json.dumps({"id": order["id"], "facts": collect(order, status, pid in late)})
                os.write(3, (text + "\n").encode())
        if not open_input and os.getppid() == 1:
            break


def main() -> None:
    """Keep standard output for answers: libraries print there too."""
    os.dup2(1, 3)
    os.dup2(2, 1)
    serve(sys.argv[1] == "real")


if __name__ == "__main__":
    main()
    os._exit(0)
