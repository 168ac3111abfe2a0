"""From a job to a plan: the baseline as the user runs it, and requests that trials cannot serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from search_space.errors import UserError
from search_space.job import Job
from search_space.job_file import parse_job
from search_space.model import ModelShape
from trial_runner import devices
from trial_runner.recipe.base import BaseFunction
from tuner.cli.start import embedded_job
from tuner.records.layout import StudyFolder
from tuner.study import plan as plan_module
from tuner.study.opening import reopen
from tuner.study.opening import write_study
from tuner.study.plan import make_plan
from tuner.study.plan import StudyPlan


TEXT = """
[model]
torchtitan = "llama3:llama3_debugmodel"
[cluster]
gpu = "cpu"
gpus_per_node = 2
[recipe]
seq_len = 128
global_batch_seqs = 8
precision = "fp32"
"""


@pytest.fixture
def plan_of(debug_shape: ModelShape, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A planner that reads no module: the function's facts are given."""

    def planner(text: str | Job, *, share_nodes: bool = False, **knobs: Any) -> StudyPlan:
        facts: dict[str, Any] = {
            "tensor_parallel": 1,
            "pipeline_parallel": 1,
            "schedule": "Interleaved1F1B",
            "context_parallel": 1,
            "expert_parallel": 1,
            "data_parallel_replicate": 1,
            "data_parallel_shard": -1,
            "reshard_after_forward": "default",
            "pipeline_microbatch": 1,
            "activation_checkpoint": "selective",
            "compile": False,
            "async_tp": False,
            "loss_chunks": 8,
        }
        base = BaseFunction(
            module="m", function="f", user_path=None, shape=debug_shape, num_params=debug_shape.num_params,
            seq_len=2048, local_batch=8, global_batch=-1, knobs=facts | knobs,
        )  # fmt: skip
        monkeypatch.setattr(plan_module, "describe", lambda target, path: base)
        return make_plan(parse_job(text) if isinstance(text, str) else text, peak_flops=5e10, share_nodes=share_nodes)

    return planner


def test_baseline_is_the_function_as_it_is(plan_of: Any) -> None:
    plan = plan_of(TEXT)
    assert (plan.baseline.data_parallel_shard, plan.baseline.micro_batch) == (2, 4)
    assert plan.baseline.activation_checkpoint == "selective" and plan.baseline.schedule == "1F1B"
    assert plan.baseline in plan.pool.candidates()
    assert plan.workdir == str(Path.cwd())


@pytest.mark.parametrize("chunks", [1, 8, 16])
def test_the_loss_stays_as_the_function_computes_it(plan_of: Any, chunks: int) -> None:
    assert set(plan_of(TEXT, loss_chunks=chunks).pool["loss_chunks"].tolist()) == {chunks}


@pytest.mark.parametrize(("cores", "threads"), [(2, 1), (5, 2), (16, 8)])
def test_a_slot_has_its_part_of_the_cores_unless_gangs_share_the_node(
    plan_of: Any, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    monkeypatch.setattr(devices, "num_cpu_slots", lambda: cores)
    assert plan_of(TEXT).threads == threads
    assert plan_of(TEXT, share_nodes=True).threads == 1


def test_trials_of_other_threads_do_not_compare(plan_of: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "num_cpu_slots", lambda: 16)
    plan = plan_of(TEXT)
    folder = StudyFolder(tmp_path / "s")
    write_study(folder, plan)
    assert reopen(folder).threads == 8
    with pytest.raises(UserError, match=r"threads 8 → 1 .*same --share-nodes"):
        reopen(folder, share_nodes=True)


def test_baseline_keeps_its_own_environment(plan_of: Any) -> None:
    lists = "[env.fast]\nA = '1'\n[env.slow]\nA = '2'\n[baseline]\nenv = 'fast'\n"
    assert plan_of(TEXT + lists).baseline.env == "fast"
    plan = plan_of(TEXT + "[search]\nenv = ['slow', 'fast']\n" + lists)
    assert plan.baseline in plan.pool.candidates()
    assert {candidate.env for candidate in plan.pool.candidates()} == {"slow", "fast"}


@pytest.mark.parametrize(
    "knob", ["fsdp_bucket = [1, 2]", "nosync = [true]", "prefetch = [1]", "ac = ['first_n']\nfirst_n = [2]"]
)
def test_knobs_without_a_config_field_are_searched_too(plan_of: Any, knob: str) -> None:
    plan = plan_of(TEXT + f"[search]\n{knob}\n")
    name = {"nosync": "accumulate_without_sync", "prefetch": "forward_prefetch", "ac": "first_n"}
    column = name.get(knob.split()[0], knob.split()[0])
    assert len({getattr(candidate, column) for candidate in plan.pool.candidates()}) == 2


def test_another_framework_is_planned_not_started(plan_of: Any) -> None:
    with pytest.raises(UserError, match="tune plan"):
        plan_of(TEXT + '[search]\nframework = "megatron"\n')


def test_degrees_that_do_not_multiply_are_said(plan_of: Any) -> None:
    with pytest.raises(UserError, match="multiply to 4 devices, the cluster has 2"):
        plan_of(TEXT + "[baseline]\ntp = 2\ndp = 2\n")


@pytest.mark.parametrize("slots", [1, 2, 3, 8, 64])
def test_embedded_job_fits_every_machine(plan_of: Any, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "num_gpus", lambda: 0)
    monkeypatch.setattr(devices, "num_cpu_slots", lambda: slots)
    assert plan_of(embedded_job()).setting.num_devices == min(2, slots)
