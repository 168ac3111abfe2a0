"""Ending a program that was started in a group of its own, with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess


def stop_group(process: subprocess.Popen[bytes], patience_s: float) -> None:
    """End a command and what it started: politely, then not.

    Args:
        process: started with ``start_new_session``.
        patience_s: how long each of the two may take.
    """
    # The second signal goes out in any case: what the command started may outlive it.
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience_s)
