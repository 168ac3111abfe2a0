"""Public reports about schedulers, each as a test named after its case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
import os
from pathlib import Path
import resource
import sys
import time
from typing import Any

import numpy as np
import psutil
import pytest

from search_space.enumerate import enumerate_pool
from search_space.errors import JobError
from search_space.errors import UserError
from search_space.hardware import find_hardware
from search_space.job import MeasureSection
from search_space.job_file import parse_job
from search_space.model import ModelShape
from search_space.setting import Setting
from tests.trial_runner.test_gang import share
from tests.trial_runner.test_gang import wait_end
from tests.trial_runner.test_gang import wait_started
from trial_runner.compile_cache import cache_environment
from trial_runner.failure import failure_class
from trial_runner.failure import named
from trial_runner.gang import KILL_GRACE_S
from trial_runner.spec import TrialSpec
from tuner.budget import Meter
from tuner.cluster.placed_gang import GangShape
from tuner.cluster.placed_gang import PlacedGang
from tuner.study.costs import CostModel
from tuner.study.knowledge import Knowledge


class Session:
    """Stands for a joined cluster whose gangs hold plain slots."""

    resource = "tune_slot"
    direct = False

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()

    def free_nodes(self, devices: int) -> list[str]:
        """The one node, once it has the room."""
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [node for node, has in free.items() if has.get(self.resource, 0) >= devices]

    def steady(self) -> bool:
        return True


@pytest.fixture(scope="module")
def two_slots() -> Iterator[Any]:
    """A local Ray with two slots and without a dashboard."""
    import ray

    ray.init(address="local", num_cpus=2, resources={"tune_slot": 2}, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def order(folder: Any) -> TrialSpec:
    return TrialSpec(
        study="s", trial=0, folder=str(folder), config_file="c", config_function="f", world_size=1, device="cpu",
        warmup_steps=1, steps=1,
    )  # fmt: skip


def gang(session: Any, devices: int, folder: Any) -> PlacedGang:
    shape = GangShape(nodes=1, ranks_per_node=devices, held_per_node=devices)
    return PlacedGang(session, shape, order(folder), f"gang of {devices}")


def test_RAY_02_a_hundred_requests_one_after_the_other_complete(two_slots: Any, tmp_path: Any) -> None:
    for _ in range(100):
        one = gang(Session(), 1, tmp_path)
        assert one.wait_placed(20)
        one.release()


def test_RAY_03_a_gang_that_fits_does_not_wait_for_one_that_does_not(two_slots: Any, tmp_path: Any) -> None:
    large = gang(Session(), 3, tmp_path)
    small = gang(Session(), 1, tmp_path)
    asked: list[PlacedGang] = []

    def give_up() -> bool:
        # While the large one waits, the small one is looked at, placed, and ends the wait.
        if small.wait_placed(5):
            asked.append(small)
        return bool(asked)

    assert not large.wait_placed(60, give_up)
    assert asked and small.placed_at is not None
    small.release()
    large.release()


def test_RAY_04_a_gang_larger_than_the_cluster_is_refused_with_numbers() -> None:
    from tuner.study.capacity import Capacity

    class Node:
        def __init__(self, devices: int) -> None:
            self.address, self.devices = "10.0.0.1", devices

    class Cluster:
        def nodes(self) -> list[Node]:
            return [Node(8), Node(8)]

    plan: Any = type("Plan", (), {})()
    plan.setting = Setting(
        shape=ModelShape(layers=8, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=2048),
        hardware=find_hardware("H100-SXM"), devices_per_node=8, nodes=4, seq_len=512, global_batch_seqs=64,
    )  # fmt: skip
    cluster: Any = Cluster()
    with pytest.raises(UserError, match=r"needs 4 node.*Ray has 2"):
        Capacity(plan, cluster, False)


def test_RAY_12_the_second_trial_does_not_start_when_only_one_fits() -> None:
    hour = 3600.0
    meter = Meter(40 * hour, 37.6 * hour)
    meter.reserve("a", 2.4 * hour)
    assert not meter.fits(2.4 * hour)
    meter.settle("a", 2.4 * hour)
    assert meter.spent == pytest.approx(40 * hour)


def test_RAY_13_gpu_hours_are_devices_times_hours_and_do_not_depend_on_parallelism(
    two_slots: Any, tmp_path: Any
) -> None:
    first = gang(Session(), 1, tmp_path)
    second = PlacedGang(Session(), GangShape(nodes=1, ranks_per_node=1, held_per_node=1), order(tmp_path), "second")
    assert first.wait_placed(20) and second.wait_placed(20)
    time.sleep(0.5)
    for one in (first, second):
        one.release()
    held = first.wall_s + second.wall_s
    assert first.device_s + second.device_s == pytest.approx(held) and held > 1.0
    pair = gang(Session(), 2, tmp_path)
    assert pair.wait_placed(20)
    time.sleep(0.3)
    pair.release()
    assert pair.device_s == pytest.approx(2 * pair.wall_s) and pair.device_s > 0.6
    charged = pair.device_s
    time.sleep(0.2)
    assert pair.device_s == charged, "a gang that let go is charged on"


def test_RAY_15_refused_candidates_are_numbers_not_actors() -> None:
    setting = Setting(
        shape=ModelShape(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256),
        hardware=find_hardware("H100-SXM"), devices_per_node=8, nodes=16, seq_len=8192, global_batch_seqs=128,
    )  # fmt: skip
    pool = enumerate_pool(setting)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    knowledge = Knowledge(pool, setting, CostModel("gpu", MeasureSection()))
    refused = int((~knowledge.assessment.feasible).sum())
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert refused > 2000 and grown_mib < 200
    assert isinstance(knowledge.assessment.feasible, np.ndarray)


def test_RAY_16_devices_are_whole() -> None:
    text = '[model]\ntorchtitan = "llama3:llama3_8b"\n[cluster]\ngpu = "H200"\ngpus_per_node = 0.5\n'
    with pytest.raises(JobError, match="gpus_per_node"):
        parse_job(text)


def test_RAY_17_preemption_is_held_against_nobody() -> None:
    text = "ActorDiedError: The actor died because its node has died. Node was preempted (SpotInstance)"
    failure = named(text, "", None)
    assert failure.kind == "preempted"
    kind = failure_class(failure.kind)
    assert kind.teaches == "nothing" and kind.retries == 2


def test_RAY_19_one_rank_that_raises_ends_the_gang_whose_others_wait(tmp_path: Path) -> None:
    """Rank 1 leaves with an error while the others sit in a collective (they sleep ten minutes): the gang is over at
    once and its devices are free within the grace, so the next trial can start."""
    gang = share(tmp_path, "fail", ranks=4)
    began = time.monotonic()
    assert wait_end(gang, 30) == "failed"
    assert gang.stop().ended == "failed"
    assert time.monotonic() - began < 30 + KILL_GRACE_S
    assert gang.state.exit_codes[1] == 3
    zombie = psutil.STATUS_ZOMBIE
    alive = [p.pid for p in psutil.process_iter(["status"]) if p.info["status"] != zombie]
    assert not set(alive) & set(gang.state.pids.values())


def test_RUN_21_the_end_of_a_trial_leaves_the_shared_compile_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All trials are pointed at one cache; a trial's end removes nothing outside its own folder, and nothing there."""
    cache = tmp_path / "cache"
    entry = cache / "inductor" / "fxgraph" / "ab" / "entry"
    entry.parent.mkdir(parents=True)
    entry.write_text("compiled by somebody else")
    monkeypatch.setenv("LEDGERTUNE_COMPILE_CACHE", str(cache))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "trial"
    folder.mkdir()
    gang = share(folder, "grandchild")
    assert cache_environment(os.environ)["TORCHINDUCTOR_CACHE_DIR"] == str(cache / "inductor")
    wait_started(gang)
    gang.stop()
    assert entry.read_text() == "compiled by somebody else"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    assert "TORCHINDUCTOR_CACHE_DIR" not in cache_environment(os.environ), "the user's own setting stays"


def test_a_gang_is_placed_where_rays_placement_groups_are_stuck(
    two_slots: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request to a silent node holds up every later one; free devices are then taken node by node."""
    monkeypatch.setattr("tuner.cluster.placed_gang.STUCK_S", 0.5)
    # The package has a function of the module's name, so the module is found by its full name only.
    groups = sys.modules["ray.util.placement_group"].PlacementGroup
    monkeypatch.setattr(groups, "wait", lambda self, timeout_seconds: False)
    session = Session()
    first, second = gang(session, 1, tmp_path), gang(session, 2, tmp_path)
    assert first.wait_placed(20) and session.direct and len(first.node_ids) == 1
    first.start(60)
    assert not second.wait_placed(2), "one of the two slots is held"
    first.release()
    assert not +session.taken
    third = gang(session, 2, tmp_path)
    assert third.wait_placed(20)
    third.start(60)
    third.release()
    assert not +session.taken
