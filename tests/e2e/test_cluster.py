"""A cluster of two local raylets, and a user's repository with packages of our names."""

from __future__ import annotations

from collections.abc import Iterator
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Background
from tests.e2e.conftest import raylets
from tests.e2e.conftest import tune
from tests.e2e.conftest import write_job


pytestmark = pytest.mark.e2e


@pytest.fixture
def two_nodes() -> Iterator[Any]:
    """Two raylets on this machine."""
    with raylets(2) as cluster:
        yield cluster


def test_two_gangs_at_once_and_a_gang_over_two_nodes(two_nodes: Any, tmp_path: Path) -> None:
    studies = tmp_path / "studies"
    single = write_job(tmp_path, trials=3, slots=1)
    run = Background(
        studies, "start", str(single), "--budget", "0.5-gpu-hours", "--study", "one", "--address", two_nodes.address
    )
    assert run.finish() == 0
    trials = run.events[-1]["trials"]
    assert [trial["state"] for trial in trials] == ["measured"] * 3, trials
    placed = {event["number"]: event["unix_s"] for event in run.events if event["event"] == "trial_placed"}
    ended = {event["number"]: event["unix_s"] for event in run.events if event["event"] == "trial"}
    assert placed[2] < ended[1], "trials 1 and 2 ran one after the other"

    text = single.read_text().replace("gpus_per_node = 1", "gpus_per_node = 1\nnodes = 2")
    single.write_text(text.replace("max_trials = 3", "max_trials = 1").replace("probe = false\n", ""))
    done = tune(
        studies, "start", str(single), "--budget", "0.5-gpu-hours", "--study", "two", "--json",
        "--address", two_nodes.address,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trial = json.loads(done.stdout.splitlines()[-1])["trials"][0]
    assert trial["state"] == "measured", trial
    orders = sorted((studies / "two" / "trials" / "0000").glob("order-node*.json"))
    assert len(orders) == 2, "the gang did not lie on two nodes"
    (probe,) = [event for event in map(json.loads, done.stdout.splitlines()) if event["event"] == "probe"]
    assert len(probe["nodes"]) == 2 and probe["device_s"] > 0
    for node in probe["nodes"]:
        (device,) = node["devices"]
        assert [row["bytes"] for row in device["network"]] == [1 << 12, 1 << 16, 1 << 20, 1 << 24]
        assert device["exchange_gb_s"] > 0 and not device["links"]
    single.write_text(single.read_text().replace("nodes = 2", "nodes = 2\nwait_s = 1"))
    asked = tune(studies, "probe", str(single), "--address", two_nodes.address, "--nodes", "3", "--json")
    assert asked.returncode == 2 and "needs 3 node(s)" in asked.stderr
    assert sorted(path.name for path in studies.iterdir()) == ["one", "two"], "a probe left something behind"


def test_user_repository_with_packages_of_our_names_trains(tmp_path: Path) -> None:
    """Their tuner/ and pruning/ are theirs, and the tuner is started from inside their repository."""
    user = tmp_path / "user"
    for package in ("tuner", "pruning", "dashboards"):
        (user / package).mkdir(parents=True)
        (user / package / "__init__.py").write_text(f"WHOSE = 'the user, {package}'\n")
    (user / "my_models.py").write_text(
        "import pruning, tuner\n"
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel\n"
        "assert tuner.WHOSE == 'the user, tuner' and pruning.WHOSE == 'the user, pruning'\n"
        "def my_model():\n"
        "    config = llama3_debugmodel()\n"
        "    return config\n"
    )
    job = write_job(tmp_path, trials=1)
    job.write_text(job.read_text().replace("llama3:llama3_debugmodel", "my_models:my_model"))
    job.write_text(job.read_text().replace("[cluster]", f'path = "{user}"\n[cluster]'))
    done = tune(
        tmp_path / "studies", "start", str(job), "--budget", "0.2-gpu-hours", "--study", "s", "--json", cwd=user
    )
    assert done.returncode == 0, done.stderr + done.stdout[-2000:]
    end = json.loads(done.stdout.splitlines()[-1])
    assert end["trials"][0]["state"] == "measured", end["trials"]
    log = (tmp_path / "studies" / "s" / "trials" / "0000" / "rank0.log").read_text()
    assert "llama3" in log


@pytest.mark.slow
def test_share_nodes_runs_two_gangs_on_one_node(tmp_path: Path) -> None:
    studies = tmp_path / "studies"
    job = write_job(tmp_path, trials=3, slots=1)
    run = Background(studies, "start", str(job), "--budget", "0.5-gpu-hours", "--study", "s", "--share-nodes")
    assert run.finish() == 0
    placed = {event["number"]: event["unix_s"] for event in run.events if event["event"] == "trial_placed"}
    ended = {event["number"]: event["unix_s"] for event in run.events if event["event"] == "trial"}
    assert placed[2] < ended[1], "trials 1 and 2 ran one after the other"
    trials = run.events[-1]["trials"]
    assert [trial["state"] for trial in trials] == ["measured"] * 3, trials
