"""Seed weights for real: ranks of one layout save them, ranks of others load them, and all begin at the same loss."""

from __future__ import annotations

from pathlib import Path
import time

import pytest

from search_space.candidate import Candidate
from tests.trial_runner.test_knobs_real import base as base  # the fixture
from trial_runner.gang import free_port
from trial_runner.gang import NodeShare
from trial_runner.measure import read_records
from trial_runner.rank.seed_weights import exist
from trial_runner.recipe.base import BaseFunction
from trial_runner.recipe.config_file import Recipe
from trial_runner.recipe.config_file import render
from trial_runner.spec import rank_log
from trial_runner.spec import TrialSpec
from tuner.evidence.parity import compare_curves


pytestmark = pytest.mark.e2e

STEPS = 6


def curve(folder: Path, base: BaseFunction, candidate: Candidate, weights: Path | None) -> list[float]:
    """Loss of each step of a real trial."""
    folder.mkdir()
    recipe = Recipe(seq_len=64, global_batch_seqs=4, precision="fp32")
    (folder / "c.py").write_text(render(candidate, base, recipe, function="c", header="test"))
    spec = TrialSpec(
        study="s",
        trial=0,
        folder=str(folder),
        config_file=str(folder / "c.py"),
        config_function="c",
        world_size=2,
        device="cpu",
        warmup_steps=2,
        steps=STEPS - 2,
        trace=False,
        data="synthetic",
        weights=str(weights) if weights else None,
    )
    gang = NodeShare(spec, ranks=[0, 1], node=0, master=("127.0.0.1", free_port()), deadline_s=300)
    while gang.poll().ended is None:
        time.sleep(0.2)
    state = gang.stop()
    assert state.ended == "done", rank_log(folder, 0).read_text()[-3000:]
    records = read_records(folder, 2)
    assert records.prepared["start_mode"] == ("seed_weights" if weights else "scratch")
    known = [[s["loss"] for s in steps if s["loss"] is not None] for steps in records.steps.values()]
    return next(losses for losses in known if losses)


def test_other_layouts_begin_at_the_loss_of_the_first(tmp_path: Path, base: BaseFunction) -> None:
    weights = tmp_path / "weights"
    first = curve(tmp_path / "fsdp", base, Candidate(data_parallel_shard=2), weights)
    assert exist(weights) and len(first) == STEPS
    tensor = curve(tmp_path / "tp", base, Candidate(tensor_parallel=2, micro_batch=2), weights)
    pipeline = curve(tmp_path / "pp", base, Candidate(pipeline_parallel=2), weights)
    for other in (tensor, pipeline):
        found = compare_curves(other, [first], "fp32")
        assert found.verdict == "agree", found.why
    scratch = curve(tmp_path / "scratch", base, Candidate(tensor_parallel=2, micro_batch=2), None)
    assert compare_curves(scratch, [first], "fp32").verdict == "differ", "without them the layouts begin elsewhere"
