"""Config files: Python that imports, sets every knob, and loses no layer."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from search_space.candidate import Candidate
from search_space.enumerate import enumerate_pool
from search_space.errors import UserError
from search_space.hardware import find_hardware
from search_space.model import ModelShape
from search_space.rules import judge
from search_space.rules import RULES
from search_space.setting import Setting
from trial_runner.recipe.base import BaseFunction
from trial_runner.recipe.config_file import function_name
from trial_runner.recipe.config_file import microbatches
from trial_runner.recipe.config_file import Recipe
from trial_runner.recipe.config_file import render


SHAPE = ModelShape(layers=13, hidden=256, heads=16, kv_heads=8, ffn=768, vocab=2048)
BASE = BaseFunction(
    module="torchtitan.models.llama3.config_registry",
    function="llama3_debugmodel",
    user_path=None,
    shape=SHAPE,
    num_params=SHAPE.num_params,
    seq_len=256,
    local_batch=8,
    global_batch=-1,
    knobs={"loss_chunks": 8},
)
RECIPE = Recipe(seq_len=256, global_batch_seqs=48, precision="bf16")
SETTING = Setting(
    shape=SHAPE,
    hardware=find_hardware("H100-SXM"),
    devices_per_node=8,
    nodes=1,
    seq_len=256,
    global_batch_seqs=48,
)


def legal() -> list[Candidate]:
    knobs = {"schedule": ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"), "virtual_stages": (1, 2, 3)}
    pool = enumerate_pool(SETTING, knobs)
    return pool.take(judge(pool, SETTING, RULES).legal).candidates()


LEGAL = legal()


class Recorder:
    """Stands for a torchtitan config: remembers what is set on it."""

    def __init__(self) -> None:
        object.__setattr__(self, "values", {})

    def __getattr__(self, name: str) -> Any:
        return self.values.setdefault(name, Recorder())

    def __setattr__(self, name: str, value: Any) -> None:
        self.values[name] = value


def apply(text: str, function: str) -> Recorder:
    """Run the rendered function on a recorder, its torchtitan imports replaced."""
    tree = ast.parse(text)
    names = {}
    for node in [node for node in tree.body if isinstance(node, ast.ImportFrom)]:
        for alias in node.names:
            names[alias.asname or alias.name] = Recorder
        tree.body.remove(node)
    for kind in ("SelectiveAC", "FullAC"):
        names[kind] = type(kind, (), {"Config": staticmethod(lambda kind=kind: kind)})
    exec(compile(tree, "config", "exec"), names)
    config = names[function]()
    assert isinstance(config, Recorder)
    return config


@given(st.sampled_from(LEGAL))
@settings(max_examples=150, deadline=None)
def test_every_legal_candidate_renders_and_keeps_the_batch(candidate: Candidate) -> None:
    config = apply(render(candidate, BASE, RECIPE, function="f", header='evidence """ with \\ odd text'), "f")
    training, parallel = config.training, config.parallelism
    count = microbatches(candidate, RECIPE)
    assert candidate.data_parallel * candidate.micro_batch * count == RECIPE.global_batch_seqs
    assert training.global_batch_size == 48 and training.seq_len == 256
    degrees = (
        parallel.tensor_parallel_degree
        * parallel.pipeline_parallel_degree
        * parallel.data_parallel_shard_degree
        * parallel.data_parallel_replicate_degree
        * parallel.context_parallel_degree
    )
    assert degrees == 8
    if candidate.pipeline_parallel == 1:
        assert training.local_batch_size == candidate.micro_batch
        assert "module_fqns_per_model_part" not in parallel.values
        return
    assert training.local_batch_size == candidate.micro_batch * count
    assert parallel.pipeline_parallel_microbatch_size == candidate.micro_batch
    assert training.disable_cuda_graphs is True
    stages = parallel.module_fqns_per_model_part
    assert len(stages) == candidate.num_stages and all(any("layers." in m for m in stage) for stage in stages)
    flat = [module for stage in stages for module in stage]
    assert flat == ["tok_embeddings", *(f"layers.{i}" for i in range(13)), "norm", "lm_head"]


def test_checkpointing_and_compile() -> None:
    config = apply(
        render(Candidate(activation_checkpoint="full", compile=True), BASE, RECIPE, function="f", header=""), "f"
    )
    assert config.activation_checkpoint == "FullAC" and config.compile.enable is True
    config = apply(render(Candidate(), BASE, RECIPE, function="f", header=""), "f")
    assert config.activation_checkpoint is None and config.compile.enable is False


def test_loss_chunks_only_where_they_differ() -> None:
    assert "num_chunks" not in render(Candidate(), BASE, RECIPE, function="f", header="")
    assert "num_chunks = 4" in render(Candidate(loss_chunks=4), BASE, RECIPE, function="f", header="")


def test_a_function_with_float8_layers_cannot_lose_them() -> None:
    converted = replace(BASE, knobs=BASE.knobs | {"float8": True})
    assert "Float8LinearConverter" not in render(Candidate(float8=True), converted, RECIPE, function="f", header="")
    with pytest.raises(UserError, match="float8"):
        render(Candidate(), converted, RECIPE, function="f", header="")


def test_code_is_carried_only_where_a_knob_needs_it() -> None:
    plain = render(Candidate(), BASE, RECIPE, function="f", header="")
    assert "parallelize" not in plain and "functools" not in plain
    everything = Candidate(
        data_parallel_shard=2,
        fsdp_bucket=2,
        forward_prefetch=1,
        accumulate_without_sync=True,
        activation_checkpoint="first_n",
        first_n=3,
    )
    text = render(everything, BASE, RECIPE, function="f", header="")
    tree = ast.parse(text)
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert names == {
        "FirstBlocksAC", "blocks_in_groups", "prefetch_forward", "sync_last_only", "parallelize_with_knobs", "f",
    }  # fmt: skip
    assert "ledgertune" not in text and "trial_runner" not in text
    assert "sync_last_only(model, 24)" in text and "disable_cuda_graphs = True" in text


def test_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="48 is no multiple"):
        microbatches(Candidate(micro_batch=5), RECIPE)


def test_function_name_is_python() -> None:
    assert function_name(BASE, "trial-3 x").isidentifier()
