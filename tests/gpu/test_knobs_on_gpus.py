"""Knobs that no CPU can run: real ranks on the GPUs of this machine show that they took effect.

`make test-gpu` runs them; each is skipped where the machine has too few GPUs, or too old ones.
"""

from __future__ import annotations

from dataclasses import replace
import gzip
import math
from pathlib import Path
import time

import pytest
import torch

from search_space.candidate import Candidate
from trial_runner.control import ControlWork
from trial_runner.effective import inactive_features
from trial_runner.gang import free_port
from trial_runner.gang import NodeShare
from trial_runner.measure import measure
from trial_runner.measure import Measurement
from trial_runner.measure import read_records
from trial_runner.recipe.base import describe
from trial_runner.recipe.config_file import Recipe
from trial_runner.recipe.config_file import render
from trial_runner.spec import rank_log
from trial_runner.spec import rank_trace
from trial_runner.spec import TrialSpec


pytestmark = pytest.mark.gpu

RECIPE = Recipe(seq_len=512, global_batch_seqs=16, precision="bf16")
"""A small model's steps: whether a knob is there is asked, not what it buys."""


def needs(gpus: int, capability: tuple[int, int] = (8, 0)) -> None:
    """Skip where there are fewer GPUs, or older ones."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs, found {torch.cuda.device_count()}")
    if torch.cuda.get_device_capability() < capability:
        pytest.skip(f"needs compute capability {capability}, found {torch.cuda.get_device_capability()}")


def train(folder: Path, candidate: Candidate, control: bool = True) -> Measurement:
    """A short trial of the candidate on real ranks, traced."""
    base = describe("llama3:llama3_debugmodel")
    config = folder / "config.py"
    config.write_text(render(candidate, base, RECIPE, function="config", header="a GPU test"))
    ranks = candidate.num_devices
    work = ControlWork.like(base.shape, RECIPE.seq_len, "gpu").to_json() if control else None
    spec = TrialSpec(
        study="gpu", trial=0, folder=str(folder), config_file=str(config), config_function="config",
        world_size=ranks, device="gpu", warmup_steps=8, steps=10, data="synthetic", control=work,
    )  # fmt: skip
    gang = NodeShare(spec, ranks=list(range(ranks)), node=0, master=("127.0.0.1", free_port()), deadline_s=540)
    until = time.monotonic() + 550
    while (ended := gang.poll().ended) is None and time.monotonic() < until:
        time.sleep(0.2)
    gang.stop()
    assert ended == "done", rank_log(folder, 0).read_text()[-3000:]
    found = measure(folder, world_size=ranks, tokens_per_step=512 * 16, ideal_s=1e-3)
    assert found is not None and all(map(math.isfinite, found.loss)) and found.loss[-1] < found.loss[0]
    return found


def names_in_trace(folder: Path, rank: int = 0) -> str:
    with gzip.open(rank_trace(folder, rank), "rt", errors="replace") as file:
        return file.read()


def test_a_plain_trial_measures_memory_that_its_control_did_not_leave(tmp_path: Path) -> None:
    needs(1)
    found = train(tmp_path, Candidate(micro_batch=2))
    facts = read_records(tmp_path, 1).prepared
    assert facts["control_s"] > 0 and facts["control"]
    assert 0 < found.peak_allocated_bytes <= found.peak_reserved_bytes
    plain = tmp_path / "plain"
    plain.mkdir()
    without = train(plain, Candidate(micro_batch=2), control=False)
    assert found.peak_allocated_bytes == pytest.approx(without.peak_allocated_bytes, rel=0.01)
    assert found.peak_reserved_bytes == pytest.approx(without.peak_reserved_bytes, rel=0.05)


def test_float8_products_run(tmp_path: Path) -> None:
    needs(1, (8, 9))
    pytest.importorskip("torchao")
    train(tmp_path, Candidate(micro_batch=2, float8=True, compile=True))
    assert "scaled_mm" in names_in_trace(tmp_path)


def test_async_tensor_parallelism_fuses_products_and_collectives(tmp_path: Path) -> None:
    needs(2, (9, 0))
    candidate = Candidate(tensor_parallel=2, compile=True, async_tp=True, micro_batch=2)
    train(tmp_path, candidate)
    assert inactive_features(candidate, tmp_path) == ()
    plain = tmp_path / "plain"
    plain.mkdir()
    train(plain, replace(candidate, async_tp=False))
    assert inactive_features(candidate, plain) == ("async_tp",)


def test_symmetric_memory_trains_to_the_same_loss(tmp_path: Path) -> None:
    needs(2, (9, 0))
    losses = []
    for name, knob in (("on", True), ("off", False)):
        folder = tmp_path / name
        folder.mkdir()
        losses.append(train(folder, Candidate(data_parallel_shard=2, micro_batch=2, symm_mem=knob)).loss)
    assert losses[0] == pytest.approx(losses[1], rel=0.01)
