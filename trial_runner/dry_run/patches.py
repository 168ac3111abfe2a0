"""What must change in torchtitan and PyTorch before a program can run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from trial_runner.dry_run import kernels
from trial_runner.dry_run import routing
from trial_runner.dry_run.track import local
from trial_runner.dry_run.track import Tracker
from trial_runner.rank import cpu


def outside_fake(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run on real tensors: device meshes compute ranks, not model tensors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def prepare(real: bool) -> None:
    """Patch what fake tensors cannot go through; before torchtitan is imported, once per process.

    Args:
        real: whether tensors are real; then only the CPU takes the accelerator's place.
    """
    cpu.install()
    if real:
        return
    # Truncated normals look at values, which fake tensors do not have.
    for name in ("trunc_normal_", "normal_", "uniform_"):
        setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)


def keep_what_gpus_keep() -> None:
    """Keep for backward what CUDA kernels keep, and under SelectiveAC what its list of operators keeps there."""
    kernels.substitute()
    _keep_attention_in_selective_checkpointing()


def patch_torchtitan(order: dict[str, Any]) -> None:
    """Mesh construction on real tensors, pipeline stages with static shapes, balanced routing of tokens to experts."""
    from torch.distributed.pipelining import schedules
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed import pipeline_parallel

    routing.balance()
    dims = parallel_dims.ParallelDims
    for name in ("build_mesh", "get_optional_mesh", "get_mesh"):
        setattr(dims, name, outside_fake(getattr(dims, name)))
    mesh = torch.distributed.device_mesh.DeviceMesh
    mesh._compute_coordinate_on_dim = outside_fake(mesh._compute_coordinate_on_dim)
    mesh._concatenate = staticmethod(outside_fake(mesh._concatenate))
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
    schedules._batch_p2p = holding(schedules._batch_p2p)


class Sent:
    """Holds what was sent until somebody waits for it, as works of NCCL and gloo do."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors

    def wait(self) -> bool:
        """Let go."""
        self.tensors = []
        return True


def holding(batch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """The function that starts a batch of sends and receives, whose works keep what they send."""

    @functools.wraps(batch)
    def start(operations: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        works = batch(operations, *args, **kwargs)
        sent = [operation.tensor for operation in operations if operation.op is torch.distributed.isend]
        return [*works, Sent(sent)] if sent else works

    return start


class Schedules:
    """The program's pipeline schedule, and the same one for other numbers of micro-batches."""

    def __init__(self) -> None:
        from torchtitan.distributed import pipeline_parallel

        self._keywords: dict[str, Any] | None = None
        self._build = pipeline_parallel._build_pipeline_schedule

        def build(**keywords: Any) -> Any:
            self._keywords = keywords
            return self._build(**keywords)

        pipeline_parallel._build_pipeline_schedule = build

    def of(self, micro_batches: int) -> Any:
        """A schedule over the same stages."""
        assert self._keywords is not None
        size = self._keywords["parallelism"].pipeline_parallel_microbatch_size
        return self._build(**{**self._keywords, "local_batch_size": micro_batches * size})


def _keep_attention_in_selective_checkpointing() -> None:
    """SelectiveAC saves the output of CUDA's attention kernels; those that stand for them are not on its list."""
    from torchtitan.distributed import activation_checkpoint

    original = activation_checkpoint._get_default_save_ops

    def save_ops() -> set[Any]:
        cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return original() | {cpu, torch.ops.dry_run.fused_attention.default}

    activation_checkpoint._get_default_save_ops = save_ops


def mark_accumulated_gradients(tracker: Tracker) -> None:
    """Count FSDP's unsharded accumulated gradients (kept between micro-batches) as gradients."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    original = FSDPParam.to_accumulated_grad_if_needed

    def to_accumulated_grad_if_needed(parameter: Any) -> None:
        original(parameter)
        kept = parameter.unsharded_accumulated_grad
        if kept is not None:
            tracker.see(local(kept), "gradients")

    FSDPParam.to_accumulated_grad_if_needed = to_accumulated_grad_if_needed
