"""Child process: imports a torchtitan config function and prints what it says as one JSON line."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from search_space.errors import UserError
from search_space.model import ModelShape
from search_space.model_torchtitan import shape_from_torchtitan
from trial_runner.rank import cpu
from trial_runner.rank import loading
from trial_runner.recipe.base import BaseFunction
from trial_runner.recipe.base import MARK


def read(target: str, user_path: str | None) -> BaseFunction:
    """Import ``module:function`` and read the facts.

    Raises:
        UserError: no such module or function, or its result is no torchtitan config with a model.
    """
    module_name, _, function = target.partition(":")
    loading.add_user_path(user_path)
    module_path = loading.find_module(module_name)
    module = sys.modules[module_path]
    call = getattr(module, function, None)
    if not callable(call):
        names = sorted(
            name for name in dir(module) if name[0].islower() and callable(getattr(module, name)) and "_" in name
        )
        raise UserError(f"{module_path} has no config function {function!r}; it has {', '.join(names[:40])}")
    config = call()
    if getattr(config, "model_spec", None) is None:
        raise UserError(f"{function}() returned no torchtitan trainer config with a model_spec")
    warnings: list[str] = []
    shape, num_params = read_shape(config, warnings)
    return BaseFunction(
        module=module_path,
        function=function,
        user_path=user_path,
        shape=shape,
        num_params=num_params,
        seq_len=config.training.seq_len,
        local_batch=config.training.local_batch_size,
        global_batch=config.training.global_batch_size,
        knobs=read_knobs(config, warnings),
        warnings=tuple(warnings),
    )


def read_knobs(config: Any, warnings: list[str]) -> dict[str, Any]:
    """The knob values that a torchtitan config sets; what is none of the knobs' values is warned about."""
    parallel, ac = config.parallelism, config.activation_checkpoint
    kind = type(ac).__qualname__.split(".")[0] if ac is not None else "None"
    names = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget", "None": "none"}
    if kind not in names:
        warnings.append(f"activation checkpointing by {kind} is none of the known kinds; it is priced as selective")
    knobs: dict[str, Any] = {
        "tensor_parallel": parallel.tensor_parallel_degree,
        "pipeline_parallel": parallel.pipeline_parallel_degree,
        "schedule": parallel.pipeline_parallel_schedule,
        "context_parallel": parallel.context_parallel_degree,
        "expert_parallel": parallel.expert_parallel_degree,
        "data_parallel_replicate": parallel.data_parallel_replicate_degree,
        "data_parallel_shard": parallel.data_parallel_shard_degree,
        "reshard_after_forward": parallel.fsdp_reshard_after_forward,
        "pipeline_microbatch": parallel.pipeline_parallel_microbatch_size,
        "mixed_precision": config.training.mixed_precision_param,
        "listed_stages": len(parallel.module_fqns_per_model_part or []),
        "activation_checkpoint": names.get(kind, "selective"),
        "compile": config.compile.enable,
        "async_tp": config.compile.enable_async_tensor_parallel,
        "symm_mem": parallel.enable_fsdp_symm_mem,
        "loss_chunks": getattr(config.loss, "num_chunks", 1),
        "float8": any("Float8" in type(part).__qualname__ for part in _parts(config.model_spec.model)),
    }
    if knobs["activation_checkpoint"] == "memory_budget":
        knobs["memory_budget"] = ac.memory_budget
    return knobs


def _parts(model: Any) -> list[Any]:
    """Configs of the model's linear layers."""
    from torchtitan.models.common.linear import Linear

    return [part for _, part, _, _ in model.traverse(Linear.Config)]


def read_shape(config: Any, warnings: list[str]) -> tuple[ModelShape, int]:
    """The model as numbers, and torchtitan's own parameter count from a meta-device build."""
    spec = config.model_spec
    shape = shape_from_torchtitan(spec.model, f"{spec.name}_{spec.flavor}")
    with torch.device("meta"):
        num_params = sum(parameter.numel() for parameter in spec.model.build().parameters())
    if num_params != shape.num_params:
        warnings.append(
            f"the model has {num_params:,} parameters, its shape as read gives {shape.num_params:,}: "
            "the ledger prices the shape"
        )
    return shape, num_params


def main() -> int:
    """Print the facts, or the error a user can act on."""
    target, user_path = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
    if not torch.cuda.is_available():
        cpu.install()
    try:
        facts = read(target, user_path).to_json()
    except UserError as error:
        facts = {"error": str(error)}
    print(MARK + json.dumps(facts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
