"""Reading a user's config function in a child process."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_space.errors import UserError
from search_space.model import ModelShape
from trial_runner.recipe import base
from trial_runner.recipe.base import describe


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_debug_model_is_read_and_cached(debug_shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> None:
    found = describe("llama3:llama3_debugmodel")
    assert found.shape == debug_shape and found.num_params == debug_shape.num_params
    assert (found.seq_len, found.local_batch, found.global_batch) == (2048, 8, -1)
    assert found.knobs["activation_checkpoint"] == "selective" and found.knobs["data_parallel_shard"] == -1
    assert not found.warnings

    def no_child(*args: object, **kwargs: object) -> None:
        raise AssertionError("the cache was not used")

    monkeypatch.setattr(base.subprocess, "run", no_child)
    assert describe("llama3:llama3_debugmodel") == found


def test_users_own_module_and_its_errors(tmp_path: Path) -> None:
    user = tmp_path / "user"
    user.mkdir()
    module = user / "mine.py"
    module.write_text("raise RuntimeError('their own trouble')\n")
    with pytest.raises(UserError, match="their own trouble"):
        describe("mine:f", str(user))
    module.write_text("def good_name():\n    return 3\n")
    with pytest.raises(UserError, match="good_name"):
        describe("mine:f", str(user))
    with pytest.raises(UserError, match="no torchtitan trainer config"):
        describe("mine:good_name", str(user))
    with pytest.raises(UserError, match="not a folder"):
        describe("mine:f", str(tmp_path / "nowhere"))
