"""Shapes from a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from search_space.errors import UserError
from search_space.model import ModelShape


def shape_from_huggingface(path: str | Path) -> ModelShape:
    """The shape that a Hugging Face ``config.json`` describes.

    Knows llama, mistral, qwen2, qwen3, qwen3_moe, mixtral, deepseek_v2, deepseek_v3, gpt_oss and gpt2 style keys.

    Raises:
        UserError: the file cannot be read, or a needed key is absent.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"model: cannot read {path} ({error}); give the path of a Hugging Face config.json") from None
    return shape_from_config(config.get("text_config", config), name=file.parent.name or "model")


def shape_from_config(config: dict[str, Any], name: str = "model") -> ModelShape:
    """The shape that the keys of a Hugging Face config describe.

    Raises:
        UserError: a needed key is absent.
    """
    kind = config.get("model_type", "")
    if kind == "gpt2":
        hidden = _need(config, "n_embd")
        return ModelShape(
            name=name,
            layers=_need(config, "n_layer"),
            hidden=hidden,
            heads=_need(config, "n_head"),
            kv_heads=_need(config, "n_head"),
            ffn=config.get("n_inner") or 4 * hidden,
            vocab=_need(config, "vocab_size"),
            gated_mlp=False,
            tied_embeddings=config.get("tie_word_embeddings", True),
            attention_bias=True,
            output_bias=True,
            mlp_bias=True,
            norm_bias=True,
            position_embeddings=config.get("n_positions", 1024),
        )
    heads, layers = _need(config, "num_attention_heads"), _need(config, "num_hidden_layers")
    bias = bool(config.get("attention_bias", kind == "qwen2"))
    values: dict[str, Any] = {
        "name": name,
        "layers": layers,
        "hidden": _need(config, "hidden_size"),
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or 0,
        "ffn": config.get("intermediate_size") or config.get("moe_intermediate_size") or 0,
        "vocab": _need(config, "vocab_size"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "qk_norm": kind in ("qwen3", "qwen3_moe"),
        "attention_bias": bias,
        "output_bias": bias and kind != "qwen2",
        "mlp_bias": bool(config.get("mlp_bias", False)) or kind == "gpt_oss",
    }
    experts = config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts") or 0
    if experts:
        width = config.get("moe_intermediate_size") or values["ffn"]
        values |= {
            "experts": experts,
            "experts_active": config.get("num_experts_per_tok") or _need(config, "experts_per_token"),
            "expert_ffn": width,
            "shared_experts": config.get("n_shared_experts") or 0,
            "dense_layers": config.get("first_k_dense_replace") or len(config.get("mlp_only_layers") or ()),
            "router_bias": kind == "gpt_oss",
            "attention_sinks": kind == "gpt_oss",
        }
    if config.get("kv_lora_rank"):
        keys = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        values |= {key: _need(config, key) for key in keys}
        values |= {"q_lora_rank": config.get("q_lora_rank") or 0, "kv_heads": heads}
        values["head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
    if kind == "gpt_oss" and config.get("sliding_window"):
        kinds = config.get("layer_types") or ["sliding_attention", "full_attention"] * (layers // 2)
        values |= {
            "sliding_window": config["sliding_window"],
            "window_layers": sum(k == "sliding_attention" for k in kinds),
        }
    return ModelShape(**values)


def _need(config: dict[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise UserError(f"model: the Hugging Face config has no {key!r}; give the shape as numbers in [model]")
    return config[key]
