"""The shared compile cache for real: the second trial of a graph compiles nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_space.candidate import Candidate
from tests.e2e.test_seed_weights import curve
from tests.trial_runner.test_knobs_real import base as base  # the fixture
from trial_runner.compile_cache import cache_use
from trial_runner.measure import read_records
from trial_runner.recipe.base import BaseFunction


pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_second_trial_of_the_same_graph_compiles_from_the_cache(
    tmp_path: Path, base: BaseFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEDGERTUNE_COMPILE_CACHE", str(tmp_path / "cache"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    candidate = Candidate(data_parallel_shard=2, compile=True)
    curve(tmp_path / "first", base, candidate, None)
    curve(tmp_path / "second", base, candidate, None)
    first, second = (cache_use(read_records(tmp_path / name, 2).steps) for name in ("first", "second"))
    assert first["misses"] > 0
    assert second["misses"] == 0 and second["hits"] >= first["misses"] // 2
