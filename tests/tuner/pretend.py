"""A study with pretended trials: the real loop, budget, journal, Optuna and racing, on a clock that tests turn.

Only Ray and the training are pretended: a trial writes the per-step records that real ranks write, as its clock says.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from dataclasses import dataclass
from dataclasses import replace
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_space.candidate import Candidate
from search_space.enumerate import enumerate_pool
from search_space.hardware import find_hardware
from search_space.hardware import GIB
from search_space.job import Job
from search_space.model import ModelShape
from search_space.setting import Setting
from trial_runner.recipe.base import BaseFunction
from trial_runner.spec import rank_error
from trial_runner.spec import rank_steps
from tuner.cluster.placed_gang import GangEnd
from tuner.cluster.placed_gang import GangShape
from tuner.records.layout import StudyFolder
from tuner.study import canary as canary_module
from tuner.study import loop as loop_module
from tuner.study import run as run_module
from tuner.study import trial as trial_module
from tuner.study.plan import StudyPlan
from tuner.study.run import run_study
from tuner.study.run import RunOptions


RANKS = 2


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self, now: float = 1e9) -> None:
        self.now = now

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What a candidate does when it is tried."""

    step_s: float = 0.5
    startup_s: float = 5.0
    noise: float = 0.01
    error: str | None = None
    """Text of the error that ends it after its first steps, or None."""
    compile_s: float = 0.0
    slow_half: float = 1.0
    """How much slower the second half of its steps is."""
    dirty_node: str | None = None
    """Node on whose devices somebody else's memory sits."""
    loss_shift: float = 0.0
    """How much faster than others its loss falls, a share."""


World = Callable[[Candidate, int], Behaviour]
"""(candidate, trial number) → what it does."""


class PretendedRun(trial_module.TrialRun):
    """A trial that writes its records by the clock."""

    world: World
    clock: Clock

    def place(
        self,
        session: Any,
        shape: GangShape,
        allowance_s: float,
        interrupted: Callable[[], bool],
        first_step_s: float = float("inf"),
    ) -> bool:
        self.does = self.world(self.candidate, self.number)
        self.allowance_s, self._devices = allowance_s, shape.devices
        self._begin, self._end = self.clock.now, None
        self._placed_unix = self.clock.now
        section = self.plan.job.measure
        count = section.warmup_steps + section.steps
        spread = np.random.default_rng(self.number).normal(1, self.does.noise, count)
        self._steps = self.does.step_s * np.maximum(spread, 0.5)
        self._steps[0] += self.does.compile_s
        self._steps[count // 2 :] *= self.does.slow_half
        self._ends = self.does.startup_s + np.cumsum(self._steps)
        self._written = -1
        return True

    @property
    def wall_s(self) -> float:
        return (self._end or self.clock.now) - self._begin if hasattr(self, "_begin") else 0.0

    @property
    def device_s(self) -> float:
        return self._devices * self.wall_s if hasattr(self, "_begin") else 0.0

    def _write(self) -> None:
        section = self.plan.job.measure
        count = len(self._steps)
        due = int(np.searchsorted(self._ends, self.wall_s, side="right"))
        for rank in range(RANKS):
            with rank_steps(self.folder, rank).open("a") as file:
                if self._written < 0:
                    at = self.does.startup_s
                    mode = "scratch" if self.weights is None else "seed_weights"
                    file.write(json.dumps({"event": "prepared", "at_s": at, "start_mode": mode}) + "\n")
                    file.write(json.dumps({"event": "training", "at_s": at, "unix_s": self._begin + at}) + "\n")
                for i in range(max(0, self._written), due):
                    facts = {
                        "step": i + 1,
                        "phase": "warmup" if i < section.warmup_steps else "measured",
                        "step_time_s": float(self._steps[i]),
                        "at_s": float(self._ends[i]),
                        "loss": 8.0 * (1 - 0.01 * i / count) * (1 - self.does.loss_shift * i / count),
                        "gc_s": 0.0,
                        "compiles": int(i == 0 and self.does.compile_s > 0),
                        "allocated_bytes": GIB,
                        "reserved_bytes": GIB,
                        "alloc_retries": 0,
                    }
                    file.write(json.dumps(facts) + "\n")
        self._written = due

    def poll(self) -> GangEnd | None:
        if self.does.dirty_node is not None:
            return GangEnd(
                "dirty_device", text=f"node {self.does.dirty_node}: 30 GiB in use", node_id=self.does.dirty_node
            )
        last = float(self._ends[-1])
        # The agent's deadline holds whether anybody looks or not.
        if min(self.wall_s, last) > self.allowance_s:
            self._end = self._begin + self.allowance_s
            return GangEnd("timeout")
        self._write()
        if self.does.error is not None and self._written >= 1:
            facts = {
                "rank": 1,
                "unix_s": self.clock.now,
                "type": "RuntimeError",
                "module": "x",
                "text": self.does.error,
            }
            rank_error(self.folder, 1).write_text(json.dumps(facts))
            return GangEnd("failed", {0: None, 1: 1})
        return GangEnd("done", {0: 0, 1: 0}) if self._written >= len(self._ends) else None

    def release(self) -> None:
        if hasattr(self, "_begin") and self._end is None:
            self._end = self.clock.now


def make_plan(knobs: dict[str, Any] | None = None, **sections: dict[str, Any]) -> StudyPlan:
    """A plan of two CPU slots; ``sections`` change the job's."""
    shape = ModelShape(name="toy", layers=6, hidden=256, heads=16, kv_heads=16, ffn=768, vocab=2048)
    hardware = find_hardware("cpu").override(peak_flops={"fp32": 2e11}, memory_bytes=8 * GIB)
    setting = Setting(
        shape=shape,
        hardware=hardware,
        devices_per_node=RANKS,
        nodes=1,
        seq_len=128,
        global_batch_seqs=8,
        precision="fp32",
    )
    measure = {"steps": 20, "warmup_steps": 3, "trace": False, "probe": False, **sections.pop("measure", {})}
    base = BaseFunction(
        module="m", function="f", user_path=None, shape=shape, num_params=1, seq_len=128, local_batch=1, global_batch=8
    )
    job = Job.model_validate({"model": {"torchtitan": "m:f"}, "measure": measure, **sections})
    chosen = {"compile": (False,), "micro_batch": (1, 2), "reshard_after_forward": ("default",), **(knobs or {})}
    pool = enumerate_pool(setting, chosen)
    return StudyPlan(job, base, setting, pool, pool.candidate(0), "cpu", 1, "")


def with_pool(plan: StudyPlan, index: list[int]) -> StudyPlan:
    """The plan with only some of its candidates; the first is the baseline."""
    pool = plan.pool.take(np.array(index))
    return replace(plan, pool=pool, baseline=pool.candidate(0))


class _Session:
    dashboard_url = None
    local = True
    resource = "CPU"

    def __init__(self, nodes: int) -> None:
        self._nodes = [
            type("Node", (), {"devices": RANKS, "address": f"n{i}", "node_id": f"id{i}"})() for i in range(nodes)
        ]

    def nodes(self) -> list[Any]:
        return list(self._nodes)

    def on_lost(self, tell: Callable[[], None]) -> None:
        """The head stays."""

    def steady(self) -> bool:
        """The head is there."""
        return True

    def check(self) -> None:
        """The head is there."""

    def quarantine(self, node_id: str) -> Any:
        """Leave the node out."""
        gone = [node for node in self._nodes if node.node_id == node_id]
        self._nodes = [node for node in self._nodes if node.node_id != node_id]
        return gone[0] if gone else None


def run(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    plan: StudyPlan,
    world: World,
    budget_device_s: float,
    nodes: int = 1,
    clock: Clock | None = None,
    listeners: list[Callable[[dict[str, Any]], None]] | None = None,
) -> tuple[int, dict[str, Any]]:
    """One session of a pretended study; called again on the same folder it resumes."""
    clock = clock or Clock()
    kind = type("Run", (PretendedRun,), {"world": staticmethod(world), "clock": clock})
    with monkeypatch.context() as patch:

        @contextlib.contextmanager
        def join(*_: Any) -> Iterator[_Session]:
            yield _Session(nodes)

        patch.setattr(run_module, "join", join)
        patch.setattr(loop_module, "TrialRun", kind)
        for module in (loop_module, trial_module, canary_module):
            patch.setattr(module, "time", clock)
        patch.setattr("tuner.records.journal.time", clock)
        patch.setattr(
            run_module, "commit_claim", lambda *a, **k: {"repo": "r", "branch": "b", "hash": "h", "file": "f"}
        )
        folder = StudyFolder(root)
        folder.root.mkdir(parents=True, exist_ok=True)
        if not folder.facts.exists():
            folder.facts.write_text(json.dumps({"study": folder.name}))
        return run_study(folder, plan, RunOptions(budget_device_s=budget_device_s), listeners or [])
