"""Writes search_space/presets/torchtitan.json from the installed torchtitan; run by hand after an upgrade."""

from __future__ import annotations

from functools import partial
import importlib
import inspect
import json
from pathlib import Path
from typing import Any

from search_space.errors import UserError
from search_space.model_torchtitan import shape_from_torchtitan


MODULES = ("llama3", "qwen3", "deepseek_v3", "gpt_oss")


def flavours() -> list[tuple[str, str, Any]]:
    """Every registered flavour as (module, flavour, model config)."""
    found = []
    for module in MODULES:
        package = importlib.import_module(f"torchtitan.models.{module}")
        tables = [v for k, v in vars(package).items() if k.endswith("_configs") and isinstance(v, dict)]
        found += [(module, flavour, package.model_registry(flavour).model) for flavour in tables[0]]
    return found


def functions() -> dict[str, dict[str, Any]]:
    """Facts of every config function that builds on this machine."""
    facts: dict[str, dict[str, Any]] = {}
    for module in MODULES:
        registry: Any = importlib.import_module(f"torchtitan.models.{module}.config_registry")
        original = registry.model_registry
        # Quantisation converters leave shapes alone but need packages and devices that may be absent.
        registry.model_registry = partial(_without_converters, original)
        for name, function in vars(registry).items():
            if not inspect.isfunction(function) or function.__module__ != registry.__name__ or name[0] == "_":
                continue
            try:
                config = function()
                shape = shape_from_torchtitan(config.model_spec.model, name)
            except (UserError, ImportError, ValueError, TypeError, AssertionError, AttributeError):
                continue
            facts[f"{module}:{name}"] = {
                "shape": shape.to_json(),
                "flavour": config.model_spec.flavor,
                "seq_len": config.training.seq_len,
                "local_batch_size": config.training.local_batch_size,
                "global_batch_size": config.training.global_batch_size,
            }
        registry.model_registry = original
    return facts


def _without_converters(original: Any, *args: Any, converters: Any = None, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


if __name__ == "__main__":
    import torchtitan

    version = importlib.import_module("importlib.metadata").version("torchtitan")
    assert torchtitan
    target = Path(__file__).parents[2] / "search_space" / "presets" / "torchtitan.json"
    target.write_text(json.dumps({"torchtitan": version, "functions": functions()}, indent=1) + "\n", encoding="utf-8")
    print(target)
