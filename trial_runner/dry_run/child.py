"""Child process of a dry run: one rank of the real program, two steps, facts as one JSON line."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import functools
import json
import os
import sys
import time
import traceback
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from trial_runner.dry_run import kernels
from trial_runner.dry_run.track import peak_by_kind
from trial_runner.dry_run.track import Tracker
from trial_runner.rank import cpu
from trial_runner.rank import loading


MARK = "ledgertune-dry-run:"
"""Starts the line that carries the facts."""


def outside_fake(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run on real tensors: device meshes compute ranks, not model tensors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def prepare(order: dict[str, Any]) -> None:
    """Patch what fake tensors cannot go through; before torchtitan is imported."""
    cpu.install()
    if order["gpu_kernels"]:
        kernels.substitute()
    if order["real"]:
        return
    for name in ("trunc_normal_", "normal_", "uniform_"):
        setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)


def patch_torchtitan(order: dict[str, Any]) -> None:
    """Mesh construction on real tensors, and pipeline stages with static shapes."""
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed import pipeline_parallel

    dims = parallel_dims.ParallelDims
    for name in ("build_mesh", "get_optional_mesh", "get_mesh"):
        setattr(dims, name, outside_fake(getattr(dims, name)))
    mesh = torch.distributed.device_mesh.DeviceMesh
    mesh._compute_coordinate_on_dim = outside_fake(mesh._compute_coordinate_on_dim)
    original = pipeline_parallel.PipelineStage

    def stage(module: Any, index: int, count: int, device: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = torch.empty((order["micro_batch"], order["seq_len"]), dtype=torch.int64, device="meta")
        width = (order["micro_batch"], order["seq_len"] // order["tensor_parallel"], order["hidden"])
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[order["precision"]]
        hidden = torch.empty(width, dtype=dtype, device="meta")
        last = index == count - 1
        kwargs |= {
            "input_args": tokens if index == 0 else hidden.clone().requires_grad_(),
            "output_args": hidden.clone().requires_grad_(),
            "input_grads": None if index == 0 else hidden,
            "output_grads": None if last else hidden,
        }
        return original(module, index, count, torch.device("cpu"), *args, **kwargs)

    pipeline_parallel.PipelineStage = stage


def _keep_attention_in_selective_checkpointing() -> None:
    """SelectiveAC saves the output of CUDA's attention kernels; the CPU kernel of the same name is not on its list."""
    from torchtitan.distributed import activation_checkpoint

    original = activation_checkpoint._get_default_save_ops

    def save_ops() -> set[Any]:
        return original() | {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default}

    activation_checkpoint._get_default_save_ops = save_ops


def mark_accumulated_gradients(tracker: Tracker) -> None:
    """Count FSDP's unsharded accumulated gradients (kept between micro-batches) as gradients."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    original = FSDPParam.to_accumulated_grad_if_needed

    def to_accumulated_grad_if_needed(parameter: Any) -> None:
        original(parameter)
        kept = parameter.unsharded_accumulated_grad
        if kept is not None:
            tracker.see(_local(kept), "gradients")

    FSDPParam.to_accumulated_grad_if_needed = to_accumulated_grad_if_needed


def load(order: dict[str, Any]) -> Any:
    """The candidate's config, set for a dry run."""
    from trial_runner.rank import tokens

    loading.add_user_path(order["user_path"])
    config = loading.load_function(order["config_file"], order["config_function"])()
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
    return config


def one_step(trainer: Any) -> None:
    """Forward, backward and optimizer of one step over fake batches of the real shapes."""
    trainer.optimizers.zero_grad(set_to_none=True)
    config = trainer.config
    pipelined = trainer.parallel_dims.pp_enabled
    batch = config.parallelism.pipeline_parallel_microbatch_size if pipelined else config.training.local_batch_size
    count = trainer.num_pipeline_parallel_microbatches
    valid = torch.tensor(1)
    for _ in range(trainer.gradient_accumulation_steps):
        inputs, labels = [], []
        for _ in range(count):
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
    prepare(order)
    if order["gpu_kernels"]:
        _keep_attention_in_selective_checkpointing()
    if not order["real"]:
        patch_torchtitan(order)
    config = load(order)
    tensors: Any = contextlib.nullcontext() if order["real"] else FakeTensorMode(allow_non_fake_inputs=True)
    with tensors, Tracker() as tracker:
        mark_accumulated_gradients(tracker)
        trainer = config.build()
        tracker.phase = "activations"
        one_step(trainer)
        parameters = [p for part in trainer.model_parts for p in part.parameters()]
        for parameter in parameters:
            tracker.see(_local(parameter), "parameters")
        for optimizer in trainer.optimizers:
            for state in optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor):
                        tracker.see(_local(value), "optimizer")
        trainer.optimizers.zero_grad(set_to_none=True)
        tracker.begin_step()
        one_step(trainer)
        for parameter in parameters:
            if parameter.grad is not None:
                tracker.see(_local(parameter.grad), "gradients")
    assert tracker.step is not None
    peak, kinds = peak_by_kind(tracker.step, tracker.storages)
    kinds["other"] = kinds.pop("setup", 0)
    return {
        "peak_allocated_bytes": peak,
        "by_kind_bytes": kinds,
        "flop": tracker.step.flop,
        "collectives": [
            {"operation": name, "ranks": ranks, "count": count, "bytes": size}
            for (name, ranks), (count, size) in sorted(tracker.step.collectives.items())
        ],
    }


def _local(tensor: Any) -> torch.Tensor:
    """The local shard of a distributed tensor; a plain tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def main() -> int:
    """Print the facts, or the framework's own error."""
    order = json.loads(sys.argv[1])
    os.environ |= {
        "RANK": str(order["rank"]),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(order["world_size"]),
        "NGPU": str(order["world_size"]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(order["port"]),
    }
    started = time.perf_counter()
    facts: dict[str, Any]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            facts = {"valid": True, **run(order)}
    except Exception as error:
        facts = {
            "valid": False,
            "error": f"{type(error).__name__}: {error}",
            "traceback": traceback.format_exc()[-4000:],
        }
    facts["elapsed_s"] = time.perf_counter() - started
    print(MARK + json.dumps(facts), flush=True)
    return 0


if __name__ == "__main__":
    main()
    os._exit(0)
