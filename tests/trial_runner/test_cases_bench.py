"""Cases of benchmarking: what falsifies a short measurement elsewhere, and what is done about it here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_space.candidate import Candidate
from tests.tuner.pretend import Behaviour
from tests.tuner.pretend import make_plan
from tests.tuner.pretend import PretendedRun
from tests.tuner.pretend import run
from tests.tuner.pretend import with_pool
from trial_runner.measure import measure
from trial_runner.measure import Measurement
from trial_runner.measure import StepWatch
from trial_runner.measure import warmed_up_at
from trial_runner.rank.__main__ import prepare
from trial_runner.spec import node_clocks
from trial_runner.spec import rank_steps
from trial_runner.spec import TrialSpec
from tuner.study.moves import hopeless_part


def write(folder: Path, times: list[float], rank: int = 0, warmup: int = 0, collecting: dict[int, float] | None = None,
          compiling: tuple[int, ...] = ()) -> None:  # fmt: skip
    """A rank's records of steps with these times; ``collecting`` says which of them collected garbage, and how long."""
    lines: list[dict[str, Any]] = [
        {"event": "prepared", "at_s": 1.0, "unix_s": 5.0, "gc_freq": 50, "start_mode": "scratch"}
    ]
    for i, seconds in enumerate(times):
        lines.append(
            {
                "step": i + 1,
                "phase": "warmup" if i < warmup else "measured",
                "step_time_s": seconds,
                "at_s": 2.0 + sum(times[: i + 1]),
                "loss": 8.0,
                "gc_s": (collecting or {}).get(i, 0.0),
                "compiles": int(i in compiling),
                "allocated_bytes": 1,
                "reserved_bytes": 1,
            }
        )
    rank_steps(folder, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))


def measured(folder: Path, world: int = 1) -> Measurement:
    found = measure(folder, world_size=world, tokens_per_step=1000, ideal_s=0.4)
    assert found is not None
    return found


def test_BEN_01_garbage_collection_is_pinned_recorded_and_marked(tmp_path: Path) -> None:
    """One rank collects in every 50th step: the median does not move, and the share of it is shown."""
    slow = {i: 0.35 for i in range(49, 100, 50)}
    write(tmp_path, [1.0] * 100, rank=0)
    write(tmp_path, [1.35 if i in slow else 1.0 for i in range(100)], rank=1, collecting=slow)
    found = measured(tmp_path, 2)
    assert found.step_time_s == 1.0 and "gc" in found.flags
    assert found.gc_pct == pytest.approx(100 * 0.7 / 100.7)
    assert found.step_time_p95_s == pytest.approx(1.0)


def test_BEN_02_one_pause_in_the_window_moves_nothing(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    times = list(0.5 * rng.lognormal(0, 0.005, 20))
    write(tmp_path, times)
    without = measured(tmp_path)
    for place in (0, 7, 19):
        paused = list(times)
        paused[place] += 1.4
        write(tmp_path, paused, collecting={place: 1.4})
        assert measured(tmp_path).mfu_pct == pytest.approx(without.mfu_pct, rel=0.01)


def test_BEN_03_warm_up_ends_where_the_steps_settle(tmp_path: Path) -> None:
    """1,772 tokens a second in the first step, 168,877 from the second: nothing of it is in the steady state."""
    tokens = 8192
    steady = [tokens / 168_877] * 99
    write(tmp_path, [tokens / 1_772, *steady])
    found = measured(tmp_path)
    assert found.steps == 99 and "late_warmup" in found.flags
    assert found.step_time_s == pytest.approx(np.mean(steady[18:]), rel=0.01)
    rng = np.random.default_rng(1)
    slope = [3.0, 2.2, 1.6, 1.2, *rng.lognormal(0, 0.02, 60)]
    assert warmed_up_at(np.array(slope)) == 4
    assert warmed_up_at(rng.lognormal(0, 0.02, 60)) == 0
    assert warmed_up_at(np.array([1.0, 2.0])) == 0


def test_BEN_03_a_running_trial_is_judged_on_settled_steps_only(tmp_path: Path) -> None:
    write(tmp_path, [9.0, 9.0, 5.0, 1.0, 1.0, 4.0, 1.1, 1.1, 1.1], warmup=2, compiling=(5,))
    watch = StepWatch(tmp_path, 1)
    assert watch.times() == pytest.approx([1.1] * 3)
    with rank_steps(tmp_path, 0).open("a") as file:
        file.write('{"step": 10, "phase": "measured", "step_time_s": 1.2}\n{"step": 11, "pha')
    assert watch.times() == pytest.approx([1.1, 1.1, 1.1, 1.2])
    assert not len(StepWatch(tmp_path, 2).times())


def test_BEN_06_a_throttled_window_is_flagged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    original = PretendedRun.release

    def release(self: Any) -> None:
        reason = ["software thermal slowdown"] if self.number == 1 else []
        sample = {"unix_s": 1.0, "device": 0, "clock_mhz": 1580, "peak_clock_mhz": 1965, "throttle": reason}
        node_clocks(self.folder, 0).write_text(json.dumps(sample) + "\n")
        original(self)

    monkeypatch.setattr(PretendedRun, "release", release)
    plan = with_pool(make_plan(budget={"confirm_share": 0.0}), [0, 1])
    _, end = run(monkeypatch, tmp_path / "s", plan, lambda c, n: Behaviour(step_s=0.3), 5000)
    assert [trial["flags"] for trial in end["trials"]] == [[], ["throttled"]]


def test_BEN_06_the_winner_must_beat_a_rival_in_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first on a cold node looks 13% faster than it is; repeats beside its rival decide."""
    plan = with_pool(make_plan(budget={"confirm_share": 0.4}), [0, 1, 3])
    monkeypatch.setattr("tuner.study.deciding.OPTIMISM", 1e9)
    cold: list[str] = []

    def world(candidate: Candidate, number: int) -> Behaviour:
        if number == 0:
            return Behaviour(step_s=0.60, noise=0.05)
        if number < 3:
            cold.append(candidate.key())
            return Behaviour(step_s=0.300 if number == 1 else 0.302, noise=0.05)
        heated = candidate.key() == cold[0]
        return Behaviour(step_s=0.36 if heated else 0.60 if candidate == plan.baseline else 0.300, noise=0.05)

    _, end = run(monkeypatch, tmp_path / "s", plan, world, 50000)
    confirmed = [Candidate.from_json(t["candidate"]).key() for t in end["trials"] if t["role"] == "confirm"]
    assert set(confirmed) == {*cold, plan.baseline.key()}
    winner = next(trial for trial in end["trials"] if trial["number"] == end["winner"])
    assert Candidate.from_json(winner["candidate"]).key() == cold[1]


def test_BEN_08_a_step_that_waits_for_data_says_so_first() -> None:
    parts = {"data_wait": 0.7, "bubble": 0.1, "kernel_efficiency": 0.1}
    said = hopeless_part({"breakdown": {"step_s": 1.0, "parts_s": parts}})
    assert said is not None and "70%" in said and "no layout helps" in said and "synthetic" in said


class _Config:
    """A config whose every section takes every attribute."""

    def __getattr__(self, name: str) -> Any:
        found = _Config()
        object.__setattr__(self, name, found)
        return found


def test_BEN_09_every_trial_starts_from_scratch_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = TrialSpec(
        study="s", trial=0, folder=str(tmp_path), config_file="f", config_function="g", world_size=1, device="cpu",
        warmup_steps=2, steps=5, trace=False, seed=0, data="config",
    )  # fmt: skip
    config = _Config()
    config.checkpoint.enable = True
    prepare(config, spec)
    assert config.checkpoint.enable is False and config.training.steps == 7
    plan = with_pool(make_plan(budget={"confirm_share": 0.0}), [0, 1])
    original = PretendedRun.place

    def place(self: Any, *args: Any) -> bool:
        for rank in (0, 1):
            line = {"event": "prepared", "at_s": 1.0, "unix_s": 1e9, "gc_freq": 50, "start_mode": "scratch"}
            rank_steps(self.folder, rank).write_text(json.dumps(line) + "\n")
        return original(self, *args)

    monkeypatch.setattr(PretendedRun, "place", place)
    _, end = run(monkeypatch, tmp_path / "s", plan, lambda c, n: Behaviour(step_s=0.3), 5000)
    assert {(trial["start_mode"], trial["gc_freq"]) for trial in end["trials"]} == {("scratch", 50)}
