"""The framework is asked about a candidate once, on GPUs, before anything is placed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from search_space.candidate import Candidate
from search_space.hardware import find_hardware
from search_space.model_torchtitan import preset_shape
from search_space.setting import Setting
from trial_runner.dry_run import DryRun
from tuner.study.oracle import Oracle


SHAPE = preset_shape("llama3:llama3_8b")
assert SHAPE is not None
SETTING = Setting(
    shape=SHAPE,
    hardware=find_hardware("H100-SXM"),
    devices_per_node=8,
    nodes=1,
    seq_len=8192,
    global_batch_seqs=8,
)
CANDIDATE = Candidate(pipeline_parallel=2, data_parallel_shard=4)


def oracle(answer: DryRun, device: str = "gpu", setting: Setting = SETTING) -> tuple[Oracle, list[Any]]:
    asked: list[Any] = []

    def run(candidate: Candidate, base: Any, recipe: Any, ranks: list[int], **options: Any) -> DryRun:
        asked.append((candidate, ranks))
        return answer

    plan: Any = SimpleNamespace(device=device, setting=setting, base=None, recipe=None)
    return Oracle(plan, run=run), asked


def refused(unknown: bool = False) -> DryRun:
    return DryRun(valid=False, error="ValueError: no", ranks=[], elapsed_s=1.0, unknown=unknown)


def test_the_frameworks_error_is_the_reason_and_is_asked_for_once() -> None:
    asking, asked = oracle(refused())
    facts = asking.ask(CANDIDATE)
    assert facts is not None and facts["error"] == "ValueError: no" and facts["pp_rank"] in (0, 1)
    assert asking.refuses(CANDIDATE) and asking.ask(CANDIDATE) is None and len(asked) == 1


def test_what_fake_tensors_cannot_do_refuses_nothing() -> None:
    asking, _ = oracle(refused(unknown=True))
    facts = asking.ask(CANDIDATE)
    assert facts is not None and facts["error"] is None and not asking.refuses(CANDIDATE)


def test_an_answer_of_an_earlier_session_counts() -> None:
    asking, asked = oracle(refused())
    asking.remember({"key": CANDIDATE.key(), "error": "ValueError: then"})
    assert asking.refuses(CANDIDATE) and asking.ask(CANDIDATE) is None and not asked


def test_cpu_slots_and_single_devices_are_not_asked_about() -> None:
    for device, setting in (("cpu", SETTING), ("gpu", replace(SETTING, devices_per_node=1))):
        asking, asked = oracle(refused(), device, setting)
        assert asking.ask(CANDIDATE) is None and not asked and not asking.refuses(CANDIDATE)
