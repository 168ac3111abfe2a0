"""The shipped validity rules, each with its source."""

from __future__ import annotations

import numpy as np

from search_space.pool import Pool
from search_space.rules.rule import Rule
from search_space.setting import Setting


ALL = ("torchtitan", "megatron", "deepspeed")
TITAN = ("torchtitan",)


def _microbatches(pool: Pool, setting: Setting) -> np.ndarray:
    return setting.global_batch_seqs // (pool.data_parallel * pool["micro_batch"])


def _pipelined(pool: Pool) -> np.ndarray:
    return pool["pipeline_parallel"] > 1


RULES: tuple[Rule, ...] = (
    Rule(
        code="tp_divides_heads",
        frameworks=ALL,
        source="attention is split by query heads",
        violated=lambda pool, setting: setting.shape.heads % pool["tensor_parallel"] != 0,
        required=lambda pool, setting: pool["tensor_parallel"],
        available=lambda pool, setting: setting.shape.heads,
        unit="heads",
        text="tensor_parallel {required} does not divide the {available} query heads",
    ),
    Rule(
        code="tp_divides_kv_heads",
        frameworks=TITAN,
        versions="0.3.0",
        source="pytorch/torchtitan#932: key/value heads are split, not copied",
        violated=lambda pool, setting: setting.shape.kv_heads % pool["tensor_parallel"] != 0,
        required=lambda pool, setting: pool["tensor_parallel"],
        available=lambda pool, setting: setting.shape.kv_heads,
        unit="kv_heads",
        text="tensor_parallel {required} does not divide the {available} key/value heads",
    ),
    Rule(
        code="tp_divides_ffn",
        frameworks=ALL,
        source="feed-forward columns are split evenly",
        violated=lambda pool, setting: setting.shape.ffn % pool["tensor_parallel"] != 0,
        required=lambda pool, setting: pool["tensor_parallel"],
        available=lambda pool, setting: setting.shape.ffn,
        unit="columns",
        text="tensor_parallel {required} does not divide the feed-forward width {available}",
    ),
    Rule(
        code="tp_divides_sequence",
        frameworks=ALL,
        source="sequence parallelism splits the sequence over the tensor-parallel ranks",
        violated=lambda pool, setting: setting.seq_len % (pool["tensor_parallel"] * pool["context_parallel"]) != 0,
        required=lambda pool, setting: pool["tensor_parallel"] * pool["context_parallel"],
        available=lambda pool, setting: setting.seq_len,
        unit="tokens",
        text="tensor_parallel × context_parallel = {required} does not divide the sequence of {available} tokens",
    ),
    Rule(
        code="stages_exceed_layers",
        frameworks=ALL,
        source="pytorch/torchtitan#1041: every stage needs at least one layer",
        violated=lambda pool, setting: _pipelined(pool) & (pool.num_stages > setting.shape.layers),
        required=lambda pool, setting: pool.num_stages,
        available=lambda pool, setting: setting.shape.layers,
        unit="stages",
        text="{required} pipeline stages exceed the {available} layers",
    ),
    Rule(
        code="microbatches_fill_pipeline",
        frameworks=TITAN,
        versions="0.3.0",
        source="torch.distributed.pipelining 2.14: 1F1B and GPipe refuse fewer micro-batches than stages",
        violated=lambda pool, setting: (
            _pipelined(pool) & pool.is_schedule("1F1B", "GPipe") & (_microbatches(pool, setting) < pool.num_stages)
        ),
        required=lambda pool, setting: pool.num_stages,
        available=_microbatches,
        unit="micro-batches",
        text="schedule {schedule} needs at least {required} micro-batches, there are {available}",
    ),
    Rule(
        code="interleaved_rounds",
        frameworks=TITAN,
        versions="0.3.0",
        source="torch.distributed.pipelining 2.14: micro-batches must divide into rounds of the pipeline",
        violated=lambda pool, setting: (
            _pipelined(pool)
            & pool.is_schedule("Interleaved1F1B", "InterleavedZeroBubble")
            & (
                _microbatches(pool, setting) % np.maximum(1, _microbatches(pool, setting) // pool["pipeline_parallel"])
                != 0
            )
        ),
        required=lambda pool, setting: np.maximum(1, _microbatches(pool, setting) // pool["pipeline_parallel"]),
        available=_microbatches,
        unit="micro-batches",
        text="schedule {schedule}: {available} micro-batches do not divide into {required} rounds",
    ),
    Rule(
        code="dualpipev_microbatches",
        frameworks=TITAN,
        versions="0.3.0",
        source="torch.distributed.pipelining 2.14: DualPipeV needs as many micro-batches as stages",
        violated=lambda pool, setting: (
            _pipelined(pool) & pool.is_schedule("DualPipeV") & (_microbatches(pool, setting) < pool.num_stages)
        ),
        required=lambda pool, setting: pool.num_stages,
        available=_microbatches,
        unit="micro-batches",
        text="schedule DualPipeV needs at least {required} micro-batches, there are {available}",
    ),
    Rule(
        code="context_parallel_on_cpu",
        frameworks=TITAN,
        versions="0.3.0",
        source="spmd_types refuses SDPA with context parallelism, and FlexAttention has no CPU backward",
        violated=lambda pool, setting: (pool["context_parallel"] > 1) & setting.on_cpu,
        required=lambda pool, setting: pool["context_parallel"],
        available=lambda pool, setting: 1,
        unit="ranks",
        text="context_parallel {required} cannot run on CPU slots with this torchtitan",
    ),
    Rule(
        code="gpu_only_knob",
        frameworks=TITAN,
        versions="0.3.0",
        source="async tensor parallelism and float8 have no CPU kernels",
        violated=lambda pool, setting: (pool["async_tp"] | pool["float8"]) & setting.on_cpu,
        required=lambda pool, setting: 1,
        available=lambda pool, setting: 0,
        unit="GPU",
        text="async_tp={async_tp}, float8={float8} need a GPU, the devices are CPU slots",
    ),
)
"""Every shipped rule. A rule is added here, never as an if in the enumeration."""
