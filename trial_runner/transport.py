"""Which transport the collectives of a trial used, read from the communication library's own start-up lines."""

from __future__ import annotations

from pathlib import Path
import re

from trial_runner.spec import rank_log


ASK = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
"""Environment that makes NCCL and RCCL say which network they use; set in GPU ranks unless the job says otherwise."""

HEAD_BYTES = 400_000
"""How much of a rank's log is read: the lines are among its first."""

_NETWORK = re.compile(r"(?:Using network|NET/\w+ ?: Using|using network)\s*:?\s*\[?\d*\]?\s*([A-Za-z]+)")
_USING = re.compile(r"NET/(\w+) ?: Using")
_NO_DEVICE = re.compile(r"NET/IB ?: No device found")


def transport_of(log: str) -> str | None:
    """The network that a rank's log names: ``ib``, ``socket``, a plugin's name; None when it says nothing.

    ``socket`` where InfiniBand was looked for and not found is ``socket_without_ib``: the container lacks the device.
    """
    named = _USING.findall(log) or _NETWORK.findall(log)
    if not named:
        return "socket_without_ib" if _NO_DEVICE.search(log) else None
    name = str(named[-1]).lower()
    return "socket_without_ib" if name == "socket" and _NO_DEVICE.search(log) else name


def trial_transport(folder: Path, world_size: int) -> str | None:
    """The slowest transport that any rank of a trial names: one rank on sockets slows all; None without such lines."""
    found = set()
    for rank in range(world_size):
        try:
            with rank_log(folder, rank).open("rb") as log:
                name = transport_of(log.read(HEAD_BYTES).decode(errors="replace"))
        except OSError:
            continue
        if name:
            found.add(name)
    return min(found, key=lambda name: (not name.startswith("socket"), name)) if found else None


def degraded(transport: str | None, usual: str | None) -> bool:
    """Whether a trial ran over another transport than its study's others, so that its time compares with nothing."""
    return transport is not None and usual is not None and transport != usual
