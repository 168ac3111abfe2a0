"""Fixtures that every test may use; nothing here starts a process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from search_space.hardware import find_hardware
from search_space.hardware import GIB
from search_space.model import ModelShape
from search_space.setting import Setting


os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies go to the test's own folder."""
    monkeypatch.setenv("LEDGERTUNE_STUDIES", str(tmp_path / "studies"))


@pytest.fixture
def debug_shape() -> ModelShape:
    """torchtitan's llama3 debug model."""
    return ModelShape(name="llama3_debugmodel", layers=6, hidden=256, heads=16, kv_heads=16, ffn=768, vocab=2048)


@pytest.fixture
def cpu_setting(debug_shape: ModelShape) -> Setting:
    """Two CPU slots and a small recipe."""
    hardware = find_hardware("cpu").override(peak_flops={"fp32": 5e10}, memory_bytes=8 * GIB)
    return Setting(
        shape=debug_shape,
        hardware=hardware,
        devices_per_node=2,
        nodes=1,
        seq_len=128,
        global_batch_seqs=8,
        precision="fp32",
    )
