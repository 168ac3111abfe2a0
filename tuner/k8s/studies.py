"""Submit, look at, follow and stop studies on a cluster, such that none is ever started twice."""

from __future__ import annotations

from collections.abc import Iterator
import copy
import secrets
import time
from typing import Any

from search_space.errors import UserError
from tuner.k8s.api import Api
from tuner.k8s.api import Conflict
from tuner.k8s.api import Lost
from tuner.k8s.api import NotThere
from tuner.k8s.kustomize import Manifest
from tuner.k8s.render import JOB_HASH
from tuner.k8s.render import STUDY
from tuner.k8s.state import Found
from tuner.k8s.state import is_over
from tuner.k8s.state import look


SUBMISSION = "ledgertune.io/submission"
"""Annotation: which submission made a RayJob, to know one's own after an answer was lost."""

GONE_S = 180.0
"""Longest wait for a removal, seconds: a running trial ends in order first."""

LOOK_S = 1.0
"""Between looks, seconds."""


def submit(api: Api, config: Manifest, rayjob: Manifest, again: bool = False) -> dict[str, Any]:
    """Start a study.

    Args:
        api: the cluster.
        config: its ConfigMap.
        rayjob: its RayJob.
        again: replace a RayJob that has ended, to go on with its study.

    Raises:
        UserError: the study is there already, or the cluster refuses.
    """
    name = rayjob["metadata"]["name"]
    found = api.rayjob(name)
    if found is not None:
        _may_replace(found, rayjob, again)
        _remove(api, name)
    _put_config(api, config)
    marked = copy.deepcopy(rayjob)
    mark = secrets.token_hex(8)
    marked["metadata"].setdefault("annotations", {})[SUBMISSION] = mark
    try:
        api.create_rayjob(marked)
    except (Conflict, Lost) as error:
        # Another submission was quicker, or ours arrived and its answer did not: the mark tells. None is sent twice.
        there = api.rayjob(name)
        if there is None or there["metadata"].get("annotations", {}).get(SUBMISSION) != mark:
            _refuse(api, name, there, error)
    except UserError:
        api.delete_config(config["metadata"]["name"])
        raise
    return {"study": name, "namespace": api.namespace, "state": "submitted", "replaced": found is not None}


def _may_replace(found: Manifest, rayjob: Manifest, again: bool) -> None:
    name = rayjob["metadata"]["name"]
    since = found["metadata"].get("creationTimestamp", "earlier")
    began = found["metadata"].get("annotations", {}).get(JOB_HASH)
    if began != rayjob["metadata"]["annotations"][JOB_HASH]:
        raise UserError(
            f"study {name} on the cluster (since {since}) is of another job file; give this one another --study"
        )
    if not is_over(found):
        raise UserError(
            f"study {name} is on the cluster already (since {since}): `tune k8s status {name}` shows it, `tune k8s "
            f"stop {name}` ends it; another study needs another --study"
        )
    if not again:
        raise UserError(
            f"study {name} ended already (since {since}: {look(found, [], []).text}); --again goes on with it by the "
            "budget it has left, --study NAME begins another"
        )


def _put_config(api: Api, config: Manifest) -> None:
    name = config["metadata"]["name"]
    try:
        api.create_config(config)
        return
    except (Conflict, Lost):
        there = api.config(name)
    if there is not None and there.get("data") == config["data"]:
        return
    if there is not None:
        if STUDY not in there["metadata"].get("labels", {}):
            raise UserError(f"ConfigMap {name} is not ours; give the study another name by --study")
        # Left by a submission that never came to its RayJob.
        api.delete_config(name)
    try:
        api.create_config(config)
    except (Conflict, Lost) as error:
        raise UserError(f"ConfigMap {name} could not be made: {error}; nothing was started") from None


def _refuse(api: Api, name: str, there: Manifest | None, error: Exception) -> None:
    if there is not None:
        raise UserError(f"study {name} was submitted by somebody else just now; `tune k8s status {name}` shows it")
    if isinstance(error, Conflict):
        raise UserError(f"study {name} is being removed; try again in a minute")
    raise UserError(
        f"the Kubernetes API at {api.host} gave no answer ({error}) and has no study {name} so far; submit it again: "
        "a study that is there is never started twice"
    )


def status(api: Api, name: str) -> Found:
    """What a study is doing."""
    rayjob = api.rayjob(name)
    if rayjob is None:
        return look(None, [], [])
    return look(rayjob, api.pods(f"{STUDY}={name}"), api.events())


def logs(api: Api, name: str, follow: bool, tail: int | None) -> Iterator[str]:
    """Lines that the study's driver printed, as its submitter pod follows them.

    Raises:
        UserError: it has not started; the message says why.
    """
    found = [pod for pod in api.pods(f"{STUDY}={name}") if _is_submitter(pod)]
    begun = [pod for pod in found if pod.get("status", {}).get("phase") not in (None, "Pending")]
    if not begun:
        now = status(api, name)
        raise UserError(f"study {name} has printed nothing yet: {now.text}")
    yield from api.log(begun[-1]["metadata"]["name"], "submitter", follow, tail)


def _is_submitter(pod: Manifest) -> bool:
    return pod["metadata"].get("labels", {}).get("app.kubernetes.io/component") == "submitter"


def stop(api: Api, name: str) -> dict[str, Any]:
    """End a study in order; its folder stays, so that it can go on.

    Raises:
        UserError: there is none, or it does not end in time.
    """
    if api.rayjob(name) is None:
        raise UserError(f"there is no study {name} in namespace {api.namespace}; `kubectl get rayjobs` lists them")
    _remove(api, name)
    api.delete_config(name)
    return {"study": name, "namespace": api.namespace, "state": "stopped"}


def _remove(api: Api, name: str) -> None:
    try:
        api.delete_rayjob(name)
    except NotThere:
        return
    until = time.monotonic() + GONE_S
    while api.rayjob(name) is not None:
        if time.monotonic() > until:
            raise UserError(
                f"RayJob {name} is still being removed after {GONE_S:.0f} s; is the KubeRay operator running? "
                f"(`kubectl describe rayjob {name}`)"
            )
        time.sleep(LOOK_S)
