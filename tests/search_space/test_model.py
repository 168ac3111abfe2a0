from __future__ import annotations

import json
from pathlib import Path

import pytest

from search_space.errors import UserError
from search_space.model import ModelShape
from search_space.model_huggingface import shape_from_config
from search_space.model_huggingface import shape_from_huggingface
from search_space.model_torchtitan import preset_shape
from search_space.model_torchtitan import presets
from search_space.model_torchtitan import shape_from_torchtitan
from tests.search_space.write_presets import flavours
from tests.search_space.write_presets import functions


def test_every_registered_flavour_counts_as_torchtitan_counts() -> None:
    torch = pytest.importorskip("torch")
    checked = 0
    for module, flavour, config in flavours():
        with torch.device("meta"):
            own = sum(parameter.numel() for parameter in config.build().parameters())
        assert shape_from_torchtitan(config, flavour).num_params == own, f"{module} {flavour}"
        checked += 1
    assert checked >= 20


def test_presets_are_what_the_installed_torchtitan_says() -> None:
    assert functions() == presets()
    shape = preset_shape("llama3:llama3_70b")
    assert shape is not None and shape.num_params == 70553706496
    assert preset_shape("mine:model") is None


def test_shapes_from_hugging_face_keys(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape_from_huggingface(tmp_path).num_params == 8030261248
    qwen = config | {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    }
    assert shape_from_config(qwen).num_params == 30532122624
    gpt2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    assert shape_from_config(gpt2).num_params == 124439808
    with pytest.raises(UserError, match="hidden_size"):
        shape_from_config({"num_attention_heads": 1, "num_hidden_layers": 1})
    with pytest.raises(UserError, match="cannot read"):
        shape_from_huggingface(tmp_path / "absent.json")


def test_tied_embeddings_and_plain_feed_forward_are_counted_once() -> None:
    shape = ModelShape(layers=2, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=100, gated_mlp=False)
    tied = ModelShape(
        layers=2, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=100, gated_mlp=False, tied_embeddings=True
    )
    assert shape.num_params - tied.num_params == 100 * 64
    assert shape.mlp_params(256) == 2 * 64 * 256


def test_latent_attention_and_windows() -> None:
    deepseek = preset_shape("deepseek_v3:deepseek_v3_671b")
    assert deepseek is not None and deepseek.is_latent
    assert deepseek.num_params == 671026404352
    assert 36e9 < deepseek.num_active_params < 39e9
    gpt_oss = preset_shape("gpt_oss:gpt_oss_20b")
    assert gpt_oss is not None and gpt_oss.context(4096) == (12 * 128 + 12 * 4096) / 24
