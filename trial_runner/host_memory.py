"""The kernel's counters of processes killed for memory: on this machine and in this container."""

from __future__ import annotations

from pathlib import Path


def oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Processes that the kernel has killed for memory so far; 0 where no counter can be read.

    Args:
        proc: mount of the process file system.
        cgroups: mount of the control groups (version 2; the own group's counter counts a container's limit).
    """
    counts = [_counter(proc / "vmstat", "oom_kill")]
    try:
        own = (proc / "self" / "cgroup").read_text().strip().rpartition("::")[2]
    except OSError:
        own = ""
    folder = cgroups / own.lstrip("/")
    for events in {folder / "memory.events", cgroups / "memory.events"}:
        counts.append(_counter(events, "oom_kill"))
    return max(counts)


def _counter(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
