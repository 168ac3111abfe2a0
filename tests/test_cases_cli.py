"""Public reports about command lines, each as a test named after its case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_space.enumerate import enumerate_pool
from search_space.setting import Setting
from tests.tuner import pretend
from tests.tuner.export.sampled import subjects
from trial_runner.failure import failure_class
from trial_runner.failure import named
from trial_runner.gang import rank_environment
from trial_runner.recipe.base import BaseFunction
from trial_runner.recipe.config_file import Recipe
from trial_runner.recipe.config_file import render
from trial_runner.spec import TrialSpec
from tuner.cli import main


JOB = """
[model]
layers = 80
hidden = 8192
heads = 64
kv_heads = 8
ffn = 28672
vocab = 128256
[cluster]
gpu = "H100-SXM"
gpus_per_node = 8
nodes = 1
hbm_gib = 1
[recipe]
seq_len = 8192
global_batch_seqs = 64
"""


def order(folder: Path, **changes: Any) -> TrialSpec:
    return TrialSpec(
        study="s", trial=1, folder=str(folder), config_file="c.py", config_function="f", world_size=2, device="cpu",
        warmup_steps=1, steps=1, **changes,
    )  # fmt: skip


def test_CLI_02_trials_start_from_a_config_function_and_unknown_options_end_the_study() -> None:
    subject = next(s for s in subjects("torchtitan") if s.candidate.pipeline_parallel > 1)
    base = BaseFunction(
        module="llama3", function="llama3_8b", user_path=None, shape=subject.setting.shape, num_params=1, seq_len=8192,
        local_batch=1, global_batch=8,
    )  # fmt: skip
    recipe = Recipe(seq_len=8192, global_batch_seqs=subject.setting.global_batch_seqs, precision="bf16")
    text = render(subject.candidate, base, recipe, function="f", header="h")
    assert "pipeline_parallel_degree" in text and "--parallelism" not in text
    for words in (
        "train.py: error: unrecognized arguments: --parallelism.tensor_parallel_degree=2",
        "Error: No such option: --training.steps",
    ):
        kind = named(words, "builtins", 0).kind
        assert kind == "bad_launch" and failure_class(kind).stops_study and failure_class(kind).retries == 0


def test_CLI_03_a_knob_without_effect_is_no_axis(cpu_setting: Setting) -> None:
    """``reshard_after_forward`` does nothing where nothing is sharded: one candidate, not three."""
    knobs: dict[str, tuple[object, ...]] = {
        "reshard_after_forward": ("default", "always", "never"),
        "tensor_parallel": (2,),
        "pipeline_parallel": (1,),
        "micro_batch": (1,),
        "activation_checkpoint": ("none",),
        "compile": (False,),
    }
    pool = enumerate_pool(cpu_setting, knobs)
    found = [pool.candidate(i) for i in range(len(pool))]
    unsharded = [c for c in found if c.data_parallel_shard == 1 and c.context_parallel == 1]
    assert unsharded and {c.reshard_after_forward for c in unsharded} == {"default"}
    sharded = enumerate_pool(cpu_setting, {**knobs, "tensor_parallel": (1,)})
    shown = [sharded.candidate(i) for i in range(len(sharded))]
    assert {c.reshard_after_forward for c in shown if c.data_parallel_shard == 2} == {"default", "always", "never"}


def test_CLI_04_no_empty_value_overrides_the_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument and variable that a rank gets holds something; a CPU rank's hidden GPUs are meant to be empty."""
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    env = rank_environment(order(tmp_path), 0, 0, 2, 0, ("127.0.0.1", 4242), None)
    ours = {name for name, value in env.items() if not value and name not in __import__("os").environ}
    assert ours <= {"CUDA_VISIBLE_DEVICES"} and env["NCCL_SOCKET_IFNAME"] == "eth7"
    source = (Path(__file__).parents[1] / "trial_runner" / "gang.py").read_text()
    assert '"argv": [sys.executable, "-P"' in source, "a rank's argument vector is a list"


def test_CLI_06_nothing_feasible_is_exit_code_2_with_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    assert main(["plan", str(job), "--json"]) == 2
    captured = capsys.readouterr()
    import json

    found = json.loads(captured.out)
    assert found["feasible"] == 0 and found["rejected"][0]["count"] > 0 and "Traceback" not in captured.err
    plan = pretend.make_plan()
    small = plan.setting.hardware.override(memory_bytes=1 << 20)
    from dataclasses import replace

    plan = replace(plan, setting=replace(plan.setting, hardware=small))
    code, end = pretend.run(monkeypatch, tmp_path / "s", plan, lambda c, n: pretend.Behaviour(), 1e5)
    assert code == 2 and end["near_misses"] and end["trials"] == [] and "no candidate is feasible" in end["reason"]


def test_a_value_that_looks_like_an_option_is_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["start", "--budget", "-1-gpu-hours"]) == 2
    assert "found '-1-gpu-hours', needs an amount with a unit" in capsys.readouterr().err


@pytest.mark.parametrize("budget", [60.0, 150.0])
def test_CLI_07_no_trial_starts_past_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: float) -> None:
    """Whatever the budget, spent never exceeds it, and a trial starts only if its worst case fits."""
    plan = pretend.make_plan()
    code, end = pretend.run(monkeypatch, tmp_path / "s", plan, lambda c, n: pretend.Behaviour(), budget)
    assert end["spent_device_s"] <= budget
    assert code in (0, 3)
    if code == 0:
        assert end["reason"]
