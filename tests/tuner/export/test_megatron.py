"""Megatron flags: back to the candidate, known to Megatron Core's classes, read from scripts that people write."""

from __future__ import annotations

import json
from pathlib import Path
import subprocess
import typing
from typing import Any

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
from pydantic import ConfigDict
from pydantic import TypeAdapter
import pytest

from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.job_file import parse_job
from search_space.resolve import setting_from_job
from tests.tuner.export.sampled import COUNT
from tests.tuner.export.sampled import setting
from tests.tuner.export.sampled import spoken
from tests.tuner.export.sampled import subjects
from tuner.export.megatron import export
from tuner.export.megatron import flags
from tuner.export.read_megatron import read
from tuner.export.read_shell import words
from tuner.export.subject import Subject
from tuner.export.targets import without_comments


TABLE = json.loads((Path(__file__).parents[2] / "data" / "framework_fields.json").read_text())["megatron"]["classes"]
CORE: dict[str, tuple[str, str]] = {
    "num-layers": ("TransformerConfig", "num_layers"),
    "hidden-size": ("TransformerConfig", "hidden_size"),
    "ffn-hidden-size": ("TransformerConfig", "ffn_hidden_size"),
    "num-attention-heads": ("TransformerConfig", "num_attention_heads"),
    "kv-channels": ("TransformerConfig", "kv_channels"),
    "num-query-groups": ("TransformerConfig", "num_query_groups"),
    "normalization": ("TransformerConfig", "normalization"),
    "swiglu": ("TransformerConfig", "gated_linear_unit"),
    "disable-bias-linear": ("TransformerConfig", "add_bias_linear"),
    "add-qkv-bias": ("TransformerConfig", "add_qkv_bias"),
    "qk-layernorm": ("TransformerConfig", "qk_layernorm"),
    "num-experts": ("TransformerConfig", "num_moe_experts"),
    "moe-router-topk": ("TransformerConfig", "moe_router_topk"),
    "moe-ffn-hidden-size": ("TransformerConfig", "moe_ffn_hidden_size"),
    "moe-grouped-gemm": ("TransformerConfig", "moe_grouped_gemm"),
    "moe-shared-expert-intermediate-size": ("TransformerConfig", "moe_shared_expert_intermediate_size"),
    "recompute-granularity": ("TransformerConfig", "recompute_granularity"),
    "recompute-method": ("TransformerConfig", "recompute_method"),
    "recompute-num-layers": ("TransformerConfig", "recompute_num_layers"),
    "recompute-modules": ("TransformerConfig", "recompute_modules"),
    "fp8-format": ("TransformerConfig", "fp8"),
    "bf16": ("ModelParallelConfig", "bf16"),
    "tensor-model-parallel-size": ("ModelParallelConfig", "tensor_model_parallel_size"),
    "pipeline-model-parallel-size": ("ModelParallelConfig", "pipeline_model_parallel_size"),
    "num-virtual-stages-per-pipeline-rank": ("ModelParallelConfig", "virtual_pipeline_model_parallel_size"),
    "context-parallel-size": ("ModelParallelConfig", "context_parallel_size"),
    "expert-model-parallel-size": ("ModelParallelConfig", "expert_model_parallel_size"),
    "sequence-parallel": ("ModelParallelConfig", "sequence_parallel"),
    "tp-comm-overlap": ("ModelParallelConfig", "tp_comm_overlap"),
    "use-distributed-optimizer": ("DistributedDataParallelConfig", "use_distributed_optimizer"),
    "overlap-grad-reduce": ("DistributedDataParallelConfig", "overlap_grad_reduce"),
    "overlap-param-gather": ("DistributedDataParallelConfig", "overlap_param_gather"),
    "ddp-bucket-size": ("DistributedDataParallelConfig", "bucket_size"),
    "use-megatron-fsdp": ("DistributedDataParallelConfig", "use_megatron_fsdp"),
    "data-parallel-sharding-strategy": ("DistributedDataParallelConfig", "data_parallel_sharding_strategy"),
    "num-distributed-optimizer-instances": ("DistributedDataParallelConfig", "num_distributed_optimizer_instances"),
}
"""Flags that fields of Megatron Core's classes hold."""
TRAINING = {
    "seq-length",
    "max-position-embeddings",
    "vocab-size",
    "make-vocab-size-divisible-by",
    "position-embedding-type",
    "group-query-attention",
    "untie-embeddings-and-output-weights",
    "micro-batch-size",
    "global-batch-size",
    "seed",
    "moe-layer-freq",
}
"""Flags of Megatron-LM's training script that no core class holds (the frequency of layers goes through a parser)."""
MODELS = ["llama3:llama3_8b", "qwen3:qwen3_30b_a3b"]


def fields_of(subject: Subject) -> dict[str, dict[str, Any]]:
    """What the flags set in each core class, typed as Megatron's argument parser types them."""
    found: dict[str, dict[str, Any]] = {}
    for flag, text in flags(subject):
        if flag in TRAINING:
            continue
        owner, field = CORE[flag]
        annotation = TABLE[owner][field]
        value: Any = text
        if text is None:
            value = flag != "disable-bias-linear"
        elif "int" in annotation.lower():
            value = int(text)
        elif annotation.startswith(("Optional[List", "Optional[list")):
            value = text.split()
        found.setdefault(owner, {})[field] = value
    return found


@pytest.mark.parametrize("framework", ["torchtitan", "megatron"])
def test_there_and_back(framework: str) -> None:
    """Every sampled candidate comes back, those knobs aside that the export itself names as unsayable."""
    seen: set[str] = set()
    for subject in subjects(framework):
        made = export(subject)
        found = read(without_comments("megatron", made.text), framework=framework)
        gaps = {gap.knob for gap in made.gaps}
        wanted, got = spoken(subject, gaps, found.candidate)
        assert got == wanted, f"{subject.candidate.label()} came back as {found.candidate.label()}"
        assert (found.global_batch_seqs, found.seq_len, found.seed) == (256, 8192, 42)
        assert (found.devices_per_node, found.nodes, found.precision) == (8, 8, "bf16")
        assert found.ignored == ()
        seen |= gaps
    assert len(subjects(framework)) == COUNT >= 100
    # What always has a counterpart is never named.
    assert not seen & {"tensor_parallel", "pipeline_parallel", "micro_batch", "data_parallel_shard", "fsdp_bucket"}


@pytest.mark.parametrize("model", MODELS)
def test_the_model_comes_back(model: str) -> None:
    subject = subjects("megatron", model)[0]
    job = parse_job(read(export(subject).text).job_text().replace("# gpu =", "gpu ="))
    shape = setting_from_job(job).shape
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "experts", "experts_active"):
        assert getattr(shape, name) == getattr(subject.setting.shape, name), name
    assert shape.num_params == pytest.approx(subject.setting.shape.num_params, rel=1e-3)


@pytest.mark.parametrize("framework", ["torchtitan", "megatron"])
def test_every_flag_is_a_field_of_megatron_core_and_its_value_is_of_the_fields_type(framework: str) -> None:
    names = vars(typing) | {"int": int, "float": float, "bool": bool, "str": str, "list": list}
    checked = set()
    for subject in [*subjects(framework), *subjects("megatron", MODELS[1])[:20]]:
        for owner, values in fields_of(subject).items():
            for field, value in values.items():
                kind = eval(TABLE[owner][field], names)
                TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
                checked.add(field)
    assert len(checked) > 20


def test_megatron_cores_own_classes_accept_the_flags() -> None:
    pytest.importorskip("megatron.core")
    from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    tried = [*subjects("torchtitan"), *subjects("megatron"), *subjects("megatron", MODELS[1])[:20]]
    for subject in tried:
        values = fields_of(subject)
        parallel = values.get("ModelParallelConfig", {})
        overlap = parallel.pop("tp_comm_overlap", None)
        if parallel.get("pipeline_model_parallel_size", 1) > 1:
            import torch

            parallel |= {"pipeline_dtype": torch.bfloat16}
        ModelParallelConfig(**parallel)
        TransformerConfig(**values["TransformerConfig"], **parallel)
        DistributedDataParallelConfig(**values.get("DistributedDataParallelConfig", {}))
        assert overlap in (None, True)


def test_bash_agrees_about_the_words(tmp_path: Path) -> None:
    """What the shell would hand to the training script is what is written."""
    subject = subjects("megatron")[3]
    script = export(subject).text.replace("torchrun ", "printf '%s\\n' ", 1)
    (tmp_path / "run.sh").write_text(script)
    printed = subprocess.run(["bash", str(tmp_path / "run.sh")], capture_output=True, text=True, check=True).stdout
    shown = printed.splitlines()
    wanted = [word for name, value in flags(subject) for word in (f"--{name}", *([value] if value is not None else []))]
    assert shown[shown.index("pretrain_gpt.py") + 1 :] == wanted


SCRIPT = r"""#!/bin/bash
# A script as people write them.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-16}
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
TP=8; 
CHECKPOINT_PATH="/data/my checkpoints"   # with a blank
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes "$NNODES"  # how many
)
GPT_ARGS="
    --num-layers 80 --hidden-size 8192 \
    --num-attention-heads=64 --group-query-attention --num-query-groups 8 \
    --ffn-hidden-size 28672 --swiglu --untie-embeddings-and-output-weights
    --seq-length 8192 --tensor_model_parallel_size ${TP_SIZE:-4}
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5
    --sequence-parallel --micro-batch-size 1 --global-batch-size 512
    --lr 1.5e-4 --min-lr -1 --bf16
"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py $GPT_ARGS \
    --use-distributed-optimizer --overlap-grad-reduce \
    --recompute-activations --save "$CHECKPOINT_PATH" --no-rope-fusion
"""


def test_a_script_as_people_write_them() -> None:
    found = read(SCRIPT)
    assert found.candidate == Candidate(
        tensor_parallel=4,
        pipeline_parallel=4,
        schedule="Interleaved1F1B",
        virtual_stages=4,
        data_parallel_replicate=8,
        activation_checkpoint="selective",
        loss_chunks=1,
        zero_stage=1,
    )
    assert (found.nodes, found.devices_per_node, found.global_batch_seqs, found.seq_len) == (16, 8, 512, 8192)
    assert found.model["layers"] == 80 and found.model["kv_heads"] == 8 and found.model["vocab"] == 128256
    assert any("vocabulary" in text for text in found.assumed)
    assert "--no-rope-fusion" in found.ignored and "--lr 1.5e-4" in found.ignored
    assert found.env == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    job = parse_job(found.job_text())
    assert job.baseline["tensor_parallel"] == 4 and job.env["imported"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


BRANCHED = r"""
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
NAME=${1:-"runs/8b"}   # a user's own path
TP_SIZE=2     
DTYPE="fp8"
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096 --num-attention-heads 32
    # --pipeline-model-parallel-size 4 # not this time
    #--save $NAME \
    --micro-batch-size 1 --global-batch-size 128 \
    --attention-backend auto # can be (flash/fused/unfused/local)
)
EXTRA=()
if [[ "$DTYPE" == "fp8" ]]; then
    EXTRA+=(
        "--fp8-format hybrid"
        "--split '99,1,0'"
        "--tensor-model-parallel-size $TP_SIZE"
    )
fi
MODEL_ARGS+=("${EXTRA[@]}")
torchrun --nproc_per_node=8 pretrain_gpt.py \
    ${MODEL_ARGS[@]} --sequence-parallel
"""


def test_branches_and_flags_in_one_pair_of_quotes() -> None:
    found = read(BRANCHED)
    assert found.candidate.float8 and found.candidate.tensor_parallel == 2 and found.candidate.pipeline_parallel == 1
    assert found.candidate.data_parallel_replicate == 4 and found.global_batch_seqs == 128
    assert found.env == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert "--split 99,1,0" in found.ignored


def test_for_trials_of_torchtitan_data_parallelism_becomes_its_nearest_kind() -> None:
    found = read(SCRIPT, framework="torchtitan")
    assert found.candidate.data_parallel_shard == 8 and found.candidate.reshard_after_forward == "never"
    assert any("ZeRO-1" in text for text in found.assumed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo hello", "no Megatron flag"),
        ("--tensor-model-parallel-size eight --micro-batch-size 1", "no whole number"),
        ("--tensor-model-parallel-size $TP --micro-batch-size 1", "no whole number"),
        ("--micro-batch-size", "no value"),
        ("--micro-batch-size 0", "at least 1"),
        ("--nproc-per-node 8 --nnodes 1 --micro-batch-size 1 --tensor-model-parallel-size 3", "does not divide 8"),
        ("--micro-batch-size 1 --use-megatron-fsdp --data-parallel-sharding-strategy some", "known are"),
        ("--micro-batch-size 1 'open", "cannot be read"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        read(text)


def test_devices_that_the_file_leaves_open() -> None:
    text = "--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 64 --num-layers 4"
    assert any("--gpus" in line for line in read(text).missing)
    found = read(text, devices=16)
    assert found.candidate.data_parallel_replicate == 8 and (found.nodes, found.devices_per_node) == (2, 8)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 999),
    st.sampled_from(
        ["--micro-batch-size {}", "--micro-batch-size={}", "'--micro-batch-size' \"{}\"", "--micro_batch_size {}"]
    ),
    st.sampled_from(["{}", "X={}\nY=1\n--lr 1 \\\n ", "ARGS=(\n  {}\n)", 'ARGS="--lr 1 {}"', "torchrun a.py {} # end"]),
)
def test_one_flag_however_it_is_written(value: int, form: str, frame: str) -> None:
    body = form.format(value)
    if frame.startswith("X="):
        text = f"X={value}\n" + form.format("$X")
        text = text.replace("'--micro-batch-size'", "--micro-batch-size")
    elif '"' in form and '="' in frame:
        text = body
    else:
        text = frame.format(body)
    assert read(text).candidate.micro_batch == value


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 99), st.integers(1, 99), st.integers(1, 9), st.sampled_from("+-*/%"), st.sampled_from("+-*"))
def test_arithmetic_as_the_shell_does_it(a: int, b: int, c: int, first: str, second: str) -> None:
    expression = f"{a} {first} {b} {second} {c}"
    shown = subprocess.run(["bash", "-c", f"echo $(({expression}))"], capture_output=True, text=True).stdout.strip()
    assert words(f"X=$(({expression}))\necho $X")[-1] == shown


def test_nothing_is_run(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    read(f"--micro-batch-size 1 --save $(touch {victim}) `touch {victim}`")
    assert not victim.exists()
    assert setting("megatron").num_devices == 64
