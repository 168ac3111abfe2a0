"""Hardware table: peaks, memory and links of one device kind."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace

from search_space.errors import UserError


GIB = 1024**3
"""Bytes in one GiB."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of device and the links around it. Rates are SI (bytes/s, FLOP/s), memory is bytes."""

    name: str
    """Name in the table, e.g. ``H100-SXM``."""

    peak_flops: dict[str, float] = field(default_factory=dict)
    """Dense peak FLOP/s by precision (``bf16``, ``fp8``, ``fp32``)."""

    memory_bytes: float
    """Device memory that a process can use, bytes."""

    memory_bandwidth: float
    """Device memory bandwidth, bytes/s."""

    domain_size: int = 8
    """Devices in one fast-link (NVLink) domain."""

    domain_bandwidth: float
    """One-direction bandwidth of a device inside its domain, bytes/s."""

    nic_bandwidth: float
    """One-direction network bandwidth per device between nodes, bytes/s."""

    pcie_bandwidth: float = 64e9
    """One-direction host link bandwidth per device, bytes/s."""

    source: str = ""
    """Where the figures come from."""

    def peak(self, precision: str) -> float:
        """Peak FLOP/s at ``precision``.

        Raises:
            UserError: the table has no peak for that precision.
        """
        if precision not in self.peak_flops:
            known = ", ".join(sorted(self.peak_flops)) or "none"
            raise UserError(f"hardware {self.name}: no peak for precision {precision!r}; known are {known}")
        return self.peak_flops[precision]

    def override(self, **values: object) -> Hardware:
        """A copy with some fields replaced."""
        return replace(self, **values)  # type: ignore[arg-type]


TABLE = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            name="H100-SXM",
            peak_flops={"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12},
            memory_bytes=79.1 * GIB,
            memory_bandwidth=3.35e12,
            domain_bandwidth=450e9,
            nic_bandwidth=50e9,
            source="NVIDIA H100 data sheet (dense); 400 Gb/s NIC per GPU as in DGX H100",
        ),
        Hardware(
            name="cpu",
            peak_flops={"bf16": 1e11, "fp32": 1e11},
            memory_bytes=8 * GIB,
            memory_bandwidth=20e9,
            domain_bandwidth=2e9,
            nic_bandwidth=1e9,
            pcie_bandwidth=2e9,
            source="placeholder until a study measures the machine",
        ),
    )
}
"""Known device kinds by name."""


def find_hardware(name: str) -> Hardware:
    """The hardware called ``name`` (case does not matter).

    Raises:
        UserError: the table has no such name.
    """
    for key, hardware in TABLE.items():
        if key.lower() == name.lower():
            return hardware
    raise UserError(f"unknown hardware {name!r}; known are {', '.join(TABLE)}; or give peak_tflops and hbm_gib")
