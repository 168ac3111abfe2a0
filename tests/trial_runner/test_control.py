"""The control: the same work on every rank, bounded in size, and no reason for a trial to fail."""

from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
import pytest

from search_space.model import ModelShape
from trial_runner.control import ControlWork
from trial_runner.control import PARAMETERS
from trial_runner.control import STEP_FLOP
from trial_runner.measure import measure
from trial_runner.measure import read_records
from trial_runner.spec import rank_steps


SMALL = ControlWork(blocks=2, tokens=32, hidden=64, ffn=128, windows=3)

RANK = """
import datetime, json, pathlib, sys
from trial_runner.control import ControlWork
from trial_runner.rank import control
control.WAIT = datetime.timedelta(seconds=float(sys.argv[3]))
found = control.run_control(ControlWork(**json.loads(sys.argv[1])), "cpu", pathlib.Path(sys.argv[2]))
import torch.distributed as dist
print(json.dumps(found | {"default_group": dist.is_initialized()}))
"""


def start(folder: Path, local: int, size: int, wait_s: float = 60) -> subprocess.Popen[str]:
    env = os.environ | {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0"}
    command = [sys.executable, "-c", RANK, json.dumps(SMALL.to_json()), str(folder), str(wait_s)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def answer(child: subprocess.Popen[str]) -> dict[str, Any]:
    out, _ = child.communicate(timeout=120)
    found: dict[str, Any] = json.loads(out)
    return found


def test_the_ranks_of_a_node_do_the_same_rounds_together(tmp_path: Path) -> None:
    found = [answer(child) for child in [start(tmp_path, local, 2) for local in range(2)]]
    assert {one["control"] for one in found} == {SMALL.name}
    assert len(found[0]["windows_s"]) == len(found[1]["windows_s"]) == 3
    # The ranks wait for each other in every round.
    assert found[0]["control_s"] == pytest.approx(found[1]["control_s"], rel=0.5)
    assert not any(one["default_group"] for one in found)
    assert list(tmp_path.iterdir()) == []


def test_one_rank_needs_nobody(tmp_path: Path) -> None:
    assert answer(start(tmp_path, 0, 1))["control_s"] > 0


def test_a_rank_whose_neighbour_never_comes_says_so_and_goes_on(tmp_path: Path) -> None:
    found = answer(start(tmp_path, 0, 2, wait_s=1))
    assert "control_s" not in found and found["control_failed"]


@given(
    st.integers(1, 512).map(lambda n: 64 * n),
    st.integers(64, 200_000),
    st.integers(16, 1 << 20),
    st.sampled_from(["cpu", "gpu"]),
)
def test_a_round_is_short_whatever_the_model(hidden: int, ffn: int, seq_len: int, device: str) -> None:
    model = ModelShape(layers=2, hidden=hidden, heads=hidden // 64, kv_heads=1, ffn=ffn, vocab=1000)
    work = ControlWork.like(model, seq_len, device)
    block = 4 * work.hidden**2 + 3 * work.hidden * work.ffn
    # Sixteen tokens go through one block of the greatest width, however long that takes.
    assert work.tokens == 16 or 6 * work.tokens * work.blocks * block <= STEP_FLOP[device]
    assert 1 <= work.blocks <= model.layers and (work.blocks == 1 or work.blocks * block <= PARAMETERS[device])
    assert work.hidden <= hidden and work.ffn <= ffn and work.tokens <= max(16, seq_len)


def test_the_slowest_rank_counts(tmp_path: Path) -> None:
    for rank, seconds in enumerate([0.05, 0.07]):
        lines = [
            {"event": "control", "at_s": 3.0, "control": "w", "control_s": seconds, "windows_s": [0.05]},
            {"event": "prepared", "at_s": 4.0, "gc_freq": 50, "start_mode": "scratch"},
        ]
        rank_steps(tmp_path, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_records(tmp_path, 2).prepared
    assert found == {"gc_freq": 50, "start_mode": "scratch", "control": "w", "control_s": 0.07}


def test_a_failed_control_leaves_no_figure(tmp_path: Path) -> None:
    failed = {"event": "control", "at_s": 3.0, "control_failed": "RuntimeError: no"}
    worked = {"event": "control", "at_s": 3.0, "control": "w", "control_s": 0.05, "windows_s": [0.05]}
    step = {"step": 3, "phase": "measured", "step_time_s": 1.0, "at_s": 5.0, "loss": 8.0, "gc_s": 0.0, "compiles": 0}
    for rank, control in enumerate([failed, worked]):
        rank_steps(tmp_path, rank).write_text("".join(json.dumps(line) + "\n" for line in (control, step)))
    assert read_records(tmp_path, 2).prepared == {"control_failed": "RuntimeError: no"}
    found = measure(tmp_path, world_size=2, tokens_per_step=8, ideal_s=0.1)
    assert found is not None and "control_failed" in found.flags
