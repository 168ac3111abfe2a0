"""Megatron Core 0.18 flags for a candidate.

Sources: megatron-core 0.16.1 ``TransformerConfig``, ``ModelParallelConfig``, ``DistributedDataParallelConfig`` (the
newest for Python 3.11), and Megatron-LM 0.18's training arguments for what no core class holds.
"""

from __future__ import annotations

import shlex

from search_space.candidate import Candidate
from search_space.candidate import SPLIT_BACKWARD
from search_space.model import ModelShape
from search_space.setting import Setting
from tuner.export.subject import commented
from tuner.export.subject import Export
from tuner.export.subject import Gap
from tuner.export.subject import Subject


Flag = tuple[str, str | None]
"""A flag without its dashes and its value; None for a switch."""

VOCABULARY_MULTIPLE = 128
"""Rows that the padded vocabulary is made a multiple of, times tensor-parallel ranks: tiles of a matrix product."""

STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
"""``--data-parallel-sharding-strategy`` by ZeRO stage."""


def export(subject: Subject) -> Export:
    """A launch script with the flags.

    Raises:
        UserError: the global batch does not divide.
    """
    _ = subject.micro_batches
    gaps = tuple(gaps_of(subject))
    setting = subject.setting
    notes = [
        "Megatron Core 0.18 flags; data-parallel ranks are what the other degrees leave",
        *_notes(subject.candidate, setting),
    ]
    lines = ["#!/usr/bin/env bash", *commented(subject, gaps, notes, "#"), "set -euo pipefail"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment(subject).items()]
    lines += ["MEGATRON_ARGS=("]
    for name, value in flags(subject):
        lines.append(f"    --{name}" + (f" {shlex.quote(value)}" if value is not None else ""))
    lines += [
        ")",
        f"torchrun --nproc-per-node {setting.devices_per_node} --nnodes {setting.nodes} \\",
        '    --node-rank "${NODE_RANK:-0}" --master-addr "${MASTER_ADDR:-localhost}" \\',
        '    --master-port "${MASTER_PORT:-29500}" \\',
        '    pretrain_gpt.py "${MEGATRON_ARGS[@]}" "$@"',
    ]
    return Export(text="\n".join(lines) + "\n", file=f"{subject.function}_megatron.sh", gaps=gaps)


def environment(subject: Subject) -> dict[str, str]:
    """Environment variables: Megatron's sequence parallelism wants one connection, then the candidate's own list."""
    found = {}
    if subject.candidate.tensor_parallel > 1 and zero_of(subject) < 2:
        found["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return found | subject.env


def flags(subject: Subject) -> list[Flag]:
    """All flags, model and recipe first."""
    candidate = subject.candidate
    return [*_model(subject.setting), *_recipe(subject), *_parallel(candidate), *_memory(candidate), *_overlap(subject)]


def _model(setting: Setting) -> list[Flag]:
    shape = setting.shape
    found: list[Flag] = [
        ("num-layers", str(shape.layers)),
        ("hidden-size", str(shape.hidden)),
        ("ffn-hidden-size", str(shape.ffn)),
        ("num-attention-heads", str(shape.heads)),
        ("kv-channels", str(shape.head_dim)),
        ("seq-length", str(setting.seq_len)),
        ("max-position-embeddings", str(max(setting.seq_len, shape.position_embeddings))),
        ("vocab-size", str(shape.vocab)),
        ("make-vocab-size-divisible-by", str(VOCABULARY_MULTIPLE)),
        ("normalization", "LayerNorm" if shape.norm_bias else "RMSNorm"),
        ("position-embedding-type", "learned_absolute" if shape.position_embeddings else "rope"),
    ]
    if shape.kv_heads != shape.heads:
        found += [("group-query-attention", None), ("num-query-groups", str(shape.kv_heads))]
    if shape.gated_mlp:
        found.append(("swiglu", None))
    if not shape.tied_embeddings:
        found.append(("untie-embeddings-and-output-weights", None))
    if not shape.mlp_bias:
        found.append(("disable-bias-linear", None))
    if shape.attention_bias:
        found.append(("add-qkv-bias", None))
    if shape.qk_norm:
        found.append(("qk-layernorm", None))
    if shape.is_moe:
        found += [
            ("num-experts", str(shape.experts)),
            ("moe-router-topk", str(shape.experts_active)),
            ("moe-ffn-hidden-size", str(shape.expert_ffn)),
            ("moe-grouped-gemm", None),
        ]
        if shape.shared_experts:
            found.append(("moe-shared-expert-intermediate-size", str(shape.shared_experts * shape.expert_ffn)))
        if shape.dense_layers:
            found.append(("moe-layer-freq", f"([0]*{shape.dense_layers}+[1]*{shape.layers - shape.dense_layers})"))
    return found


def _recipe(subject: Subject) -> list[Flag]:
    setting = subject.setting
    found: list[Flag] = [
        ("micro-batch-size", str(subject.candidate.micro_batch)),
        ("global-batch-size", str(setting.global_batch_seqs)),
        ("seed", str(subject.seed)),
    ]
    if setting.precision == "bf16":
        found.append(("bf16", None))
    if subject.candidate.float8:
        found.append(("fp8-format", "hybrid"))
    return found


def _parallel(candidate: Candidate) -> list[Flag]:
    found: list[Flag] = [
        ("tensor-model-parallel-size", str(candidate.tensor_parallel)),
        ("pipeline-model-parallel-size", str(candidate.pipeline_parallel)),
        ("context-parallel-size", str(candidate.context_parallel)),
    ]
    if candidate.tensor_parallel > 1:
        found.append(("sequence-parallel", None))
    if candidate.pipeline_parallel > 1 and candidate.virtual_stages > 1:
        found.append(("num-virtual-stages-per-pipeline-rank", str(candidate.virtual_stages)))
    if candidate.expert_parallel > 1:
        found.append(("expert-model-parallel-size", str(candidate.expert_parallel)))
    return found


def _memory(candidate: Candidate) -> list[Flag]:
    match candidate.activation_checkpoint:
        case "full":
            return [("recompute-granularity", "full"), ("recompute-method", "uniform"), ("recompute-num-layers", "1")]
        case "first_n" if candidate.first_n:
            return [
                ("recompute-granularity", "full"),
                ("recompute-method", "block"),
                ("recompute-num-layers", str(candidate.first_n)),
            ]
        case "selective":
            return [("recompute-granularity", "selective"), ("recompute-modules", "core_attn")]
    return []


def _overlap(subject: Subject) -> list[Flag]:
    candidate, stage = subject.candidate, zero_of(subject)
    found: list[Flag] = []
    if stage >= 2:
        found += [("use-megatron-fsdp", None), ("data-parallel-sharding-strategy", STRATEGIES[stage])]
    if stage >= 1:
        found.append(("use-distributed-optimizer", None))
    if candidate.data_parallel_shard > 1 and candidate.data_parallel_replicate > 1:
        found.append(("num-distributed-optimizer-instances", str(candidate.data_parallel_replicate)))
    if candidate.data_parallel > 1:
        found.append(("overlap-grad-reduce", None))
        if stage >= 1:
            found.append(("overlap-param-gather", None))
    if candidate.fsdp_bucket > 1:
        found.append(("ddp-bucket-size", str(bucket_elements(candidate, subject.setting))))
    if candidate.async_tp and candidate.tensor_parallel > 1:
        found.append(("tp-comm-overlap", None))
    return found


def zero_of(subject: Subject) -> int:
    """The ZeRO stage that a candidate means: torchtitan shards by ranks, other frameworks say it."""
    candidate = subject.candidate
    if subject.setting.framework != "torchtitan" and candidate.data_parallel_shard == 1:
        return candidate.zero_stage
    if candidate.data_parallel_shard == 1:
        return 0
    return 2 if candidate.reshard_after_forward == "never" else 3


def bucket_elements(candidate: Candidate, setting: Setting) -> int:
    """Parameters of one gradient bucket: those of ``fsdp_bucket`` blocks on one tensor-parallel rank."""
    return max(1, round(candidate.fsdp_bucket * block_parameters_of(setting.shape) / candidate.tensor_parallel))


def block_parameters_of(shape: ModelShape) -> float:
    """Parameters of one transformer block, the mean over the layers."""
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied_embeddings else 2)
    return (shape.num_params - embeddings) / shape.layers


def _notes(candidate: Candidate, setting: Setting) -> list[str]:
    notes = []
    if candidate.activation_checkpoint == "selective":
        notes.append("selective: Megatron recomputes attention's core, torchtitan every second product; measure again")
    if candidate.async_tp:
        notes.append("tp-comm-overlap needs Transformer Engine with user buffers")
    if candidate.data_parallel_shard > 1:
        notes.append("sharded parameters: Megatron FSDP; unset CUDA_DEVICE_MAX_CONNECTIONS there")
    if setting.shape.vocab % (VOCABULARY_MULTIPLE * candidate.tensor_parallel):
        notes.append(f"vocabulary {setting.shape.vocab} is padded for tensor parallelism {candidate.tensor_parallel}")
    return notes


def gaps_of(subject: Subject) -> list[Gap]:
    """Knobs that no flag says."""
    candidate = subject.candidate
    gaps = []

    def gap(knob: str, why: str) -> None:
        gaps.append(Gap(knob=knob, value=getattr(candidate, knob), why=why))

    piped = candidate.pipeline_parallel > 1
    plain = "Interleaved1F1B" if candidate.virtual_stages > 1 else "1F1B"
    if piped and candidate.schedule != plain:
        more = ", which splits no backward pass" if candidate.schedule in SPLIT_BACKWARD else ""
        gap("schedule", f"Megatron runs {plain}{more}")
    if candidate.compile:
        gap("compile", "Megatron fuses by Transformer Engine; --cuda-graph-impl local takes away launches")
    if candidate.activation_checkpoint == "memory_budget":
        gap("activation_checkpoint", "no budget of kept activations; try --recompute-modules")
        gap("memory_budget", "as above")
    if candidate.activation_checkpoint == "first_n" and not candidate.first_n:
        gap("activation_checkpoint", "no block is checkpointed, which is none")
    if candidate.data_parallel_shard > 1 and candidate.reshard_after_forward == "default":
        gap("reshard_after_forward", "optim_grads_params frees parameters after forward, also in a pipeline")
    if candidate.forward_prefetch:
        gap("forward_prefetch", "gathers run ahead by themselves with overlap-param-gather")
    if candidate.symm_mem:
        gap("symm_mem", "--nccl-ub registers the buffers of Megatron FSDP with NCCL, which is nearest")
    if candidate.accumulate_without_sync:
        gap("accumulate_without_sync", "always on: gradients are reduced in the last micro-batch")
    if candidate.loss_chunks > 1:
        gap("loss_chunks", "logits are one vocabulary-parallel piece; --cross-entropy-loss-fusion is nearest")
    if subject.setting.framework == "torchtitan" and candidate.zero_stage != 3:
        gap("zero_stage", "has no meaning for torchtitan")
    if candidate.env != "default":
        gap("env", "the list's name is lost; its variables are exported")
    return gaps
