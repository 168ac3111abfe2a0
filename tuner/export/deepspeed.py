"""DeepSpeed JSON for a candidate.

Sources: DeepSpeed 0.19.8 ``runtime/zero/config.py`` (a closed model: unknown keys are refused),
``runtime/constants.py``, ``runtime/tensor_parallel/config.py`` and ``runtime/config.py`` (pipeline). DeepSpeed reads
the file as Hjson, so comments may stand in it.
"""

from __future__ import annotations

import json
from typing import Any

from search_space.candidate import Candidate
from tuner.export.megatron import block_parameters_of
from tuner.export.megatron import zero_of
from tuner.export.subject import commented
from tuner.export.subject import Export
from tuner.export.subject import Gap
from tuner.export.subject import Subject


ELEMENTS = 500_000_000
"""DeepSpeed's own bucket size, elements."""


def export(subject: Subject) -> Export:
    """The file, comments first.

    Raises:
        UserError: the global batch does not divide.
    """
    gaps = tuple(gaps_of(subject))
    notes = ["DeepSpeed; read as Hjson, so these comments may stay (tune export --no-comments leaves them out)"]
    if subject.candidate.pipeline_parallel > 1:
        notes.append(
            f"pipeline: PipelineModule(num_stages={subject.candidate.pipeline_parallel}) in the training script"
        )
    if subject.candidate.activation_checkpoint == "full":
        notes.append("checkpointing: the model's own blocks must call deepspeed.checkpointing.checkpoint")
    text = json.dumps(document(subject), indent=2)
    lines = commented(subject, gaps, notes, "//")
    return Export(text="\n".join([*lines, text]) + "\n", file=f"{subject.function}_deepspeed.json", gaps=gaps)


def document(subject: Subject) -> dict[str, Any]:
    """The values."""
    candidate, stage = subject.candidate, zero_of(subject)
    found: dict[str, Any] = {
        "train_batch_size": subject.setting.global_batch_seqs,
        "train_micro_batch_size_per_gpu": candidate.micro_batch,
        "gradient_accumulation_steps": subject.micro_batches,
        "bf16": {"enabled": subject.setting.precision == "bf16"},
        "zero_optimization": zero(candidate, subject, stage),
    }
    if candidate.tensor_parallel > 1:
        found["tensor_parallel"] = {"autotp_size": candidate.tensor_parallel}
    if candidate.pipeline_parallel > 1:
        found["pipeline"] = {
            "stages": candidate.pipeline_parallel,
            "activation_checkpoint_interval": int(candidate.activation_checkpoint == "full"),
        }
    if candidate.activation_checkpoint == "full":
        found["activation_checkpointing"] = {"partition_activations": False, "cpu_checkpointing": False}
    if candidate.compile:
        found["compile"] = {"deepcompile": True}
    return found


def zero(candidate: Candidate, subject: Subject, stage: int) -> dict[str, Any]:
    """``zero_optimization``."""
    size = ELEMENTS
    if candidate.fsdp_bucket > 1:
        size = max(
            1, round(candidate.fsdp_bucket * block_parameters_of(subject.setting.shape) / candidate.tensor_parallel)
        )
    values: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": candidate.data_parallel > 1,
        "contiguous_gradients": True,
        "reduce_scatter": stage >= 1,
        "reduce_bucket_size": size,
    }
    if stage == 3:
        values["stage3_prefetch_bucket_size"] = size
    else:
        values["allgather_bucket_size"] = size
    return values


def gaps_of(subject: Subject) -> list[Gap]:
    """Knobs that the file cannot say."""
    candidate = subject.candidate
    gaps = []

    def gap(knob: str, why: str) -> None:
        gaps.append(Gap(knob=knob, value=getattr(candidate, knob), why=why))

    if candidate.pipeline_parallel > 1:
        if zero_of(subject) > 1:
            gap("data_parallel_shard", "the pipeline engine takes ZeRO stage 1 at most; choose another candidate")
        if candidate.schedule != "1F1B":
            gap("schedule", "the pipeline engine runs 1F1B")
        if candidate.virtual_stages > 1:
            gap("virtual_stages", "one stage a rank")
    if candidate.data_parallel_shard > 1 and candidate.data_parallel_replicate > 1:
        for knob in ("data_parallel_replicate", "data_parallel_shard"):
            gap(knob, "state is sharded over all data-parallel ranks (zero_hpz_partition_size adds a copy in the node)")
    for knob in ("context_parallel", "expert_parallel"):
        if getattr(candidate, knob) > 1:
            gap(knob, "set in the model's code (Ulysses, MoE layers), not in this file")
    if candidate.activation_checkpoint not in ("none", "full"):
        why = "blocks are checkpointed whole or not; which ones, the model's code says"
        gap("activation_checkpoint", why)
        if candidate.activation_checkpoint == "first_n":
            gap("first_n", why)
        if candidate.activation_checkpoint == "memory_budget":
            gap("memory_budget", why)
    if candidate.data_parallel_shard > 1 and candidate.reshard_after_forward == "default":
        gap("reshard_after_forward", "ZeRO-3 frees parameters after forward, stage 2 keeps them")
    if candidate.async_tp:
        gap("async_tp", "no such overlap")
    if candidate.float8:
        gap("float8", "by Transformer Engine layers in the model's code")
    if candidate.forward_prefetch:
        gap("forward_prefetch", "stage3_prefetch_bucket_size is in elements; the default depth is kept")
    if candidate.symm_mem:
        gap("symm_mem", "no such buffers")
    if candidate.accumulate_without_sync and zero_of(subject) > 1:
        gap("accumulate_without_sync", "stages 2 and 3 reduce in every micro-batch")
    elif candidate.accumulate_without_sync:
        gap("accumulate_without_sync", "always on with stages 0 and 1")
    if candidate.loss_chunks > 1:
        gap("loss_chunks", "the model's code computes the loss")
    if candidate.env != "default":
        gap("env", "no environment in this file: " + " ".join(f"{k}={v}" for k, v in subject.env.items()))
    return gaps
