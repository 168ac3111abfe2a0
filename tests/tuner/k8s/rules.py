"""What every manifest of ours must keep: schemas and policies, as functions that return what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
import json
from pathlib import Path
import re
from typing import Any

import jsonschema
import kubernetes_validate


DATA = Path(__file__).parents[2] / "data" / "kuberay" / "v1.json"
KUBERNETES = "1.33.0"


def wrong_by_schema(manifest: dict[str, Any]) -> list[str]:
    """Faults by the schema of the manifest's kind; unknown fields are faults."""
    if manifest["apiVersion"] == "ray.io/v1":
        validator = jsonschema.Draft202012Validator(_kuberay(manifest["kind"]))
        return [f"{'/'.join(map(str, e.absolute_path))}: {e.message[:200]}" for e in validator.iter_errors(manifest)]
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except (kubernetes_validate.ValidationError, jsonschema.ValidationError) as error:
        return [str(error)[:300]]
    return []


@cache
def _kuberay(kind: str) -> dict[str, Any]:
    body = json.loads(DATA.read_text())
    root = _closed(body["roots"][kind])
    root["properties"]["metadata"] = {"type": "object"}
    return {**root, "$defs": {name: _closed(value) for name, value in body["$defs"].items()}}


def _closed(schema: Any) -> Any:
    """A schema in which objects with listed properties take no others."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    done = {key: _closed(value) for key, value in schema.items()}
    listed = isinstance(done.get("properties"), dict) and done.get("type") == "object"
    if listed and "additionalProperties" not in done and not done.get("x-kubernetes-preserve-unknown-fields"):
        done["additionalProperties"] = False
    return done


def pods(manifest: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """Every pod specification inside a manifest: where it is, itself, its labels."""
    if isinstance(manifest, list):
        for number, item in enumerate(manifest):
            yield from pods(item, f"{path}/{number}")
    elif isinstance(manifest, dict):
        if "containers" in manifest:
            yield path, manifest, {}
        for key, value in manifest.items():
            for where, spec, labels in pods(value, f"{path}/{key}"):
                own = manifest.get("metadata", {}).get("labels", {}) if key == "spec" and "containers" in value else {}
                yield where, spec, labels or own


def wrong_by_policy(manifest: dict[str, Any]) -> list[str]:
    """Faults of one manifest by our own rules."""
    faults = [f"{where}: {fault}" for where, spec, labels in pods(manifest) for fault in _pod_faults(spec, labels)]
    kind = manifest["kind"]
    if kind == "Secret":
        faults.append("a Secret in a manifest")
    if kind == "Service" and manifest["spec"].get("type", "ClusterIP") != "ClusterIP":
        faults.append("a Service that is open to the outside")
    if kind in ("Ingress", "ClusterRole", "ClusterRoleBinding"):
        faults.append(f"a {kind}")
    if kind == "ServiceAccount" and manifest.get("automountServiceAccountToken") is not False:
        faults.append("an account whose token is mounted")
    if kind in ("Role",):
        for rule in manifest["rules"]:
            if "*" in [*rule["verbs"], *rule["resources"], *rule["apiGroups"]] or "secrets" in rule["resources"]:
                faults.append(f"a role that may {rule}")
    if kind in ("RayJob", "RayCluster"):
        faults += _ray_faults(manifest)
    return faults


def _pod_faults(spec: dict[str, Any], labels: dict[str, str]) -> Iterator[str]:
    if spec.get("automountServiceAccountToken") is not False:
        yield "the account's token is mounted"
    if spec.get("serviceAccountName", "default") == "default":
        yield "runs as the default account"
    if labels.get("app.kubernetes.io/part-of") != "ledgertune" or "app.kubernetes.io/component" not in labels:
        yield "no network policy selects it"
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(key):
            yield key
    context = spec.get("securityContext", {})
    if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
        yield "may run as root"
    if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "no seccomp profile"
    for volume in spec.get("volumes", []):
        if "hostPath" in volume:
            yield f"volume {volume['name']} is the node's"
        if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
            yield f"volume {volume['name']} has no limit"
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        for fault in _container_faults(container):
            yield f"{container['name']}: {fault}"


def _container_faults(container: dict[str, Any]) -> Iterator[str]:
    context = container.get("securityContext", {})
    if context.get("privileged") is not False or context.get("allowPrivilegeEscalation") is not False:
        yield "privileged, or may become so"
    if context.get("readOnlyRootFilesystem") is not True:
        yield "its root file system can be written"
    capabilities = context.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or not set(capabilities.get("add", [])) <= {"IPC_LOCK"}:
        yield f"capabilities {capabilities}"
    for kind in ("requests", "limits"):
        if not {"cpu", "memory"} <= set(container.get("resources", {}).get(kind, {})):
            yield f"no {kind}"
    image = container["image"]
    tag = image.rsplit("/", 1)[-1].partition(":")[2]
    if "@sha256:" not in image and not re.search(r"\d+\.\d+", tag):
        yield f"image {image} is not pinned"
    for variable in container.get("env", []):
        secret = re.search(r"PASSWORD|TOKEN|SECRET|ACCESS_KEY", variable["name"])
        if secret and "secretKeyRef" not in variable.get("valueFrom", {}):
            yield f"the value of {variable['name']} is written out"


def _ray_faults(manifest: dict[str, Any]) -> Iterator[str]:
    job = manifest["spec"] if manifest["kind"] == "RayJob" else None
    cluster = job["rayClusterSpec"] if job is not None else manifest["spec"]
    if cluster.get("authOptions") != {"mode": "token"}:
        yield "Ray answers without its token"
    head = cluster["headGroupSpec"]
    if head.get("serviceType") != "ClusterIP" or head.get("enableIngress"):
        yield "Ray's head is open to the outside"
    if "nvidia.com/gpu" in str(head["template"]):
        yield "the head holds GPUs"
    if cluster.get("enableInTreeAutoscaling"):
        yield "an autoscaler needs an account with rights"
    if job is None:
        return
    if job.get("backoffLimit") != 0 or job.get("submitterConfig", {}).get("backoffLimit") != 0:
        yield "a retry that is not ours"
    if job.get("submissionMode") != "K8sJobMode" or not job.get("preRunningDeadlineSeconds"):
        yield "is handed in again, or waits for ever"
    policies = [spec.get("restartPolicy") for _, spec, _ in pods(job)]
    if policies != ["Never"] * len(policies):
        yield f"restart policies {policies}"
    if "--or-resume" not in job["entrypoint"]:
        yield "a second start would be a new study"
    for group in cluster["workerGroupSpecs"]:
        shm = [volume for volume in group["template"]["spec"]["volumes"] if volume["name"] == "shm"]
        if not shm or shm[0]["emptyDir"].get("medium") != "Memory":
            yield "no shared memory"


def selected(policy: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a NetworkPolicy selects pods with some labels."""
    return policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def open_ports(manifests: list[dict[str, Any]], labels: dict[str, str], source: dict[str, str]) -> list[Any] | None:
    """Ports of pods with ``labels`` that pods with ``source`` labels in the namespace reach; None: every port."""
    policies = [m for m in manifests if m["kind"] == "NetworkPolicy" and selected(m, labels)]
    if not policies:
        return None
    ports: list[Any] = []
    for rule in (rule for policy in policies for rule in policy["spec"].get("ingress", [])):
        for peer in rule.get("from", [{}]):
            if "ipBlock" in peer:
                return None
            if "namespaceSelector" in peer and not peer.get("podSelector", {}).get("matchLabels"):
                return None
            if peer.get("podSelector", {}).get("matchLabels", {}).items() <= source.items():
                if "ports" not in rule:
                    return None
                ports += [port["port"] for port in rule["ports"]]
    return sorted(set(ports))
