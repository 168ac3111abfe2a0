"""Public reports about jobs on Kubernetes, each as a test named after its case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
import json
from pathlib import Path
from typing import Any

import pytest

from search_space.job_file import parse_job
from tests.tuner.k8s.rules import pods
from tests.tuner.k8s.rules import wrong_by_policy
from tests.tuner.k8s.test_render import IMAGE
from tests.tuner.k8s.test_render import job_of
from tests.tuner.k8s.test_render import rendered
from tests.tuner.k8s.test_render import text
from tests.tuner.pretend import make_plan
from trial_runner.transport import degraded
from tuner.cli import again
from tuner.cli import doctor
from tuner.cli import main
from tuner.cli import start
from tuner.k8s.kustomize import build
from tuner.k8s.kustomize import FOLDER
from tuner.k8s.render import render
from tuner.k8s.render import RenderOptions
from tuner.k8s.state import EXITS
from tuner.k8s.state import look
from tuner.records.journal import Journal
from tuner.records.layout import StudyFolder
from tuner.study.opening import write_study


def rayjob(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "one"}, "spec": {}, "status": {"rayClusterName": "one-abc", **status}}


def pod(role: str, phase: str = "Pending", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": f"one-{role}", "labels": {"ray.io/node-type": role}},
        "status": {"phase": phase, **status},
    }


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, list[Any]]]:
    """A job file whose study, named one, spent 10 of its 40 device-hours; and the sessions that were run on."""
    monkeypatch.setenv("LEDGERTUNE_STUDIES", str(tmp_path))
    job_file = tmp_path / "job.toml"
    job_file.write_text(text())
    folder = StudyFolder(tmp_path / "one")
    plan = replace(make_plan(), job=parse_job(text(), name="job.toml"))
    write_study(folder, plan)
    with_journal(
        folder, [("session", {"study": "one", "budget_device_s": 144_000.0}), ("probe", {"device_s": 36_000.0})]
    )
    ran: list[Any] = []

    def session(folder: Any, make: Any, job: Any, budget_s: float, args: Any) -> int:
        ran.append((folder.name, make, budget_s, again.summarise(folder).spent_device_s))
        return 0

    monkeypatch.setattr(again, "run_session", session)
    monkeypatch.setattr("tuner.cli.running.run_session", session)
    yield job_file, ran


def with_journal(folder: StudyFolder, events: list[tuple[str, dict[str, Any]]]) -> None:
    journal = Journal(folder.journal)
    for event, facts in events:
        journal.write(event, **facts)
    journal.close()


def again_as_rendered(job_file: Path) -> list[str]:
    """The arguments of the rendered entrypoint, with this machine's job file."""
    [_, body] = rendered(text(), study="one")
    command = body["spec"]["entrypoint"].split()
    assert command[0] == "tune"
    return [str(job_file) if part == "/etc/ledgertune/job.toml" else part for part in command[1:]]


def test_K8S_01_a_second_start_goes_on_with_what_is_left(begun: tuple[Path, list[Any]]) -> None:
    job_file, ran = begun
    assert main(again_as_rendered(job_file)) == 0
    [(name, make, budget_s, spent)] = ran
    assert (name, budget_s, spent) == ("one", 40 * 3600, 10 * 3600)
    assert "reopen" in make.__code__.co_names
    [_, body] = rendered(text(), study="one")
    assert body["spec"]["backoffLimit"] == body["spec"]["submitterConfig"]["backoffLimit"] == 0
    assert body["spec"]["submitterPodTemplate"]["spec"]["restartPolicy"] == "Never"


def test_K8S_01_a_study_with_its_winner_spends_nothing_more(begun: tuple[Path, list[Any]], capsys: Any) -> None:
    job_file, ran = begun
    folder = StudyFolder(job_file.parent / "one")
    events = [("winner", {"number": 3}), ("study_end", {"state": "done", "reason": "nothing left to gain"})]
    with_journal(folder, events)
    assert main(again_as_rendered(job_file)) == 0
    assert ran == []
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["event"], last["winner"], last["spent_device_s"]) == ("study_end", 3, 36_000.0)
    # A larger budget asks for more.
    assert main([*again_as_rendered(job_file), "--budget", "50-gpu-hours"]) == 0
    assert [budget for _, _, budget, _ in ran] == [50 * 3600]


def test_K8S_01_another_job_never_spends_from_the_study(begun: tuple[Path, list[Any]], capsys: Any) -> None:
    job_file, ran = begun
    job_file.write_text(text(nodes=2))
    assert main(again_as_rendered(job_file)) == 2
    assert "began with another job (cluster differ)" in capsys.readouterr().err
    assert ran == []


def test_K8S_01_start_or_resume_needs_a_name(begun: tuple[Path, list[Any]], capsys: Any) -> None:
    assert main(["start", str(begun[0]), "--or-resume"]) == 2
    assert "--or-resume needs --study" in capsys.readouterr().err
    assert main(["start", str(begun[0]), "--study", "one"]) == 2
    assert start.__doc__ and "already exists" in capsys.readouterr().err


def test_K8S_02_no_cluster_is_made_for_a_retry() -> None:
    for manifest in [*build(FOLDER / "base"), *rendered(text())]:
        if manifest["kind"] == "RayJob":
            assert manifest["spec"]["backoffLimit"] == 0
    found = look(rayjob(jobDeploymentStatus="Failed", reason="AppFailed", message="failed with exit code 2"), [], [])
    assert found.state == "failed" and EXITS[2] in found.text
    assert set(EXITS) == {1, 2, 3, 130}


def test_K8S_03_a_head_that_restarts_is_named_and_ends_by_the_deadline() -> None:
    crashed = {"name": "ray-head", "restartCount": 4, "lastState": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    found = look(rayjob(jobDeploymentStatus="Initializing"), [pod("head", "Running", containerStatuses=[crashed])], [])
    assert found.state == "not_started"
    assert found.text.startswith("not started: head restarting")
    assert "Nothing is spent" in found.text
    [_, body] = rendered(text(), wait_s=900)
    assert body["spec"]["preRunningDeadlineSeconds"] == 900
    over = look(rayjob(jobDeploymentStatus="Failed", reason="PreRunningDeadlineExceeded"), [], [])
    assert over.state == "failed" and "never started" in over.text and "Nothing was spent" in over.text


def test_K8S_05_a_failing_init_container_is_named() -> None:
    failed = {"name": "wait-gcs-ready", "state": {"terminated": {"exitCode": 42, "reason": "Error"}}}
    found = look(rayjob(jobDeploymentStatus="Initializing"), [pod("worker", initContainerStatuses=[failed])], [])
    [problem] = found.problems
    assert problem.code == "init_container" and "exit code 42" in problem.text and "kubectl logs" in problem.text
    assert "preRunningDeadlineSeconds" in (FOLDER.parent / "docs" / "kubernetes.md").read_text()


def test_K8S_06_the_job_is_handed_in_once_the_head_answers() -> None:
    [_, body] = rendered(text())
    spec = body["spec"]
    # In this mode the operator's own command waits for the dashboard; a command of ours would replace it.
    assert spec["submissionMode"] == "K8sJobMode"
    container = spec["submitterPodTemplate"]["spec"]["containers"][0]
    assert "command" not in container and "args" not in container
    assert spec["preRunningDeadlineSeconds"] >= 600
    pulling = {"name": "ray-head", "state": {"waiting": {"reason": "ContainerCreating"}}}
    found = look(rayjob(jobDeploymentStatus="Initializing"), [pod("head", containerStatuses=[pulling])], [])
    assert (found.state, found.problems) == ("not_started", ())


def test_K8S_07_shared_memory_has_a_stated_size_that_the_limit_holds() -> None:
    [_, body] = rendered(text())
    for _, spec, _ in pods(body["spec"]["rayClusterSpec"]):
        [shm] = [volume["emptyDir"] for volume in spec["volumes"] if volume["name"] == "shm"]
        assert shm["medium"] == "Memory"
        mounted = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        assert mounted["shm"] == "/dev/shm"
        resources = spec["containers"][0]["resources"]
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        assert int(shm["sizeLimit"].removesuffix("Gi")) < int(resources["limits"]["memory"].removesuffix("Gi"))
    for group in [body["spec"]["rayClusterSpec"][key] for key in ("headGroupSpec",)]:
        assert int(group["rayStartParams"]["object-store-memory"]) < 4 * 2**30


@pytest.mark.parametrize(
    ("free_gib", "num_gpus", "ok", "fatal"),
    [(0.0625, 8, False, True), (4, 8, False, False), (32, 8, True, False), (0.5, 0, True, False)],
)
def test_K8S_07_the_preflight_asks_for_what_the_manifest_gives(
    free_gib: float, num_gpus: int, ok: bool, fatal: bool
) -> None:
    check = doctor._shared_memory(free_gib, num_gpus)
    assert (check.ok, check.fatal) == (ok, fatal)


def test_K8S_08_rdma_asks_for_its_resource_and_pinned_memory_only() -> None:
    body = text(nodes=2)
    [_, job] = render(job_of(body), body, RenderOptions(image=IMAGE, components=("rdma",)))
    assert wrong_by_policy(job) == []
    [worker] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    container = worker["template"]["spec"]["containers"][0]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert container["resources"]["limits"]["rdma/ib"] == container["resources"]["requests"]["rdma/ib"] == "1"
    # A trial whose collectives fell back to another network is told apart from a slow candidate.
    assert degraded("Socket", "IB") and not degraded("IB", "IB")
