"""Traces of real trials, made by the trial runner: what was done to the trial is what the breakdown names."""

from __future__ import annotations

from pathlib import Path
import time

import pytest

from trial_runner.breakdown import break_down
from trial_runner.breakdown import Breakdown
from trial_runner.gang import free_port
from trial_runner.gang import NodeShare
from trial_runner.spec import rank_log
from trial_runner.spec import rank_trace
from trial_runner.spec import TrialSpec


pytestmark = pytest.mark.e2e

CONFIG = """
from dataclasses import dataclass
import os
import time

import torch
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer
from trial_runner.rank.tokens import TokenSource
from trial_runner.rank.tokens import use_synthetic_tokens


def trial():
    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training.seq_len = 128
    config.training.local_batch_size = 4
    config.training.mixed_precision_param = "float32"
    config.parallelism.data_parallel_shard_degree = 2
    config.activation_checkpoint = None
    return config


class SlowSource(TokenSource):
    @dataclass(kw_only=True, slots=True)
    class Config(TokenSource.Config):
        pass

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.5)
            yield batch


def slow():
    original = Trainer.forward_backward_step

    def slowed(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        end = time.monotonic() + 0.7
        matrix = torch.ones(300, 300)
        while os.environ["RANK"] == "1" and time.monotonic() < end:
            matrix @ matrix
        return result

    Trainer.forward_backward_step = slowed
    config = use_synthetic_tokens(trial(), 42)
    source = config.dataloader
    config.dataloader = SlowSource.Config(vocab_size=source.vocab_size, seed=source.seed)
    return config
"""


def run_trial(folder: Path) -> Breakdown:
    config = folder / "config.py"
    config.write_text(CONFIG)
    spec = TrialSpec(
        study="breakdown",
        trial=0,
        folder=str(folder),
        config_file=str(config),
        config_function="slow",
        world_size=2,
        device="cpu",
        warmup_steps=1,
        steps=1,
    )
    gang = NodeShare(spec, ranks=[0, 1], node=0, master=("127.0.0.1", free_port()), deadline_s=240)
    while gang.poll().ended is None:
        time.sleep(0.1)
    assert gang.poll().ended == "done", rank_log(folder, 0).read_text()[-3000:]
    return break_down([rank_trace(folder, rank) for rank in range(2)])


def test_a_slowed_rank_and_a_slow_loader_are_named(tmp_path: Path) -> None:
    """Rank 1 computes 0.7 s more in each step, and both ranks wait 0.5 s for each batch."""
    result = run_trial(tmp_path)
    assert len(result.steps) == 2
    for step in result.steps:
        total = step.useful_s + sum(step.parts_s.values()) + step.unexplained_s
        assert total == pytest.approx(step.step_s, abs=1e-6)
        assert step.parts_s["data_wait"] == pytest.approx(0.5, rel=0.15)
        assert step.parts_s["exposed_communication"] > 0
        assert {row.dimension for row in step.collectives} == {"FSDP"}
    waiting = result.steps[0]
    order = sorted(waiting.parts_s, key=lambda part: waiting.parts_s[part])
    assert order[:-3:-1] == ["straggler", "data_wait"]
    assert waiting.parts_s["straggler"] > 0.5
    assert result.stragglers[0].rank == 1
