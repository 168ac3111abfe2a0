"""The setting of a study: the facts that hold for every candidate."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field

from search_space.flop import flop_per_step
from search_space.hardware import Hardware
from search_space.model import ModelShape


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is fixed for all candidates of one study: model, hardware, scale and recipe."""

    shape: ModelShape
    """The model."""

    hardware: Hardware
    """Device kind and links."""

    devices_per_node: int
    """Devices on one node."""

    nodes: int
    """Nodes in the cluster."""

    seq_len: int
    """Tokens in one sequence."""

    global_batch_seqs: int
    """Sequences in one optimizer step."""

    precision: str = "bf16"
    """Compute precision of matrix products."""

    framework: str = "torchtitan"
    """Whose accounts and rules hold: ``torchtitan``, ``megatron`` or ``deepspeed``."""

    versions: dict[str, str] = field(default_factory=dict)
    """Installed versions that rules are tagged with, by package name."""

    memory_margin: float = 0.0
    """Share of device memory that a candidate must leave free."""

    @property
    def num_devices(self) -> int:
        """Devices of the whole cluster."""
        return self.devices_per_node * self.nodes

    @property
    def fast_domain(self) -> int:
        """Devices that share the fast links: a node, or a rack where the hardware's domain is larger than a node."""
        if self.hardware.domain_size > 8:
            return min(self.hardware.domain_size, self.num_devices)
        return min(self.devices_per_node, self.hardware.domain_size)

    @property
    def on_cpu(self) -> bool:
        """Whether the devices are CPU slots."""
        return self.hardware.name == "cpu"

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step."""
        return self.seq_len * self.global_batch_seqs

    @property
    def flop_per_step(self) -> float:
        """Model FLOP of one optimizer step, recompute not counted."""
        return flop_per_step(self.shape, self.seq_len, self.tokens_per_step)

    @property
    def ideal_s(self) -> float:
        """Ideal step time: model FLOP / (devices × nominal peak), seconds."""
        return self.flop_per_step / (self.num_devices * self.hardware.peak(self.precision))
