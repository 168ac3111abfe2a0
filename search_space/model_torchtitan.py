"""Shapes from torchtitan: read off a model config object, or from the presets that are shipped.

The reader only looks at attributes, so it imports nothing of torchtitan; whoever holds a config object (a child
process that imported the user's module) passes it in.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
import json
from typing import Any

from search_space.errors import UserError
from search_space.model import ModelShape


def shape_from_torchtitan(config: Any, name: str = "model") -> ModelShape:
    """The shape of a torchtitan decoder config (``model_spec.model``).

    Understands grouped-query and latent attention, fused or separate query/key/value products, gated feed-forward
    layers, and mixtures of experts with leading dense layers (torchtitan 0.3.0 ``models/common``).

    Args:
        config: a ``Decoder.Config``.
        name: name for reports.

    Raises:
        UserError: the config is of a kind that has no transformer blocks of these sorts.
    """
    try:
        layers = list(config.layers)
        moe = [layer for layer in layers if getattr(layer, "moe", None) is not None]
        dense = [layer for layer in layers if getattr(layer, "moe", None) is None]
        attention = layers[0].attention
        values: dict[str, Any] = {
            "name": name,
            "layers": len(layers),
            "hidden": config.dim,
            "vocab": config.vocab_size,
            "tied_embeddings": bool(getattr(config, "enable_weight_tying", False)),
            "ffn": dense[0].feed_forward.w1.out_features if dense else 0,
            "heads": attention.n_heads,
        }
        values |= _attention(attention)
        windows = [getattr(layer.attention, "sliding_window_size", None) for layer in layers]
        if any(windows):
            values |= {"sliding_window": max(w or 0 for w in windows), "window_layers": sum(bool(w) for w in windows)}
        if moe:
            values |= _experts(moe[0].moe) | {"dense_layers": len(dense)}
            values["ffn"] = values["ffn"] or values["expert_ffn"]
    except (AttributeError, IndexError, TypeError) as error:
        raise UserError(
            f"model {name}: its torchtitan config has no transformer blocks that are known here ({error}); "
            "give the shape as numbers in [model]"
        ) from None
    return ModelShape(**values)


def _attention(attention: Any) -> dict[str, Any]:
    if getattr(attention, "kv_lora_rank", 0):
        return {
            "kv_heads": attention.n_heads,
            "head_dim": attention.qk_nope_head_dim + attention.qk_rope_head_dim,
            "q_lora_rank": attention.q_lora_rank,
            "kv_lora_rank": attention.kv_lora_rank,
            "qk_nope_head_dim": attention.qk_nope_head_dim,
            "qk_rope_head_dim": attention.qk_rope_head_dim,
            "v_head_dim": attention.v_head_dim,
        }
    product = getattr(attention.qkv_linear, "wqkv", None) or attention.qkv_linear.wq
    return {
        "kv_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.qkv_linear.head_dim,
        "qk_norm": getattr(attention, "qk_norm", None) is not None,
        "attention_bias": bool(product.bias),
        "output_bias": bool(attention.wo.bias),
        "attention_sinks": "sinks" in (getattr(attention, "param_init", None) or {}),
    }


def _experts(moe: Any) -> dict[str, Any]:
    experts = moe.routed_experts.inner_experts
    shared = getattr(moe, "shared_experts", None)
    return {
        "experts": moe.num_experts,
        "experts_active": moe.router.top_k,
        "expert_ffn": experts.hidden_dim,
        "shared_experts": shared.w1.out_features // experts.hidden_dim if shared else 0,
        "router_bias": bool(moe.router.gate.bias),
        "mlp_bias": any("bias" in key for key in (experts.param_init or {})),
    }


@cache
def presets() -> dict[str, dict[str, Any]]:
    """The shipped facts by ``module:config_function``: shape, sequence length, local and global batch."""
    text = resources.files("search_space").joinpath("presets/torchtitan.json").read_text(encoding="utf-8")
    loaded: dict[str, dict[str, Any]] = json.loads(text)["functions"]
    return loaded


def preset_shape(function: str) -> ModelShape | None:
    """The shipped shape of a torchtitan config function such as ``llama3:llama3_70b``; None when unknown."""
    entry = presets().get(function)
    return ModelShape.from_json(entry["shape"]) if entry else None
