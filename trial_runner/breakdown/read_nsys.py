"""Reading Nsight Systems' SQLite export."""

from __future__ import annotations

from pathlib import Path

from trial_runner.breakdown.stream import TraceError
from trial_runner.breakdown.trace import Trace


def read_nsys(path: Path) -> Trace:
    """Read one export of ``nsys export --type sqlite``.

    Raises:
        TraceError: the file is no such export.
    """
    raise TraceError(f"trace {path}: SQLite exports are not read yet; give a torch.profiler trace")
