"""What keeps a study from running, from what a cluster says."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tuner.k8s.test_cases_k8s import pod
from tests.tuner.k8s.test_cases_k8s import rayjob
from tuner.k8s.state import look


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "ray-worker", "image": "r/l:1", **state}]


def unschedulable(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    return pod("worker", conditions=[condition])


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (unschedulable("0/5 nodes are available: 5 Insufficient nvidia.com/gpu."), "no_gpus", "waiting for GPUs: 0/5"),
        (unschedulable("0/5 nodes are available: 5 Insufficient memory."), "unschedulable", "Insufficient memory"),
        (
            unschedulable('persistentvolumeclaim "ledgertune-studies" not found'),
            "volume",
            "k8s/base/services` makes it",
        ),
        (
            pod(
                "worker",
                containerStatuses=container(state={"waiting": {"reason": "ImagePullBackOff", "message": "no"}}),
            ),
            "image",
            "r/l:1 cannot be pulled (ImagePullBackOff): no",
        ),
        (
            pod("worker", containerStatuses=container(state={"waiting": {"reason": "CreateContainerConfigError"}})),
            "secret",
            "lacks something",
        ),
        (
            pod("worker", containerStatuses=container(state={"terminated": {"reason": "OOMKilled", "exitCode": 137}})),
            "out_of_memory",
            "--worker-memory",
        ),
        (pod("worker", "Failed", reason="Evicted", message="disk pressure"), "evicted", "disk pressure"),
    ],
)
def test_each_problem_is_named_and_nothing_is_spent(found: dict[str, Any], code: str, words: str) -> None:
    seen = look(rayjob(jobDeploymentStatus="Initializing"), [found], [])
    assert seen.state == "not_started"
    assert [problem.code for problem in seen.problems] == [code]
    assert words in seen.text and seen.text.endswith("Nothing is spent meanwhile")


def test_warnings_of_other_studies_are_not_ours() -> None:
    def event(name: str, reason: str) -> dict[str, Any]:
        return {"involvedObject": {"name": name}, "reason": reason, "message": "exceeded quota: gpus"}

    events = [event("two", "FailedCreate"), event("one-abc", "FailedToCreateWorkerPod"), event("one", "Fine")]
    seen = look(rayjob(jobDeploymentStatus="Initializing"), [], [*events, events[1]])
    assert [(problem.pod, problem.code) for problem in seen.problems] == [("one-abc", "refused")]


@pytest.mark.parametrize(
    ("status", "state", "words"),
    [
        ({"jobDeploymentStatus": "Running"}, "running", "runs"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, "done", "winner"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "FAILED"}, "failed", "--again goes on"),
        ({"jobDeploymentStatus": "Suspended"}, "queued", "queue"),
        ({"jobDeploymentStatus": "Failed", "reason": "DeadlineExceeded"}, "failed", "wall time"),
        ({"jobDeploymentStatus": "Failed", "reason": "AppFailed", "message": "exit code 3"}, "failed", "budget"),
        ({"jobDeploymentStatus": "Failed", "reason": "AppFailed", "message": "exit code 9"}, "failed", "k8s logs"),
        ({}, "not_started", "being made"),
    ],
)
def test_states(status: dict[str, Any], state: str, words: str) -> None:
    seen = look(rayjob(**status), [], [])
    assert seen.state == state and words in seen.text


def test_a_job_that_kueue_holds_back_is_queued() -> None:
    held = rayjob()
    held["spec"]["suspend"] = True
    assert look(held, [], []).state == "queued"
