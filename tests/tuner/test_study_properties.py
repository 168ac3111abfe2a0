"""What holds for every study, whatever its trials do: no duplicate, nothing infeasible, never over budget, no loss."""

from __future__ import annotations

import os
from pathlib import Path
import signal
import tempfile
from typing import Any

from hypothesis import given
from hypothesis import HealthCheck
from hypothesis import Phase
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from search_space.candidate import Candidate
from tests.tuner.pretend import Behaviour
from tests.tuner.pretend import Clock
from tests.tuner.pretend import make_plan
from tests.tuner.pretend import run
from tests.tuner.pretend import with_pool
from tuner.records.journal import Journal
from tuner.records.journal import read_journal
from tuner.records.layout import StudyFolder
from tuner.records.roles import searched
from tuner.records.spending import spending
from tuner.study.asking import Asker
from tuner.study.deciding import EXHAUSTED
from tuner.study.plan import StudyPlan


RELAXED = settings(
    max_examples=8,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ERRORS = (
    "CUDA out of memory. OutOfMemoryError",
    "AssertionError: wrong",
    "Connection closed by peer",
    None,
    None,
    None,
)


@pytest.fixture(scope="module")
def plan() -> StudyPlan:
    return make_plan()


def world_of(seed: int, slow: float) -> Any:
    """Random behaviour by candidate: step times over two decades, errors of every kind, some far slower than priced."""

    def world(candidate: Candidate, number: int) -> Behaviour:
        rng = np.random.default_rng([seed, int(candidate.key(), 16) % 2**31, number])
        factor = slow if rng.random() < 0.3 else 1.0
        return Behaviour(
            step_s=float(rng.uniform(0.05, 1.5)) * factor,
            startup_s=float(rng.uniform(1, 60)) * factor,
            noise=float(rng.uniform(0, 0.1)),
            error=ERRORS[int(rng.integers(len(ERRORS)))] if number else None,
        )

    return world


@RELAXED
@given(
    seed=st.integers(0, 1000),
    budget=st.floats(10, 20000),
    slow=st.sampled_from([1.0, 5.0, 100.0]),
    nodes=st.sampled_from([1, 4]),
    sampler=st.sampled_from(["ours", "ledger", "random", "tpe"]),
)
def test_never_a_duplicate_never_infeasible_never_over_budget(
    monkeypatch: pytest.MonkeyPatch, plan: StudyPlan, seed: int, budget: float, slow: float, nodes: int, sampler: str
) -> None:
    """Costs are drawn adversarially: trials may take a hundred times what the ledger says, on one gang or four."""
    job = plan.job.model_copy(update={"search": plan.job.search.model_copy(update={"sampler": sampler})})
    mine = StudyPlan(job, plan.base, plan.setting, plan.pool, plan.baseline, "cpu", 1, "")
    spent: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        _, end = run(monkeypatch, Path(folder) / "s", mine, world_of(seed, slow), budget, nodes=nodes)
        events = read_journal(StudyFolder(Path(folder) / "s").journal)
        spent.append(spending(StudyFolder(Path(folder) / "s"))["spent_device_s"])
    # records are in whole milliseconds
    assert end["spent_device_s"] <= budget + 0.001 * len(end["trials"]) and spent[0] == pytest.approx(
        end["spent_device_s"], abs=0.1
    )
    feasible = {plan.pool.candidate(i).key() for i in range(len(plan.pool))}
    answered: dict[str, list[str]] = {}
    for trial in end["trials"]:
        key = Candidate.from_json(trial["candidate"]).key()
        assert key in feasible
        if searched(trial):
            answered.setdefault(key, []).append((trial["failure"] or {}).get("class", "measured"))
    for outcomes in answered.values():
        # asked again only after a fault of the machine, and then once (the baseline's own tries are two)
        assert len(outcomes) <= 2
        assert len(outcomes) == 1 or outcomes[0] in ("peer_lost", "timeout"), outcomes
    running: dict[int, str] = {}
    for event in events:
        if event["event"] == "trial_placed":
            key = Candidate.from_json(event["candidate"]).key()
            assert key not in running.values()
            running[event["number"]] = key
            assert len(running) <= nodes
        elif event["event"] == "trial":
            running.pop(event["number"], None)


class Fuse:
    """Kills this process, as kill -9 would, when it has been passed so many times."""

    def __init__(self, passes: int) -> None:
        self.left = passes

    def wrap(self, function: Any) -> Any:
        def passing(*args: Any, **kwargs: Any) -> Any:
            self._pass()
            found = function(*args, **kwargs)
            self._pass()
            return found

        return passing

    def _pass(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


@RELAXED
@given(passes=st.integers(1, 70), seed=st.integers(0, 50), nodes=st.sampled_from([1, 4]))
def test_kill_9_at_any_point_loses_nothing_told_and_asks_again_what_ran(
    monkeypatch: pytest.MonkeyPatch, plan: StudyPlan, passes: int, seed: int, nodes: int
) -> None:
    """The fuse blows before or after any journal line, any ask and any tell; then the study is resumed to its end."""

    def world(candidate: Candidate, number: int) -> Behaviour:
        rng = np.random.default_rng([seed, int(candidate.key(), 16) % 2**31])
        return Behaviour(step_s=float(rng.uniform(0.1, 0.4)), startup_s=5)

    small = with_pool(plan, [0, 3, 5, 8, 11, 14, 17, 20])
    # Only an exhausted pool shows whether what ran is asked again.
    monkeypatch.setattr("tuner.study.deciding.OPTIMISM", 1e9)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "s"
        child = os.fork()
        if child == 0:
            try:
                fuse = Fuse(passes)
                monkeypatch.setattr(Journal, "write", fuse.wrap(Journal.write))
                for method in ("ask", "tell_measured", "tell_failed"):
                    monkeypatch.setattr(Asker, method, fuse.wrap(getattr(Asker, method)))
                run(monkeypatch, root, small, world, 50000, nodes=nodes)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        folder = StudyFolder(root)
        before = read_journal(folder.journal)
        told = {e["number"]: e for e in before if e["event"] == "trial"}
        placed = {e["number"]: e for e in before if e["event"] == "trial_placed"}
        ran = [placed[number]["candidate"] for number in placed.keys() - told.keys()]
        code, end = run(monkeypatch, root, small, world, 50000, nodes=nodes, clock=Clock(2e9))
    assert code == 0
    after = {trial["number"]: trial for trial in end["trials"]}
    for number, trial in told.items():
        assert after[number]["step_time_s"] == trial["step_time_s"]
    asked = [t for t in end["trials"] if searched(t) and t["step_time_s"]]
    keys = [Candidate.from_json(t["candidate"]).key() for t in asked]
    assert len(keys) == len(set(keys))
    assert end["reason"] == EXHAUSTED and len(keys) == end["feasible"] >= 6
    for candidate in ran:
        assert Candidate.from_json(candidate).key() in keys


def test_four_gangs_share_one_storage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: StudyPlan) -> None:
    """Four trials run at once, all different; together they measure each feasible candidate once."""
    most = 0
    running: set[int] = set()

    def watch(event: dict[str, Any]) -> None:
        nonlocal most
        if event["event"] == "trial_placed":
            running.add(event["number"])
        elif event["event"] == "trial":
            running.discard(event["number"])
        most = max(most, len(running))

    def world(candidate: Candidate, number: int) -> Behaviour:
        return Behaviour(step_s=0.2 + 0.01 * (int(candidate.key(), 16) % 7), noise=0.001)

    _, end = run(monkeypatch, tmp_path / "s", plan, world, 1e6, nodes=4, listeners=[watch])
    assert most == 4
    keys = [Candidate.from_json(t["candidate"]).key() for t in end["trials"] if searched(t)]
    assert len(keys) == len(set(keys)) >= 12
