"""What this machine has: devices, and the peak that a matrix product reaches on a CPU slot."""

from __future__ import annotations

from collections.abc import Sequence
import os
import subprocess
import sys
import tempfile
import time


_PEAK_PROGRAM = """
import sys, time, torch
torch.set_num_threads(int(sys.argv[1]))
dtype = getattr(torch, sys.argv[2])
n = 1024
a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
best = 0.0
until = time.perf_counter() + float(sys.argv[3])
while time.perf_counter() < until:
    start = time.perf_counter()
    a @ b
    best = max(best, 2 * n**3 / (time.perf_counter() - start))
print(best)
"""


SLEEPING_THREADS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads of a CPU rank sleep at a barrier instead of spinning: a machine that runs anything beside them slows a
spinning rank several times over, a sleeping one by its share."""


OBJECT_STORE_GIB, SHM_PER_RANK_GIB = 1, 2
"""Shared memory that a node's trials may need: Ray's object store, which they hardly use, and for each rank NCCL's
buffers for its peers on the node and the data loader's batches."""


def shared_memory_gib(ranks: int) -> int:
    """What /dev/shm should hold for so many ranks on a node, GiB."""
    return OBJECT_STORE_GIB + SHM_PER_RANK_GIB * ranks


def num_gpus() -> int:
    """GPUs that a process on this machine may use, without importing torch into this one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() not in ("", "-1")])
    return len(gpu_names())


def gpu_names() -> list[str]:
    """Names of the GPUs that the driver lists; empty without a driver."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in listing.stdout.splitlines() if line.strip()] if listing.returncode == 0 else []


DIRTY_BYTES = 2 * 2**30
"""Memory in use on an idle device from which it counts as dirty: more than a driver's own context."""


def used_memory(devices: Sequence[str]) -> dict[str, float]:
    """Bytes in use on each of some GPUs, whoever holds them; empty without a driver.

    Args:
        devices: indices or UUIDs, as in CUDA_VISIBLE_DEVICES.
    """
    try:
        listing = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", ",".join(devices)],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = [line.strip() for line in listing.stdout.splitlines() if line.strip()]
    if listing.returncode or len(values) != len(devices):
        return {}
    return {device: float(value) * 2**20 for device, value in zip(devices, values) if value.isdigit()}


def dirty_devices(devices: Sequence[str], patience_s: float = 10.0) -> dict[str, float]:
    """Devices whose memory is still taken after ``patience_s`` seconds, with the bytes in use; empty when all are free.

    A gang that has just left may need a moment until the driver has its memory back.
    """
    until = time.monotonic() + patience_s
    while True:
        dirty = {device: used for device, used in used_memory(devices).items() if used > DIRTY_BYTES}
        if not dirty or time.monotonic() >= until:
            return dirty
        time.sleep(0.5)


def num_cpu_slots() -> int:
    """CPU cores that this process may run on: one slot each."""
    return len(os.sched_getaffinity(0))


def cpu_peak_flops(precision: str = "fp32", threads: int = 1, seconds: float = 2.0) -> float:
    """FLOP/s that the best of many 1,024-wide matrix products reaches on one CPU slot.

    Measured in a child process, once per study: it is the declared peak that MFU on a CPU divides by.

    Args:
        precision: ``fp32`` or ``bf16``.
        threads: cores of one slot.
        seconds: how long to measure.
    """
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    child = subprocess.run(
        [sys.executable, "-P", "-c", _PEAK_PROGRAM, str(threads), dtype, str(seconds)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tempfile.gettempdir(),
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads), **SLEEPING_THREADS},
    )
    return float(child.stdout.split()[-1])
