"""Out of memory on a device, told apart: too big, fragmented, outside the allocator, taken by somebody else."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
import re


UNITS = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}

FOREIGN_SHARE = 0.1
"""Share of a device's capacity that foreign processes must hold to be blamed."""


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """The numbers of an out-of-memory error, bytes; None where its text does not say."""

    requested_bytes: float | None = None
    """What could not be had."""

    capacity_bytes: float | None = None
    """The device's memory."""

    free_bytes: float | None = None
    """What was free of it."""

    own_bytes: float | None = None
    """What this process held, context included."""

    foreign_bytes: float | None = None
    """What other processes held."""

    allocated_bytes: float | None = None
    """What tensors held."""

    unused_bytes: float | None = None
    """What the allocator had reserved without using it."""

    @property
    def reserved_bytes(self) -> float | None:
        """What the allocator held in all."""
        if self.allocated_bytes is None or self.unused_bytes is None:
            return None
        return self.allocated_bytes + self.unused_bytes

    @property
    def kind(self) -> str:
        """Failure class.

        Fragmented: what was reserved and unused would have held the request. Dirty: foreign processes hold a notable
        share of the device. Inconsistent: twice the request was free. Else too big.
        """
        if self.foreign_bytes and self.capacity_bytes and self.foreign_bytes > FOREIGN_SHARE * self.capacity_bytes:
            return "dirty_device"
        if self.unused_bytes is not None and self.requested_bytes and self.unused_bytes >= self.requested_bytes:
            return "out_of_memory_fragmentation"
        if self.free_bytes is not None and self.requested_bytes and self.free_bytes > 2 * self.requested_bytes:
            return "out_of_memory_inconsistent"
        return "out_of_memory"

    def to_json(self) -> dict[str, float | None]:
        """Every number, and the reserved memory."""
        return asdict(self) | {"reserved_bytes": self.reserved_bytes}


FULL_SHARE = 0.95
"""Share of a device's memory in use from which a library's failure to start means that it is full."""

_LIBRARY = re.compile(
    r"CUDNN_STATUS_(?:NOT_INITIALIZED|ALLOC_FAILED|INTERNAL_ERROR)|CURAND_STATUS|[Ff]ailed to create curand|"
    r"CUBLAS_STATUS_(?:ALLOC_FAILED|NOT_INITIALIZED)|cusolver.*ALLOC_FAILED"
)


def library_found_it_full(text: str, used_share: float | None) -> bool:
    """Whether cuDNN, cuRAND or cuBLAS failed because the device was full.

    Args:
        text: the error.
        used_share: share of the device's memory in use when it was raised; None: unknown.
    """
    return used_share is not None and used_share > FULL_SHARE and bool(_LIBRARY.search(text))


_SIZE = r"([\d.]+) ?([KMGT]?i?B)"


def _bytes(number: str, unit: str) -> float:
    return float(number) * UNITS[unit if unit in UNITS else unit[0] + "iB"]


def read_out_of_memory(text: str) -> OutOfMemory:
    """The numbers in the text of PyTorch's error (torch 2.x words); absent ones stay None.

    Foreign memory: what named other processes hold, or, where none is named, capacity less free and own memory.
    """

    def find(pattern: str) -> float | None:
        found = re.search(pattern.replace("SIZE", _SIZE), text)
        return _bytes(found[1], found[2]) if found else None

    capacity, free = find("total capacity of SIZE"), find("of which SIZE is free")
    own = find("(?:this process has|Including non-PyTorch memory, this process has) SIZE memory in use")
    named = [_bytes(n, u) for n, u in re.findall(rf"Process \d+ has {_SIZE} memory in use", text)]
    foreign: float | None = sum(named) if named else None
    if own is None and named:
        # Without a line of its own, this process is among the named ones: the largest.
        own, foreign = max(named), sum(named) - max(named)
    elif foreign is None and None not in (capacity, free, own):
        assert capacity is not None and free is not None and own is not None
        foreign = max(0.0, capacity - free - own)
    return OutOfMemory(
        requested_bytes=find("Tried to allocate SIZE"),
        capacity_bytes=capacity,
        free_bytes=free,
        own_bytes=own,
        foreign_bytes=foreign,
        allocated_bytes=find("SIZE is allocated by PyTorch"),
        unused_bytes=find("SIZE is reserved by PyTorch but unallocated"),
    )
