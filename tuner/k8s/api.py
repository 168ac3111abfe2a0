"""The few calls to the Kubernetes API that studies need, with errors as a user would want them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import json
import os
import time
from typing import Any

from search_space.errors import UserError
from tuner.k8s.kustomize import Manifest


TRIES = 4
"""Tries of a call that only reads, or whose repetition is harmless."""

PAUSE_S = 0.5
"""Before the second try; doubled for each further one."""

TIMEOUT_S = (5, 30)
"""Longest wait for a connection and for an answer, seconds."""

AGAIN = (429, 500, 502, 503, 504)
"""Answers after which a reading call is tried again."""


class NotThere(Exception):
    """What was asked for does not exist."""


class Conflict(Exception):
    """What should be made exists already."""


class Lost(Exception):
    """No answer came, so whether a change was made is unknown."""


class Api:
    """One namespace of one cluster.

    Args:
        namespace: where studies run.
        context: of the kubeconfig; None: its current one, or the pod's own account inside a cluster.

    Raises:
        UserError: there is no way to a cluster.
    """

    def __init__(self, namespace: str, context: str | None = None) -> None:
        self.namespace = namespace
        try:
            from kubernetes import client
            from kubernetes import config
        except ImportError:
            raise UserError("the package kubernetes is not installed: pip install -r requirements.lock") from None
        settings = client.Configuration()
        try:
            try:
                # The client reads the variable once, when it is imported.
                file = os.environ.get("KUBECONFIG")
                config.load_kube_config(config_file=file, context=context, client_configuration=settings)
            except config.ConfigException:
                if context is not None:
                    raise
                config.load_incluster_config(client_configuration=settings)
        except config.ConfigException as error:
            raise UserError(
                f"no way to a Kubernetes cluster: {_first_line(error)}; set KUBECONFIG, or log in by your cluster's "
                "tool until `kubectl get nodes` answers (`tune k8s render` needs no cluster)"
            ) from None
        # Repeating is decided here, call by call: a creation must not be sent twice behind our back.
        settings.retries = False
        self.host = settings.host
        self._client = client.ApiClient(settings)
        self._core = client.CoreV1Api(self._client)
        self._custom = client.CustomObjectsApi(self._client)

    def rayjob(self, name: str) -> Manifest | None:
        """A RayJob; None if there is none."""
        try:
            return self._read(self._custom.get_namespaced_custom_object, *_RAYJOB, self.namespace, "rayjobs", name)
        except NotThere:
            return None

    def create_rayjob(self, manifest: Manifest) -> None:
        """Make a RayJob.

        Raises:
            Conflict: there is one of this name.
            Lost: no answer came.
        """
        self._call(self._custom.create_namespaced_custom_object, *_RAYJOB, self.namespace, "rayjobs", manifest)

    def delete_rayjob(self, name: str) -> None:
        """Ask for the removal of a RayJob and all that it made.

        Raises:
            NotThere: there is none.
        """
        delete = self._custom.delete_namespaced_custom_object
        self._read(delete, *_RAYJOB, self.namespace, "rayjobs", name, propagation_policy="Foreground")

    def config(self, name: str) -> Manifest | None:
        """A ConfigMap; None if there is none."""
        try:
            return self._read(self._core.read_namespaced_config_map, name, self.namespace)
        except NotThere:
            return None

    def create_config(self, manifest: Manifest) -> None:
        """Make a ConfigMap.

        Raises:
            Conflict: there is one of this name.
            Lost: no answer came.
        """
        self._call(self._core.create_namespaced_config_map, self.namespace, manifest)

    def delete_config(self, name: str) -> None:
        """Remove a ConfigMap, if there is one."""
        with contextlib.suppress(NotThere):
            self._read(self._core.delete_namespaced_config_map, name, self.namespace)

    def pods(self, selector: str) -> list[Manifest]:
        """Pods with some labels, oldest first."""
        found = self._read(self._core.list_namespaced_pod, self.namespace, label_selector=selector)["items"]
        return sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))

    def events(self) -> list[Manifest]:
        """Warnings of the namespace."""
        found = self._read(self._core.list_namespaced_event, self.namespace, field_selector="type=Warning")
        return list(found["items"])

    def log(self, pod: str, container: str, follow: bool, tail: int | None) -> Iterator[str]:
        """Lines of a container's log.

        Args:
            pod: its pod.
            container: its name.
            follow: go on until the container ends.
            tail: last lines only (count); None: all.

        Raises:
            UserError: the log is gone, or the connection broke.
        """
        import urllib3

        options: dict[str, Any] = {"container": container, "follow": follow, "_preload_content": False}
        if tail is not None:
            options["tail_lines"] = tail
        read = self._core.read_namespaced_pod_log
        try:
            answer = self._guarded(read, pod, self.namespace, _request_timeout=(5, None), **options)
        except (NotThere, Lost) as error:
            raise UserError(f"the log of pod {pod} cannot be read: {error}") from None
        try:
            rest = b""
            for chunk in answer.stream(amt=None, decode_content=True):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")
        except urllib3.exceptions.HTTPError as error:
            raise UserError(
                f"the connection to the log of pod {pod} broke ({_first_line(error)}); the study goes on, ask again"
            ) from None
        finally:
            answer.release_conn()

    def _read(self, call: Callable[..., Any], *args: Any, **options: Any) -> Manifest:
        """A call that may be repeated."""
        for number in range(TRIES):
            try:
                return self._call(call, *args, **options)
            except Lost as error:
                if number == TRIES - 1:
                    raise UserError(f"the Kubernetes API at {self.host} does not answer: {error}") from None
                time.sleep(PAUSE_S * 2**number)
        raise AssertionError("unreachable")

    def _call(self, call: Callable[..., Any], *args: Any, **options: Any) -> Manifest:
        answer = self._guarded(call, *args, _preload_content=False, _request_timeout=TIMEOUT_S, **options)
        return dict(json.loads(answer.data))

    def _guarded(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """One call, once.

        Raises:
            NotThere, Conflict, Lost: as they say.
            UserError: it may not be done, or cannot.
        """
        from kubernetes.client.exceptions import ApiException
        import urllib3

        try:
            return call(*args, **options)
        except urllib3.exceptions.HTTPError as error:
            raise Lost(_first_line(error)) from None
        except ApiException as error:
            self._explain(error)
            raise AssertionError("unreachable") from error

    def _explain(self, error: Any) -> None:
        body = _status(error.body)
        text = str(body.get("message") or error.reason or "").strip()
        details = body.get("details") or {}
        if error.status in AGAIN:
            raise Lost(f"{error.status} {text}")
        if error.status == 401:
            raise UserError(f"the Kubernetes API at {self.host} does not know you (401); log in to the cluster again")
        if error.status == 403:
            if "exceeded quota" in text:
                raise UserError(f"the quota of namespace {self.namespace} is used up: {text}")
            raise UserError(
                f"forbidden: {text}; bind your account to the role ledgertune-submitter in namespace {self.namespace} "
                "(docs/kubernetes.md)"
            )
        if error.status == 404:
            if details.get("kind") == "namespaces":
                raise UserError(
                    f"there is no namespace {self.namespace}; make it and what studies share: `kubectl apply -k "
                    "k8s/base/services`, or name another by --namespace"
                )
            if "could not find the requested resource" in text or not details:
                raise UserError(
                    "this cluster does not know RayJobs (ray.io/v1): the KubeRay operator is not installed; see "
                    "docs/kubernetes.md for the one command that does"
                )
            raise NotThere(text)
        if error.status == 409:
            raise Conflict(text)
        raise UserError(f"the Kubernetes API refused ({error.status}): {text}")


_RAYJOB = ("ray.io", "v1")


def _status(body: Any) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
