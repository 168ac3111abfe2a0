"""Every knob is really there in the program that torchtitan builds from a rendered config file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
import json
from pathlib import Path
import subprocess
import sys
from typing import Any

import pytest

from search_space.candidate import Candidate
from trial_runner.recipe.base import BaseFunction
from trial_runner.recipe.base import describe
from trial_runner.recipe.config_file import Recipe
from trial_runner.recipe.config_file import render


LAYERS = [str(i) for i in range(6)]
SHARD4 = Candidate(data_parallel_shard=4)
Facts = dict[str, Any]

CASES: dict[str, tuple[Candidate, Callable[[Facts], bool]]] = {
    "plain": (
        SHARD4,
        lambda f: f["groups"] == [[n] for n in LAYERS] and not f["wrapped"] and f["mesh"]["dp_shard"] == 4,
    ),
    "tensor_parallel": (
        Candidate(data_parallel_shard=2, tensor_parallel=2),
        lambda f: (f["mesh"]["tp"], f["mesh"]["dp_shard"]) == (2, 2),
    ),
    "data_parallel_replicate": (
        Candidate(data_parallel_shard=2, data_parallel_replicate=2),
        lambda f: (f["mesh"]["dp_replicate"], f["mesh"]["dp_shard"]) == (2, 2),
    ),
    "pipeline_parallel": (
        Candidate(data_parallel_shard=2, pipeline_parallel=2),
        lambda f: f["schedule"] == "Schedule1F1B" and f["stages"] == [["0", "1", "2"]] and f["microbatches"] == 4,
    ),
    "virtual_stages": (
        Candidate(data_parallel_shard=2, pipeline_parallel=2, schedule="Interleaved1F1B", virtual_stages=2),
        lambda f: f["schedule"] == "ScheduleInterleaved1F1B" and len(f["stages"]) == 2,
    ),
    "uneven stages": (
        Candidate(data_parallel_shard=1, pipeline_parallel=4, micro_batch=1),
        lambda f: sum(map(len, f["stages"])) in (1, 2) and f["schedule"] == "Schedule1F1B",
    ),
    "schedule": (
        Candidate(data_parallel_shard=2, pipeline_parallel=2, schedule="ZBVZeroBubble", virtual_stages=2),
        lambda f: f["schedule"] == "ScheduleZBVZeroBubble",
    ),
    "reshard_after_forward": (replace(SHARD4, reshard_after_forward="never"), lambda f: not any(f["reshard"].values())),
    "reshard default": (SHARD4, lambda f: all(f["reshard"].values())),
    "micro_batch": (replace(SHARD4, micro_batch=2), lambda f: f["accumulation"] == 2),
    "selective": (replace(SHARD4, activation_checkpoint="selective"), lambda f: f["wrapped"] == LAYERS),
    "full": (replace(SHARD4, activation_checkpoint="full"), lambda f: f["wrapped"] == LAYERS),
    "first_n": (replace(SHARD4, activation_checkpoint="first_n", first_n=2), lambda f: f["wrapped"] == LAYERS[:2]),
    "memory_budget": (
        replace(SHARD4, activation_checkpoint="memory_budget", memory_budget=0.25, compile=True),
        lambda f: f["memory_budget"] == 0.25 and f["compiled"] == LAYERS,
    ),
    "compile": (replace(SHARD4, compile=True), lambda f: f["compiled"] == LAYERS),
    "fsdp_bucket": (replace(SHARD4, fsdp_bucket=4), lambda f: f["groups"] == [LAYERS[:4], LAYERS[4:]]),
    "fsdp_bucket with checkpointing": (
        replace(SHARD4, fsdp_bucket=3, activation_checkpoint="full"),
        lambda f: f["groups"] == [LAYERS[:3], LAYERS[3:]] and f["wrapped"] == LAYERS,
    ),
    "forward_prefetch": (
        replace(SHARD4, forward_prefetch=2),
        lambda f: f["prefetch"]["0"] == ["1", "2"] and f["prefetch"]["4"] == ["5"] and not f["prefetch"]["5"],
    ),
    "forward_prefetch of groups": (
        replace(SHARD4, forward_prefetch=1, fsdp_bucket=2),
        lambda f: f["groups"] == [LAYERS[:2], LAYERS[2:4], LAYERS[4:]] and len(f["prefetch"]["0"]) == 1,
    ),
    "accumulate_without_sync": (
        replace(SHARD4, accumulate_without_sync=True),
        lambda f: f["reductions"] == [False, False, False, True],
    ),
    "synchronised": (SHARD4, lambda f: f["reductions"] == [True] * 4),
    "loss_chunks": (replace(SHARD4, loss_chunks=4), lambda f: f["loss_chunks"] == 4),
    "async_tp": (
        Candidate(data_parallel_shard=2, tensor_parallel=2, compile=True, async_tp=True),
        lambda f: f["micro_pipeline_tp"] and f["compiled"] == LAYERS,
    ),
    "no async_tp": (
        Candidate(data_parallel_shard=2, tensor_parallel=2, compile=True),
        lambda f: not f["micro_pipeline_tp"],
    ),
    "symm_mem": (
        replace(SHARD4, symm_mem=True),
        lambda f: f["collectives"] == ["SymmMemAllGather", "SymmMemReduceScatter"],
    ),
    "no symm_mem": (SHARD4, lambda f: f["collectives"] == ["DefaultAllGather", "DefaultReduceScatter"]),
    "expert_parallel": (replace(SHARD4, expert_parallel=2), lambda f: f["mesh"]["ep"] == 2 and f["experts"]),
    "no expert_parallel": (SHARD4, lambda f: f["mesh"]["ep"] == 1 and f["experts"]),
    "context_parallel": (Candidate(data_parallel_shard=2, context_parallel=2), lambda f: f["mesh"]["cp"] == 2),
}
BASES = {
    "expert_parallel": "deepseek_v3:deepseek_v3_debugmodel",
    "no expert_parallel": "deepseek_v3:deepseek_v3_debugmodel",
}
"""Config functions of the cases that need another model than the plain one."""
STEPPED = ("accumulate_without_sync", "synchronised")


@pytest.fixture(scope="module")
def base() -> BaseFunction:
    return describe("llama3:llama3_debugmodel")


@pytest.fixture(scope="module")
def built(base: BaseFunction, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    folder = tmp_path_factory.mktemp("knobs")
    recipe = Recipe(seq_len=128, global_batch_seqs=16, precision="bf16")
    orders = []
    bases = {target: describe(target) for target in set(BASES.values())}
    for number, (name, (candidate, _)) in enumerate(CASES.items()):
        model = bases[BASES[name]] if name in BASES else base
        here = replace(recipe, global_batch_seqs=8) if candidate.pipeline_parallel == 2 else recipe
        path = folder / f"case{number}.py"
        path.write_text(render(candidate, model, here, function="config", header=name))
        orders.append(
            {
                "config_file": str(path), "config_function": "config", "user_path": None, "folder": str(folder),
                "world_size": candidate.num_devices, "micro_batch": candidate.micro_batch, "seq_len": 128,
                "tensor_parallel": candidate.tensor_parallel, "hidden": model.shape.hidden, "precision": "bf16",
                "step": name in STEPPED, "gpu_kernels": False,
            }
        )  # fmt: skip
    (folder / "orders.json").write_text(json.dumps(orders))
    program = Path(__file__).with_name("knob_inspect.py")
    done = subprocess.run(
        [sys.executable, str(program), str(folder / "orders.json")], capture_output=True, text=True, timeout=400
    )
    lines = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("facts:")]
    assert len(lines) == len(CASES), done.stderr[-3000:]
    return dict(zip(CASES, lines))


@pytest.mark.parametrize("name", [name for name in CASES if name != "context_parallel"])
def test_the_running_program_has_it(built: dict[str, Facts], name: str) -> None:
    facts = built[name]
    assert "error" not in facts, facts
    assert CASES[name][1](facts), facts


def test_context_parallel_reaches_torchtitan_which_wants_flex_attention(built: dict[str, Facts]) -> None:
    """torchtitan 0.3.0 refuses it for the attention that every dense config function has; the words are its own."""
    assert "CP is not supported with ScaledDotProductAttention" in built["context_parallel"]["error"]


def test_float8_needs_its_package_and_a_gpu(base: BaseFunction) -> None:
    text = render(
        replace(SHARD4, float8=True, compile=True), base, Recipe(seq_len=128, global_batch_seqs=16, precision="bf16"),
        function="config", header="float8",
    )  # fmt: skip
    assert "Float8LinearConverter.Config(model_compile_enabled=True).build().convert(config.model_spec.model)" in text
    from torchtitan.components.quantization import Float8LinearConverter

    with pytest.raises((ImportError, ValueError)):
        Float8LinearConverter.Config(model_compile_enabled=True).build()
