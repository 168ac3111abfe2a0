"""One rank of the real program, two steps: what it held, computed and sent in the second."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from typing import Any

import torch

from trial_runner.dry_run import patches
from trial_runner.dry_run import routing
from trial_runner.dry_run.fake import QuickFakeMode
from trial_runner.dry_run.shorten import warm_up
from trial_runner.dry_run.track import blocks_at_peak
from trial_runner.dry_run.track import local
from trial_runner.dry_run.track import peak_by_kind
from trial_runner.dry_run.track import Tracker
from trial_runner.rank import cpu
from trial_runner.rank import loading


def load(order: dict[str, Any]) -> Any:
    """The candidate's config, set for a dry run."""
    from trial_runner.rank import tokens

    loading.add_user_path(order["user_path"])
    config = loading.load_function(order["config_file"], order["config_function"])()
    model = config.model_spec.model
    if order["layers"] and order["layers"] < len(model.layers):
        model.layers = list(model.layers)[: order["layers"]]
    cpu.adapt(config)
    tokens.use_synthetic_tokens(config, 0)
    if not order["real"]:
        config.comm.mode = "fake_backend"
    config.checkpoint.enable = config.validator.enable = False
    config.debug.seed = 0
    config.debug.enable_structured_logging = False
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    config.dump_folder = order["folder"]
    config.training.steps = 1000
    # Graph capture does not go through fake tensors: the program runs eager, one compiled block is looked at apart.
    if not order["real"]:
        config.compile.enable = config.compile.enable_async_tensor_parallel = False
        # The buffers are as large in symmetric memory, but only NCCL can allocate them there.
        config.parallelism.enable_fsdp_symm_mem = False
    elif config.parallelism.expert_parallel_degree > 1:
        # Real routers deal tokens out in turn, so that real training does what a dry run assumes.
        config.debug.moe_force_load_balance = True
    return config


def one_step(trainer: Any, passes: int) -> None:
    """Forward, backward and optimizer of one step over fake batches of the real shapes.

    Args:
        trainer: torchtitan's trainer.
        passes: micro-batches of a pipeline, or times gradients are accumulated without one.
    """
    trainer.optimizers.zero_grad(set_to_none=True)
    config = trainer.config
    pipelined = trainer.parallel_dims.pp_enabled
    batch = config.parallelism.pipeline_parallel_microbatch_size if pipelined else config.training.local_batch_size
    valid = torch.tensor(1)
    rounds = trainer.gradient_accumulation_steps if pipelined else passes
    for _ in range(rounds):
        inputs, labels = [], []
        for _ in range(passes if pipelined else 1):
            ids = torch.zeros((batch, config.training.seq_len), dtype=torch.int64)
            positions = torch.zeros((batch, config.training.seq_len), dtype=torch.int64)
            inputs.append({"input": ids, "positions": positions})
            labels.append(torch.zeros_like(ids))
        loss = trainer.forward_backward_step(
            input_dict=inputs if pipelined else inputs[0],
            labels=labels if pipelined else labels[0],
            global_valid_tokens=valid,
        )
        del loss, inputs, labels
    trainer.optimizers.step()
    trainer.lr_schedulers.step()


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Build the program and run its steps; the facts are of the last one, when optimizer states exist.

    With ``real`` in the order the same is done on real tensors and a real process group, as the truth to check by.
    """
    real = order["real"]
    if order["gpu_kernels"]:
        patches.keep_what_gpus_keep()
    if not real:
        patches.patch_torchtitan(order)
    schedules = patches.Schedules()
    config = load(order)
    tensors: Any = contextlib.nullcontext() if real else QuickFakeMode(allow_non_fake_inputs=True)
    with tensors, Tracker(real) as tracker:
        patches.mark_accumulated_gradients(tracker)
        trainer = config.build()
        pipelined = trainer.parallel_dims.pp_enabled
        passes = trainer.num_pipeline_parallel_microbatches if pipelined else trainer.gradient_accumulation_steps
        first = passes if real else warm_up(config.parallelism, passes)
        whole = trainer.pp_schedule if pipelined else None
        tracker.phase = "activations"
        if first < passes and pipelined:
            trainer.pp_schedule = schedules.of(first)
        one_step(trainer, first)
        if pipelined:
            trainer.pp_schedule = whole
        parameters = [p for part in trainer.model_parts for p in part.parameters()]
        for parameter in parameters:
            tracker.see(local(parameter), "parameters")
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        tracker.see(local(value), "optimizer")
        trainer.optimizers.zero_grad(set_to_none=True)
        tracker.begin_step()
        one_step(trainer, passes)
        for parameter in parameters:
            if parameter.grad is not None:
                tracker.see(local(parameter.grad), "gradients")
    return facts_of(tracker)


def block(order: dict[str, Any]) -> dict[str, Any]:
    """What one block of the model keeps, eager and compiled."""
    from trial_runner.dry_run.compiled import block_sets

    config = load(order)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[order["precision"]]
    shape = (order["micro_batch"], order["seq_len"], order["hidden"])
    return dict(block_sets(config.model_spec.model.layers[-1], shape, dtype))


def facts_of(tracker: Tracker) -> dict[str, Any]:
    """What the tracked step held, computed and sent, in plain values."""
    assert tracker.step is not None
    peak, kinds = peak_by_kind(tracker.step, tracker.storages)
    kinds["other"] = kinds.pop("setup", 0)
    return {
        "peak_allocated_bytes": peak,
        "by_kind_bytes": kinds,
        "blocks_held": blocks_at_peak(tracker.step, tracker.attention),
        "flop": tracker.step.flop,
        "collectives": [
            {"operation": name, "group": group, "ranks": ranks, "count": count, "bytes": size}
            for (name, group, ranks), (count, size) in sorted(tracker.step.collectives.items())
        ],
    }


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """The facts of one rank, or the framework's own error."""
    os.environ |= {
        "RANK": str(order["rank"]),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(order["world_size"]),
        "NGPU": str(order["world_size"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(order["port"]),
    }
    started = time.perf_counter()
    try:
        facts: dict[str, Any] = {"valid": True, **(block(order) if order.get("block") else run(order))}
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        unknown = isinstance(error, routing.CannotRoute) or type(error).__module__ == "torch._subclasses.fake_tensor"
        facts = {"valid": False, "error": text, "unknown": unknown, "traceback": traceback.format_exc()[-4000:]}
    facts["elapsed_s"] = time.perf_counter() - started
    return facts


def write_answer(order: dict[str, Any], path: str) -> None:
    """Answer an order into a file."""
    text = json.dumps(answer(order))
    with open(path, "w") as file:
        file.write(text)
