"""What a study on a cluster is doing, and what keeps it from running, from its RayJob, pods and events."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
import re
from typing import Any

from tuner.k8s.kustomize import Manifest


EXITS = {
    2: "the request could not be served: a bad job file, nothing feasible, or no devices",
    3: "the budget was spent before anything was measured",
    130: "it was interrupted; submit it again to go on",
    1: "a fault of ours",
}
"""Exit codes of `tune`, in words."""

TERMINAL = ("Complete", "Failed")
"""Deployment states of a RayJob that will not change."""

PULL = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that keeps a pod from running."""

    pod: str
    """The pod, or the object that could not make one."""

    code: str
    """``no_gpus``, ``unschedulable``, ``image``, ``init_container``, ``restarting``, ``out_of_memory``, ``volume``,
    ``secret``, ``refused`` or ``evicted``."""

    text: str
    """What was found and what to do."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A study on a cluster."""

    state: str
    """``not_submitted``, ``queued``, ``not_started``, ``running``, ``done`` or ``failed``."""

    text: str
    """The state in a sentence."""

    problems: tuple[Problem, ...]

    pods: tuple[dict[str, str], ...]
    """Name, role and phase of each."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def look(rayjob: Manifest | None, pods: Sequence[Manifest], events: Sequence[Manifest]) -> Found:
    """Judge a study.

    Args:
        rayjob: its RayJob; None: there is none.
        pods: those with its label.
        events: warnings of the namespace.
    """
    listed = tuple(
        {"name": pod["metadata"]["name"], "role": _role(pod), "phase": pod.get("status", {}).get("phase", "Unknown")}
        for pod in pods
    )
    problems = tuple(
        [problem for pod in pods for problem in _of_pod(pod)] + list(_of_events(rayjob, pods, events) if rayjob else [])
    )
    state, text = _state(rayjob, problems)
    return Found(state=state, text=text, problems=problems, pods=listed)


def is_over(rayjob: Manifest) -> bool:
    """Whether a RayJob has ended and will not start anything any more."""
    return rayjob.get("status", {}).get("jobDeploymentStatus") in TERMINAL


def _role(pod: Manifest) -> str:
    labels = pod["metadata"].get("labels", {})
    return str(labels.get("ray.io/node-type") or labels.get("app.kubernetes.io/component") or "unknown")


def _state(rayjob: Manifest | None, problems: Sequence[Problem]) -> tuple[str, str]:
    if rayjob is None:
        return "not_submitted", "there is no such study on the cluster"
    status = rayjob.get("status", {})
    deployment, job = status.get("jobDeploymentStatus", ""), status.get("jobStatus", "")
    message = str(status.get("message", "")).strip()
    if deployment == "Failed" or (deployment == "Complete" and job in ("FAILED", "STOPPED")):
        return "failed", _failed(status.get("reason", ""), job, message, problems)
    if deployment == "Complete":
        return "done", "the study ended; its winner is in its folder, `tune k8s logs` shows the last lines"
    if deployment == "Suspended" or (not deployment and rayjob["spec"].get("suspend")):
        return "queued", "queued: suspended until the queue admits it; nothing is spent meanwhile"
    if deployment == "Running":
        return "running", "the study runs"
    why = "; ".join(dict.fromkeys(problem.text for problem in problems)) or "its pods are being made"
    return "not_started", f"not started: {why}. Nothing is spent meanwhile"


def _failed(reason: str, job: str, message: str, problems: Sequence[Problem]) -> str:
    if reason == "PreRunningDeadlineExceeded":
        why = "; ".join(dict.fromkeys(problem.text for problem in problems)) or "its pods did not become ready in time"
        return f"never started: {why}. Nothing was spent; mend it and submit again with --again"
    code = re.search(r"exit code (\d+)", message)
    if reason == "AppFailed" and code is not None:
        words = EXITS.get(int(code[1]), "see `tune k8s logs`")
        return f"the study ended with exit code {code[1]}: {words}"
    if reason == "DeadlineExceeded":
        return "the study's wall time is over; --again goes on with what is left of its budget"
    return f"failed ({reason or job}): {message or 'no message'}; --again goes on with what is left of its budget"


def _of_pod(pod: Manifest) -> Iterator[Problem]:
    name, status = pod["metadata"]["name"], pod.get("status", {})
    if status.get("reason") in ("Evicted", "Preempted", "NodeLost"):
        why = status.get("message", "no message")
        yield Problem(pod=name, code="evicted", text=f"pod {name} was {status['reason'].lower()}: {why}")
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            yield _unschedulable(name, str(condition.get("message", "")))
    for container in status.get("initContainerStatuses", []):
        yield from _of_init(name, container)
    for container in status.get("containerStatuses", []):
        yield from _of_container(name, _role(pod), container)


def _unschedulable(name: str, message: str) -> Problem:
    if "persistentvolumeclaim" in message.lower():
        return Problem(
            pod=name,
            code="volume",
            text=f"a volume is missing: {message} (`kubectl apply -k k8s/base/services` makes it)",
        )
    if re.search(r"Insufficient \S*gpu|Insufficient nvidia", message, re.IGNORECASE):
        return Problem(pod=name, code="no_gpus", text=f"waiting for GPUs: {message}")
    return Problem(pod=name, code="unschedulable", text=f"no node takes pod {name}: {message}")


def _of_init(pod: str, container: dict[str, Any]) -> Iterator[Problem]:
    name, state = container["name"], container.get("state", {})
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated") or {}
    if ended.get("exitCode"):
        yield Problem(
            pod=pod,
            code="init_container",
            text=f"init container {name} of pod {pod} ended with exit code {ended['exitCode']}: "
            f"{ended.get('message') or ended.get('reason') or 'no message'} (`kubectl logs {pod} -c {name}`)",
        )
    yield from _waiting(pod, container)


def _of_container(pod: str, role: str, container: dict[str, Any]) -> Iterator[Problem]:
    ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated") or {}
    if ended.get("reason") == "OOMKilled":
        yield Problem(
            pod=pod, code="out_of_memory", text=f"pod {pod} used more memory than its limit; raise --worker-memory"
        )
    elif container.get("restartCount") or (ended.get("exitCode") and role in ("head", "worker")):
        yield Problem(
            pod=pod,
            code="restarting",
            text=f"{role} restarting: pod {pod} ended with exit code {ended.get('exitCode', '?')} "
            f"({ended.get('reason', 'no reason')}; `kubectl logs {pod} --previous`)",
        )
    yield from _waiting(pod, container)


def _waiting(pod: str, container: dict[str, Any]) -> Iterator[Problem]:
    waiting = container.get("state", {}).get("waiting") or {}
    reason, message = waiting.get("reason", ""), waiting.get("message", "")
    if reason in PULL:
        yield Problem(
            pod=pod,
            code="image",
            text=f"image {container.get('image', '?')} cannot be pulled ({reason}): {message or 'no message'}; is it "
            "pushed, and may the nodes read the registry?",
        )
    elif reason == "CreateContainerConfigError":
        yield Problem(pod=pod, code="secret", text=f"pod {pod} lacks something it is configured with: {message}")


_EVENTS = {
    "FailedMount": "volume",
    "FailedAttachVolume": "volume",
    "FailedCreate": "refused",
    "FailedToCreateHeadPod": "refused",
    "FailedToCreateWorkerPod": "refused",
    "InvalidRayJobSpec": "refused",
}


def _of_events(rayjob: Manifest, pods: Sequence[Manifest], events: Sequence[Manifest]) -> Iterator[Problem]:
    """Warnings about objects of the study that no pod's own status repeats."""
    ours = {pod["metadata"]["name"] for pod in pods} | {rayjob["metadata"]["name"]}
    cluster = rayjob.get("status", {}).get("rayClusterName")
    ours |= {cluster} if cluster else set()
    seen = set()
    for event in events:
        name, reason = event.get("involvedObject", {}).get("name"), str(event.get("reason", ""))
        text = str(event.get("message", "")).strip()
        if name in ours and reason in _EVENTS and (reason, text) not in seen:
            seen.add((reason, text))
            yield Problem(pod=str(name), code=_EVENTS[reason], text=f"{reason} of {name}: {text}")
