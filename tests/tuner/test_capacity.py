"""Devices that never come: a clear message, and no budget spent."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
from pathlib import Path
import time
from typing import Any

import pytest

from search_space.errors import UserError
from search_space.job import ClusterSection
from tests.tuner.pretend import make_plan
from tuner.cluster.session import ClusterSession
from tuner.cluster.session import Needs
from tuner.cluster.session import RayNode
from tuner.records.layout import StudyFolder
from tuner.records.summary import summarise
from tuner.study import run as run_module
from tuner.study.opening import write_study
from tuner.study.run import needs
from tuner.study.run import run_study
from tuner.study.run import RunOptions


class Cluster(ClusterSession):
    """A cluster whose nodes join by and by."""

    def __init__(self, *joins_at_s: float, devices: int = 8) -> None:
        super().__init__("GPU", None, False)
        self._began, self._joins, self._devices = time.monotonic(), joins_at_s, devices

    def nodes(self) -> list[RayNode]:
        past = time.monotonic() - self._began
        joined = [number for number, at in enumerate(self._joins) if at <= past]
        return [RayNode(node_id=str(n), address=f"10.0.0.{n}", devices=self._devices) for n in joined]


def test_nodes_that_join_in_time_are_waited_for() -> None:
    Cluster(0, 0.3).await_nodes(Needs(nodes=2, devices=8, wait_s=10))


@pytest.mark.parametrize(
    ("cluster", "found"),
    [(Cluster(), "0 (found: none)"), (Cluster(0), "1 (found: 10.0.0.0: 8)"), (Cluster(0, 0, devices=4), "0 (found: ")],
)
def test_nodes_that_do_not_come_are_named(cluster: Cluster, found: str) -> None:
    with pytest.raises(UserError) as error:
        cluster.await_nodes(Needs(nodes=2, devices=8, wait_s=0.1))
    assert "needs 2 node(s) with 8 devices (GPU) each" in str(error.value)
    assert found in str(error.value)
    assert "Nothing was spent" in str(error.value)


def test_a_study_whose_nodes_never_come_spends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(cluster={"gpu": "cpu", "gpus_per_node": 2, "nodes": 1, "wait_s": 0.1})
    folder = StudyFolder(tmp_path / "study")
    write_study(folder, plan)

    @contextlib.contextmanager
    def join(device: str, slots: int, address: str, at: Path, wanted: Needs) -> Iterator[Any]:
        assert wanted == needs(plan) == Needs(nodes=1, devices=2, wait_s=0.1)
        cluster = Cluster()
        cluster.await_nodes(wanted)
        yield cluster

    monkeypatch.setattr(run_module, "join", join)
    with pytest.raises(UserError, match="Nothing was spent"):
        run_study(folder, plan, RunOptions(budget_device_s=1000, address="auto"), [])
    assert summarise(folder).spent_device_s == 0
    assert not list(folder.root.glob("trials/*"))


def test_the_wait_is_a_key_of_the_job() -> None:
    assert ClusterSection().wait_s == 120
    with pytest.raises(ValueError):
        ClusterSection(wait_s=-1)
