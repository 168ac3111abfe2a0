"""Measured facts from per-step records."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from trial_runner.measure import measure
from trial_runner.measure import median_interval
from trial_runner.measure import read_records
from trial_runner.spec import rank_steps


def write_rank(folder: Path, rank: int, times: list[float], warmup: int = 2, loss: bool = True) -> None:
    lines = [{"event": "imported", "at_s": 3.0}, {"event": "built", "at_s": 4.0}, {"event": "training", "at_s": 4.5}]
    for i, seconds in enumerate(times, start=1):
        lines.append(
            {
                "step": i,
                "phase": "warmup" if i <= warmup else "measured",
                "step_time_s": seconds,
                "at_s": 5.0 + i,
                "loss": 8.0 - 0.1 * i if loss else None,
                "tokens": 100,
                "gc_s": 0.0,
                "compiles": 0,
                "allocated_bytes": 1000 * (rank + 1),
                "reserved_bytes": 2000 * (rank + 1),
                "alloc_retries": 0,
            }
        )
    rank_steps(folder, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_slowest_rank_decides_each_step(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [9, 9, 1.0, 2.0, 1.0], loss=False)
    write_rank(tmp_path, 1, [9, 9, 1.5, 1.0, 3.0])
    found = measure(tmp_path, world_size=2, tokens_per_step=300, ideal_s=0.5, recompute_flop_share=0.25)
    assert found is not None
    assert found.step_time_s == 2.0  # of 1.5, 2.0, 3.0
    assert found.tokens_per_s_per_device == 75
    assert found.mfu_pct == 25 and found.hfu_pct == pytest.approx(31.25)
    assert found.peak_reserved_bytes == 4000
    assert len(found.loss) == 5
    assert found.startup_s["first_step"] == 6.0


def test_missing_rank_or_steps_is_no_measurement(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [1, 1, 1])
    assert measure(tmp_path, world_size=2, tokens_per_step=1, ideal_s=1) is None
    write_rank(tmp_path, 1, [1, 1, 1])
    assert measure(tmp_path, world_size=2, tokens_per_step=1, ideal_s=1, min_steps=2) is None
    assert measure(tmp_path, world_size=2, tokens_per_step=1, ideal_s=1, min_steps=1) is not None


def test_torn_last_line_is_dropped(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [1, 1, 1, 1])
    path = rank_steps(tmp_path, 0)
    path.write_text(path.read_text() + '{"step": 5, "pha')
    assert len(read_records(tmp_path, 1).steps[0]) == 4


def test_recompile_in_the_window_is_flagged(tmp_path: Path) -> None:
    write_rank(tmp_path, 0, [1, 1, 1, 1])
    path = rank_steps(tmp_path, 0)
    path.write_text(path.read_text().replace('"compiles": 0', '"compiles": 1'))
    found = measure(tmp_path, world_size=1, tokens_per_step=1, ideal_s=1)
    assert found is not None and found.flags == ("recompile",)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=60))
@settings(max_examples=50, deadline=None)
def test_interval_holds_the_median_inside_the_data(times: list[float]) -> None:
    array = np.array(times)
    low, high = median_interval(array)
    assert array.min() <= low <= high <= array.max()


def test_interval_covers_the_true_median_of_noisy_steps() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(100):
        low, high = median_interval(rng.lognormal(0, 0.1, 100))
        covered += low <= 1.0 <= high
    assert covered >= 88
