"""The shipped validity rules, each with its source."""

from __future__ import annotations

import numpy as np

from search_space.candidate import ACTIVATION_CHECKPOINT
from search_space.candidate import LOOPED_SCHEDULES
from search_space.candidate import SPLIT_BACKWARD
from search_space.candidate import V_SCHEDULES
from search_space.legal import legal_tensor_parallel
from search_space.pool import Pool
from search_space.rules.rule import Rule
from search_space.setting import Setting


ALL = ("torchtitan", "megatron", "deepspeed")
TITAN = ("torchtitan",)


def _microbatches(pool: Pool, setting: Setting) -> np.ndarray:
    return setting.global_batch_seqs // (pool.data_parallel * pool["micro_batch"])


def _pipelined(pool: Pool) -> np.ndarray:
    return pool["pipeline_parallel"] > 1


def _overlay(pool: Pool) -> np.ndarray:
    return pool["data_parallel_shard"].astype(np.int64) * pool["context_parallel"] * pool["tensor_parallel"]


def _sides(pool: Pool, setting: Setting) -> np.ndarray:
    """Sides of the linear layers that float8 converts, on one tensor-parallel rank, shape (sides, n).

    The head stays in bf16 (torchtitan's filter leaves ``lm_head`` out).
    """
    shape, tp = setting.shape, pool["tensor_parallel"].astype(np.float64)
    whole = [shape.query_width, shape.kv_heads * shape.head_dim, shape.value_width, shape.ffn]
    return np.array([np.full_like(tp, shape.hidden), *(side / tp for side in whole if side)])


def _float8_rest(pool: Pool, setting: Setting) -> np.ndarray:
    return np.asarray((_sides(pool, setting) % 16).max(axis=0))


def _float8_side(pool: Pool, setting: Setting) -> np.ndarray:
    sides = _sides(pool, setting)
    return np.asarray(sides[(sides % 16 != 0).argmax(axis=0), np.arange(sides.shape[1])])


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
        text="tensor_parallel {required} does not divide the {available} key/value heads; "
        "the largest that does: {largest}",
        words=lambda setting: {"largest": max(legal_tensor_parallel(setting))},
    ),
    Rule(
        code="tp_divides_vocab",
        frameworks=TITAN,
        versions="0.3.0",
        source="rows of the embedding and head are split evenly; an uneven split trains, but to another loss",
        violated=lambda pool, setting: setting.shape.vocab % pool["tensor_parallel"] != 0,
        required=lambda pool, setting: pool["tensor_parallel"],
        available=lambda pool, setting: setting.shape.vocab,
        unit="tokens",
        text="tensor_parallel {required} does not divide the vocabulary of {available}; pad it to a multiple",
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
        code="batch_divides",
        frameworks=ALL,
        source="every data-parallel rank runs whole micro-batches",
        violated=lambda pool, setting: setting.global_batch_seqs % (pool.data_parallel * pool["micro_batch"]) != 0,
        required=lambda pool, setting: pool.data_parallel * pool["micro_batch"],
        available=lambda pool, setting: setting.global_batch_seqs,
        unit="sequences",
        text="data_parallel × micro_batch {micro_batch} = {required} does not divide the global batch of {available}",
    ),
    Rule(
        code="one_stage_per_rank",
        frameworks=ALL,
        source="1F1B and GPipe run one stage on each rank; more hang (torchtitan 0.3.0 refuses them)",
        violated=lambda pool, setting: (
            _pipelined(pool) & pool.is_schedule("1F1B", "GPipe") & (pool["virtual_stages"] != 1)
        ),
        required=lambda pool, setting: pool["virtual_stages"],
        available=lambda pool, setting: 1,
        unit="stages per rank",
        text="schedule {schedule} runs exactly one stage per rank, the candidate has {required}",
    ),
    Rule(
        code="several_stages_per_rank",
        frameworks=ALL,
        source="looped schedules need at least two stages on each rank (torchtitan 0.3.0 pipeline_parallel.py); with "
        "stages listed one runs, as 1F1B does: a duplicate",
        violated=lambda pool, setting: (
            _pipelined(pool) & pool.is_schedule(*LOOPED_SCHEDULES) & (pool["virtual_stages"] < 2)
        ),
        required=lambda pool, setting: 2,
        available=lambda pool, setting: pool["virtual_stages"],
        unit="stages per rank",
        text="schedule {schedule} needs at least {required} stages per rank, the candidate has {available}",
    ),
    Rule(
        code="two_stages_per_rank",
        frameworks=ALL,
        source="V schedules fold exactly two stages onto each rank (torch.distributed.pipelining 2.14)",
        violated=lambda pool, setting: (
            _pipelined(pool) & pool.is_schedule(*V_SCHEDULES) & (pool["virtual_stages"] != 2)
        ),
        required=lambda pool, setting: 2,
        available=lambda pool, setting: pool["virtual_stages"],
        unit="stages per rank",
        text="schedule {schedule} needs exactly {required} stages per rank, the candidate has {available}",
    ),
    Rule(
        code="tied_embeddings_with_pipeline",
        frameworks=TITAN,
        versions="0.3.0",
        source="pytorch/torchtitan#2580: first and last stage would own separate copies",
        violated=lambda pool, setting: _pipelined(pool) & setting.shape.tied_embeddings,
        required=lambda pool, setting: pool["pipeline_parallel"],
        available=lambda pool, setting: 1,
        unit="ranks",
        text="tied embeddings cannot be cut into {required} pipeline ranks; pipeline_parallel 1 stays legal",
    ),
    Rule(
        code="ep_divides_experts",
        frameworks=ALL,
        source="experts are dealt out evenly",
        violated=lambda pool, setting: (
            (pool["expert_parallel"] > 1) & (max(setting.shape.experts, 1) % pool["expert_parallel"] != 0)
        ),
        required=lambda pool, setting: pool["expert_parallel"],
        available=lambda pool, setting: setting.shape.experts,
        unit="experts",
        text="expert_parallel {required} does not divide the {available} experts",
    ),
    Rule(
        code="ep_divides_ranks",
        frameworks=TITAN,
        versions="0.3.0",
        source="pytorch/torchtitan#4258: experts overlay data_parallel_shard × context_parallel × tensor_parallel",
        violated=lambda pool, setting: _overlay(pool) % pool["expert_parallel"] != 0,
        required=lambda pool, setting: pool["expert_parallel"],
        available=lambda pool, setting: _overlay(pool),
        unit="ranks",
        text="expert_parallel {required} does not divide data_parallel_shard × context_parallel × tensor_parallel "
        "= {available}",
    ),
    Rule(
        code="memory_budget_needs_compile",
        frameworks=TITAN,
        versions="0.3.0",
        source="torchtitan 0.3.0 activation_checkpoint.py: the budget is the compiler's",
        violated=lambda pool, setting: (
            (pool["activation_checkpoint"] == ACTIVATION_CHECKPOINT.index("memory_budget")) & ~pool["compile"]
        ),
        required=lambda pool, setting: 1,
        available=lambda pool, setting: 0,
        unit="compile",
        text="activation_checkpoint memory_budget needs compile",
    ),
    Rule(
        code="float8_needs_sixteens",
        frameworks=ALL,
        source="float8 products need both sides in multiples of 16 (torch._scaled_mm), after tensor parallelism",
        violated=lambda pool, setting: pool["float8"] & (_float8_rest(pool, setting) != 0),
        required=lambda pool, setting: 16,
        available=lambda pool, setting: _float8_side(pool, setting),
        unit="elements",
        text="float8 needs sides in multiples of {required}; one is {available} on each tensor-parallel rank",
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
        source="torch.distributed.pipelining 2.14: 1F1B refuses fewer micro-batches than stages; GPipe does not",
        violated=lambda pool, setting: (
            _pipelined(pool) & pool.is_schedule("1F1B") & (_microbatches(pool, setting) < pool.num_stages)
        ),
        required=lambda pool, setting: pool.num_stages,
        available=_microbatches,
        unit="micro-batches",
        text="schedule {schedule} needs at least {required} micro-batches with torch 2.14, there are {available}",
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
        code="selective_checkpoint_runs_backward_once",
        frameworks=TITAN,
        versions="0.3.0",
        source="torch 2.14 selective checkpointing: a region may run backward once, and split schedules run it twice "
        "(found by dry run, the same in real training; compiled blocks not tried)",
        violated=lambda pool, setting: (
            _pipelined(pool)
            & pool.is_schedule(*SPLIT_BACKWARD)
            & (pool["activation_checkpoint"] == ACTIVATION_CHECKPOINT.index("selective"))
            & ~pool["compile"]
        ),
        required=lambda pool, setting: 2,
        available=lambda pool, setting: 1,
        unit="backward passes",
        text="schedule {schedule} runs {required} backward passes over a block, selective checkpointing allows "
        "{available}",
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
        source="async tensor parallelism, float8 and NCCL's symmetric memory have no CPU kernels",
        violated=lambda pool, setting: (pool["async_tp"] | pool["float8"] | pool["symm_mem"]) & setting.on_cpu,
        required=lambda pool, setting: 1,
        available=lambda pool, setting: 0,
        unit="GPU",
        text="async_tp={async_tp}, float8={float8}, symm_mem={symm_mem} need a GPU, the devices are CPU slots",
    ),
    Rule(
        code="symm_mem_needs_hopper",
        frameworks=TITAN,
        versions="0.3.0",
        source="torchtitan ParallelismConfig: on NVIDIA GPUs compute capability 9.0 or newer",
        violated=lambda pool, setting: pool["symm_mem"] & setting.hardware.name.startswith(("A100", "A800")),
        required=lambda pool, setting: 9.0,
        available=lambda pool, setting: 8.0,
        unit="compute capability",
        text="symm_mem needs Hopper or newer ({required}), the devices have {available}",
    ),
    Rule(
        code="bucket_with_own_placement",
        frameworks=TITAN,
        versions="0.3.0",
        source="torchtitan apply_fsdp_to_decoder: experts sharded by a placement of their own take one block a group",
        violated=lambda pool, setting: (
            (pool["fsdp_bucket"] > 1)
            & setting.shape.is_moe
            & ((pool["expert_parallel"] > 1) | (pool["data_parallel_shard"] > max(1, setting.shape.experts)))
        ),
        required=lambda pool, setting: pool["fsdp_bucket"],
        available=lambda pool, setting: 1,
        unit="blocks",
        text="fsdp_bucket {required}: blocks whose experts have a placement of their own cannot share a group",
    ),
    Rule(
        code="nothing_to_accumulate",
        frameworks=TITAN,
        versions="0.3.0",
        source="without a pipeline torchtitan accumulates over micro-batches; with one its schedule already does",
        violated=lambda pool, setting: (
            pool["accumulate_without_sync"].astype(bool) & (_pipelined(pool) | (_microbatches(pool, setting) < 2))
        ),
        required=lambda pool, setting: 2,
        available=lambda pool, setting: np.where(_pipelined(pool), 1, _microbatches(pool, setting)),
        unit="accumulation steps",
        text="accumulate_without_sync changes nothing with {available} gradient accumulation step",
    ),
    Rule(
        code="nothing_to_prefetch",
        frameworks=TITAN,
        versions="0.3.0",
        source="torch.distributed.fsdp gathers nothing with one shard, and nothing is ahead of the last group",
        violated=lambda pool, setting: (
            (pool["forward_prefetch"] > 0)
            & (
                (pool["data_parallel_shard"] * pool["context_parallel"] == 1)
                | (setting.shape.layers // pool.num_stages <= pool["fsdp_bucket"])
            )
        ),
        required=lambda pool, setting: 2,
        available=lambda pool, setting: np.where(pool["data_parallel_shard"] * pool["context_parallel"] == 1, 0, 1),
        unit="FSDP groups",
        text="forward_prefetch has no group to gather ahead",
    ),
)
"""Every shipped rule. A rule is added here, never as an if in the enumeration."""
