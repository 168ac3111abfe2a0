"""A candidate: one full assignment of knobs."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import fields
import hashlib
from typing import Any


SCHEDULES = (
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "GPipe",
)
"""Pipeline schedules by torchtitan's names; the index is their code in pool arrays."""

V_SCHEDULES = ("ZBVZeroBubble", "DualPipeV")
"""Schedules that hold exactly two stages on each pipeline rank, folded into a V."""

LOOPED_SCHEDULES = ("Interleaved1F1B", "InterleavedZeroBubble")
"""Schedules that loop over at least two stages on each pipeline rank."""

SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that split backward into gradients of inputs (on the critical path) and of weights (fillers)."""

RESHARD = ("default", "always", "never")
"""Values of ``reshard_after_forward``; the index is their code in pool arrays."""

ACTIVATION_CHECKPOINT = ("none", "selective", "full", "memory_budget", "first_n")
"""Kinds of activation checkpointing; the index is their code in pool arrays."""


_LATER = {"symm_mem": False}
"""Knobs that came later, and the value that says nothing: names of candidates on record stay what they were."""


@dataclass(frozen=True, kw_only=True, order=True)
class Candidate:
    """One full assignment of knobs.

    Two candidates that run the same program compare equal once both went through
    :func:`search_space.pool.canonical`.
    """

    tensor_parallel: int = 1
    """Ranks that share each matrix product (sequence parallelism on)."""

    pipeline_parallel: int = 1
    """Pipeline ranks; 1 means no pipeline."""

    schedule: str = "1F1B"
    """Pipeline schedule, one of :data:`SCHEDULES`; ``1F1B`` when there is no pipeline."""

    virtual_stages: int = 1
    """Stages (model chunks) held by each pipeline rank."""

    context_parallel: int = 1
    """Ranks that share one sequence."""

    expert_parallel: int = 1
    """Ranks that share the experts of a mixture-of-experts layer (overlays the data-parallel ranks)."""

    data_parallel_replicate: int = 1
    """Copies of the (sharded) model whose gradients are all-reduced."""

    data_parallel_shard: int = 1
    """Ranks over which parameters, gradients and optimizer are sharded."""

    reshard_after_forward: str = "default"
    """Whether gathered parameters are freed after forward: ``default``, ``always`` or ``never``."""

    micro_batch: int = 1
    """Sequences in one forward pass of one data-parallel rank."""

    activation_checkpoint: str = "none"
    """``none``, ``selective``, ``full``, ``memory_budget`` or ``first_n``."""

    memory_budget: float = 1.0
    """Share of activation memory kept under ``memory_budget`` checkpointing, 0 to 1."""

    first_n: int = 0
    """Blocks of each stage that are checkpointed under ``first_n``."""

    compile: bool = False
    """Whether transformer blocks and loss go through torch.compile."""

    async_tp: bool = False
    """Whether tensor-parallel collectives are pipelined with their matrix products (needs compile)."""

    float8: bool = False
    """Whether linear layers compute in float8: a numeric change, needs loss parity."""

    fsdp_bucket: int = 1
    """Transformer blocks per FSDP all-gather / reduce-scatter group."""

    accumulate_without_sync: bool = False
    """Whether gradients are reduced only on the last micro-batch of a step."""

    forward_prefetch: int = 0
    """FSDP groups gathered ahead explicitly in forward; 0 leaves it to the framework."""

    symm_mem: bool = False
    """Whether FSDP's collectives work on symmetric memory (NCCL on Hopper or newer)."""

    loss_chunks: int = 8
    """Pieces in which the loss is computed; 1 materialises all logits at once."""

    zero_stage: int = 3
    """ZeRO stage of frameworks other than torchtitan (0: DDP, 1: distributed optimizer, 2, 3)."""

    env: str = "default"
    """Name of a list of environment variables from the job file."""

    @property
    def data_parallel(self) -> int:
        """All data-parallel ranks: replicate × shard."""
        return self.data_parallel_replicate * self.data_parallel_shard

    @property
    def num_devices(self) -> int:
        """Devices that the candidate occupies."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.pipeline_parallel * self.virtual_stages

    def to_json(self) -> dict[str, Any]:
        """Every knob under its full name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Candidate:
        """The inverse of :meth:`to_json`; keys that are absent keep their defaults, unknown ones are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})

    def changed(self, other: Candidate | None = None) -> dict[str, Any]:
        """Knobs that differ from ``other`` (from the defaults when none is given)."""
        reference = asdict(other or Candidate())
        return {key: value for key, value in asdict(self).items() if value != reference[key]}

    def label(self) -> str:
        """A short name for tables and dashboards, e.g. ``tp2 pp1 dp1 b4 ac=full compile``."""
        words = []
        if self.tensor_parallel > 1:
            words.append(f"tp{self.tensor_parallel}")
        if self.pipeline_parallel > 1:
            stages = f"v{self.virtual_stages}" if self.virtual_stages > 1 else ""
            words.append(f"pp{self.pipeline_parallel}{stages}({self.schedule})")
        if self.context_parallel > 1:
            words.append(f"cp{self.context_parallel}")
        if self.expert_parallel > 1:
            words.append(f"ep{self.expert_parallel}")
        if self.data_parallel_shard > 1:
            words.append(f"fsdp{self.data_parallel_shard}")
        if self.data_parallel_replicate > 1:
            words.append(f"ddp{self.data_parallel_replicate}")
        words.append(f"b{self.micro_batch}")
        ac = self.activation_checkpoint
        if ac == "memory_budget":
            words.append(f"ac=budget({self.memory_budget:g})")
        elif ac == "first_n":
            words.append(f"ac=first{self.first_n}")
        else:
            words.append(f"ac={ac}")
        if self.reshard_after_forward != "default":
            words.append(f"reshard={self.reshard_after_forward}")
        words += [name for name in ("compile", "async_tp", "float8") if getattr(self, name)]
        if self.fsdp_bucket > 1:
            words.append(f"bucket{self.fsdp_bucket}")
        if self.accumulate_without_sync:
            words.append("nosync")
        if self.forward_prefetch:
            words.append(f"prefetch{self.forward_prefetch}")
        if self.symm_mem:
            words.append("symm_mem")
        if self.loss_chunks != 8:
            words.append(f"loss/{self.loss_chunks}")
        if self.zero_stage != 3:
            words.append(f"zero{self.zero_stage}")
        if self.env != "default":
            words.append(f"env={self.env}")
        return " ".join(words)

    def key(self) -> str:
        """A stable 12-digit hexadecimal name of the assignment."""
        named = {name: value for name, value in asdict(self).items() if value != _LATER.get(name)}
        text = "|".join(f"{name}={value}" for name, value in sorted(named.items()))
        return hashlib.sha256(text.encode()).hexdigest()[:12]
