"""The candidates on which ledger and dry run are compared: models × layouts × schedules × checkpointing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from search_space.candidate import Candidate
from search_space.pool import canonical


@dataclass(frozen=True, kw_only=True)
class Case:
    """One candidate of one model at one size."""

    model: str
    """torchtitan function."""

    layers: int
    """Layers that are kept of the model: layers are alike, so few of them show what there is to see."""

    seq_len: int
    """Tokens in one sequence."""

    micro_batches: int
    """Micro-batches of one data-parallel rank in a step."""

    candidate: Candidate
    """The knobs."""

    @property
    def global_batch_seqs(self) -> int:
        """Sequences in one step."""
        return self.micro_batches * self.candidate.data_parallel * self.candidate.micro_batch

    def name(self) -> str:
        """For tables."""
        return f"{self.model.partition(':')[2]} {self.layers} layers, {self.candidate.label()}"


KINDS: tuple[dict[str, Any], ...] = tuple({"activation_checkpoint": kind} for kind in ("none", "selective", "full"))

INTERLEAVED = {"schedule": "Interleaved1F1B", "virtual_stages": 2}


def _layouts(pipeline: int, tensor: tuple[int, ...], shard: int, experts: bool) -> Iterator[tuple[dict[str, Any], int]]:
    """(knobs, micro-batches) of one model."""
    for kind in KINDS:
        yield {"data_parallel_shard": shard, **kind}, 1
    yield {"data_parallel_shard": shard, "micro_batch": 2, "activation_checkpoint": "selective"}, 2
    yield {"data_parallel_shard": shard, "reshard_after_forward": "never"}, 2
    yield {"data_parallel_shard": shard // 2, "data_parallel_replicate": 2, "activation_checkpoint": "full"}, 1
    for degree in tensor if not experts else ():
        for kind in KINDS:
            yield {"tensor_parallel": degree, "data_parallel_shard": shard, **kind}, 1
    if pipeline > 1:
        stages = {"pipeline_parallel": pipeline, "data_parallel_shard": shard}
        yield stages, 2 * pipeline
        yield stages | {"activation_checkpoint": "full"}, 2 * pipeline
        yield stages | INTERLEAVED, 2 * pipeline
        yield stages | INTERLEAVED | {"activation_checkpoint": "selective"}, 2 * pipeline
        yield stages | {"schedule": "ZBVZeroBubble", "virtual_stages": 2}, 2 * pipeline
        yield stages | {"schedule": "ZBVZeroBubble", "virtual_stages": 2, "activation_checkpoint": "full"}, 2 * pipeline
        if not experts:
            yield stages | {"tensor_parallel": tensor[-1]} | INTERLEAVED, 2 * pipeline


def _expert_layouts(pipeline: int, shard: int) -> Iterator[tuple[dict[str, Any], int]]:
    """(knobs, micro-batches) of a mixture of experts: spread over data-parallel ranks, over tensor-parallel ones too,
    or sliced by those without being spread."""
    half = {"tensor_parallel": 2, "data_parallel_shard": shard // 2}
    for kind in KINDS:
        for degree in (2, 4, 8):
            if degree <= shard:
                yield {"expert_parallel": degree, "data_parallel_shard": shard, **kind}, 1
        yield half | {"expert_parallel": shard // 2, **kind}, 1
        yield half | kind, 1
    most = {"expert_parallel": shard, "data_parallel_shard": shard}
    yield half | {"expert_parallel": shard}, 1
    yield most | {"micro_batch": 2, "activation_checkpoint": "selective"}, 2
    yield most | {"reshard_after_forward": "never"}, 2
    copies = {"data_parallel_shard": shard // 2, "data_parallel_replicate": 2}
    yield copies | {"expert_parallel": 2, "activation_checkpoint": "full"}, 1
    yield copies | {"expert_parallel": shard // 2}, 1
    stages = {"pipeline_parallel": pipeline, "expert_parallel": 4, "data_parallel_shard": shard}
    yield stages, 2 * pipeline
    yield stages | {"activation_checkpoint": "full"}, 2 * pipeline
    yield stages | INTERLEAVED | {"activation_checkpoint": "selective"}, 2 * pipeline
    yield stages | {"schedule": "ZBVZeroBubble", "virtual_stages": 2}, 2 * pipeline
    yield stages | half | {"activation_checkpoint": "full"}, 2 * pipeline


MODELS: tuple[tuple[str, int, int, int, tuple[int, ...], int], ...] = (
    # model, layers kept, sequence, pipeline ranks, tensor-parallel degrees, shard ranks
    ("llama3:llama3_debugmodel", 6, 2048, 2, (2,), 4),
    ("llama3:llama3_8b", 8, 8192, 2, (2, 8), 8),
    ("llama3:llama3_70b", 8, 8192, 4, (8,), 32),
    ("qwen3:qwen3_14b", 4, 4096, 2, (4,), 8),
    ("qwen3:qwen3_30b_a3b", 4, 4096, 2, (), 8),
)

EXPERTS: tuple[tuple[str, int, int, int, int], ...] = (
    # model, layers kept, sequence, pipeline ranks, shard ranks
    ("qwen3:qwen3_moe_debug", 8, 2048, 2, 4),
    ("qwen3:qwen3_30b_a3b", 4, 4096, 2, 8),
)


def cases() -> list[Case]:
    """Every case, smaller models first."""
    listed = [
        (model, layers, seq_len, _layouts(pipeline, tensor, shard, not tensor))
        for model, layers, seq_len, pipeline, tensor, shard in MODELS
    ]
    listed += [
        (model, layers, seq_len, _expert_layouts(pipeline, shard))
        for model, layers, seq_len, pipeline, shard in EXPERTS
    ]
    return [
        Case(
            model=model,
            layers=layers,
            seq_len=seq_len,
            micro_batches=micro_batches,
            candidate=canonical(Candidate(**knobs)),
        )
        for model, layers, seq_len, layouts in listed
        for knobs, micro_batches in layouts
    ]
