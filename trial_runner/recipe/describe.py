"""Child process: imports a torchtitan config function and prints what it says as one JSON line."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from search_space.errors import UserError
from search_space.model import ModelShape
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
        knobs=read_knobs(config),
        warnings=tuple(warnings),
    )


def read_knobs(config: Any) -> dict[str, Any]:
    """The knob values that a torchtitan config sets."""
    parallel, ac = config.parallelism, config.activation_checkpoint
    kind = type(ac).__qualname__.split(".")[0] if ac is not None else "None"
    names = {"SelectiveAC": "selective", "FullAC": "full", "MemoryBudgetAC": "memory_budget", "None": "none"}
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
        "activation_checkpoint": names.get(kind, "selective"),
        "compile": config.compile.enable,
        "async_tp": config.compile.enable_async_tensor_parallel,
        "loss_chunks": getattr(config.loss, "num_chunks", 1),
    }
    if knobs["activation_checkpoint"] == "memory_budget":
        knobs["memory_budget"] = ac.memory_budget
    return knobs


def read_shape(config: Any, warnings: list[str]) -> tuple[ModelShape, int]:
    """The model as numbers, and torchtitan's own parameter count from a meta-device build."""
    spec = config.model_spec
    model = spec.model
    layers = list(model.layers)
    attention = layers[0].attention
    ffn, moe = _feed_forward(layers)
    dense = sum(1 for layer in layers if getattr(layer, "feed_forward", None) is not None)
    heads = _first(attention, "n_heads", "num_heads")
    head_dim = _first(attention, "head_dim") or model.dim // heads
    shape = ModelShape(
        name=f"{spec.name}_{spec.flavor}",
        layers=len(layers),
        hidden=model.dim,
        heads=heads,
        kv_heads=_first(attention, "n_kv_heads", "num_kv_heads") or heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=model.vocab_size,
        gated_mlp=True,
        tied_embeddings=bool(getattr(model, "enable_weight_tying", False)),
        qk_norm=_first(attention, "qk_norm", "q_norm") is not None,
        dense_layers=dense if moe else 0,
        **moe,
    )
    with torch.device("meta"):
        num_params = sum(parameter.numel() for parameter in model.build().parameters())
    if num_params != shape.num_params:
        warnings.append(
            f"the model has {num_params:,} parameters, its shape as read gives {shape.num_params:,}: "
            "the ledger prices the shape"
        )
    return shape, num_params


def _feed_forward(layers: list[Any]) -> tuple[int, dict[str, Any]]:
    """Width of the dense feed-forward, and the expert fields if some layers have experts."""
    dense = next((layer.feed_forward for layer in layers if getattr(layer, "feed_forward", None) is not None), None)
    sparse = next((layer.moe for layer in layers if getattr(layer, "moe", None) is not None), None)
    width = dense.w1.out_features if dense is not None else 0
    if sparse is None:
        return width, {}
    experts = sparse.num_experts
    expert_ffn = int(_search(sparse.routed_experts, "hidden_dim") or 0)
    shared = getattr(sparse, "shared_experts", None)
    fields = {
        "experts": experts,
        "experts_active": int(_search(sparse, "top_k") or 1),
        "expert_ffn": expert_ffn,
        "shared_experts": round(shared.w1.out_features / expert_ffn) if shared is not None and expert_ffn else 0,
    }
    return width or expert_ffn, fields


def _first(config: Any, *names: str) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def _search(config: Any, name: str, depth: int = 3) -> Any:
    """The first field called ``name`` in a nested config, breadth first."""
    found = getattr(config, name, None)
    if found is not None or depth == 0:
        return found
    for child in (getattr(config, field, None) for field in getattr(config, "__dataclass_fields__", {})):
        found = _search(child, name, depth - 1) if child is not None else None
        if found is not None:
            return found
    return None


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
