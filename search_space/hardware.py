"""Hardware table: peaks, memory and links of one device kind."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from importlib import resources
import json
import re
from typing import Any

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
    """Devices in one fast-link (NVLink, XGMI, ICI) domain."""

    domain_bandwidth: float
    """One-direction bandwidth of a device inside its domain, bytes/s."""

    nic_bandwidth: float
    """One-direction network bandwidth per device between domains, bytes/s."""

    pcie_bandwidth: float = 64e9
    """One-direction host link bandwidth per device, bytes/s."""

    pod_bandwidth: float = 0.0
    """Bandwidth per device between pods (data-centre network), bytes/s; 0: no such level."""

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


def _read(entry: dict[str, Any]) -> Hardware:
    values = dict(entry)
    return Hardware(
        name=values["name"],
        peak_flops={key: tflops * 1e12 for key, tflops in values["peak_tflops"].items()},
        memory_bytes=values["usable_gib"] * GIB,
        memory_bandwidth=values["memory_gb_s"] * 1e9,
        domain_size=values["domain_size"],
        domain_bandwidth=values["domain_gb_s"] * 1e9,
        nic_bandwidth=values["nic_gb_s"] * 1e9,
        pcie_bandwidth=values["pcie_gb_s"] * 1e9,
        pod_bandwidth=values.get("pod_gb_s", 0.0) * 1e9,
        source=values["source"],
    )


def _load() -> dict[str, Hardware]:
    text = resources.files("search_space").joinpath("presets/hardware.json").read_text(encoding="utf-8")
    return {entry["name"]: _read(entry) for entry in json.loads(text)}


TABLE = _load()
"""Known device kinds by name."""


_DRIVER_NAMES = (
    (r"A100\b.*\b40GB", "A100-40GB"),
    (r"A100\b.*\b80GB", "A100-80GB"),
    (r"A800\b", "A800"),
    (r"H100 PCIe", "H100-PCIe"),
    (r"H100 NVL", "H100-NVL"),
    (r"H100\b.*\b96GB", "H100-96GB"),
    (r"H100\b.*\b80GB HBM3|H100 SXM", "H100-SXM"),
    (r"H200\b(?! NVL)", "H200"),
    (r"GB200\b", "GB200"),
    (r"GB300\b", "GB300"),
    (r"B200\b", "B200"),
    (r"B300\b", "B300"),
    (r"MI300X\b", "MI300X"),
    (r"MI325X\b", "MI325X"),
    (r"MI355X\b", "MI355X"),
)
"""What drivers call a device, from the start of a word, and its name in the table."""


def detect_hardware(driver_name: str) -> str | None:
    """The table's name of a device as its driver calls it; None for a slice of one or a kind that the table lacks.

    Anchored at word starts: ``GH200`` is no ``H200`` and ``GB300`` no ``B300``. A neighbour's peak is worse than none.
    """
    if re.search(r"\bMIG\b", driver_name):
        return None
    for pattern, name in _DRIVER_NAMES:
        if re.search(rf"(?<![A-Za-z0-9]){pattern}", driver_name):
            return name
    return None


def find_hardware(name: str) -> Hardware:
    """The hardware called ``name`` (case does not matter; ``H100`` means ``H100-SXM``, ``A100`` the 80 GB one).

    Raises:
        UserError: the table has no such name.
    """
    wanted = {"h100": "h100-sxm", "a100": "a100-80gb", "h100-80gb": "h100-sxm"}.get(name.lower(), name.lower())
    for key, hardware in TABLE.items():
        if key.lower() == wanted:
            return hardware
    raise UserError(f"unknown hardware {name!r}; known are {', '.join(TABLE)}; or give peak_tflops and hbm_gib")
