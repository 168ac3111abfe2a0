"""The part of kustomize that our own files use: resources, components, JSON patches, a namespace.

`kubectl apply -k` reads the same files. Whatever else kustomize knows is refused here, so that both always agree.
"""

from __future__ import annotations

from collections.abc import Sequence
import copy
from pathlib import Path
from typing import Any

import yaml


Manifest = dict[str, Any]
"""One Kubernetes object as plain data."""

FOLDER = Path(__file__).resolve().parents[2] / "k8s"
"""Our files: beside the packages, in a checkout and in an installation."""

COMPONENTS = ("cpu", "gpu-pool", "kueue", "rdma", "s3")
"""What may be added to the base."""

_BODY = {"apiVersion", "kind", "namespace", "resources", "components", "patches"}
_CLUSTER_WIDE = ("Namespace",)


class KustomizeError(ValueError):
    """A file under k8s/ holds what this module does not do."""


def build(folder: Path) -> list[Manifest]:
    """The manifests of a kustomization, as ``kubectl kustomize`` prints them (their order may differ).

    Raises:
        KustomizeError: a file uses what this module does not do, or a patch does not fit.
    """
    body = _read_body(folder, "Kustomization")
    found: list[Manifest] = []
    for name in body.get("resources", []):
        path = folder / name
        found += build(path) if path.is_dir() else _documents(path)
    for name in body.get("components", []):
        found = add_component(folder / name, found)
    found = _patched(folder, body, found)
    if "namespace" in body:
        found = [placed_in(manifest, body["namespace"]) for manifest in found]
    names = [identity(manifest) for manifest in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise KustomizeError(f"{folder}: {twice[0]} stands there twice")
    return found


def add_component(folder: Path, manifests: Sequence[Manifest]) -> list[Manifest]:
    """The manifests with one component's patches.

    Raises:
        KustomizeError: a patch finds nothing to change.
    """
    body = _read_body(folder, "Component")
    if "resources" in body or "components" in body or "namespace" in body:
        raise KustomizeError(f"{folder}: a component of ours holds patches only")
    return _patched(folder, body, manifests)


def identity(manifest: Manifest) -> tuple[str, str]:
    """Kind and name."""
    return manifest["kind"], manifest["metadata"]["name"]


def placed_in(manifest: Manifest, namespace: str) -> Manifest:
    """A manifest moved into a namespace; the namespace's own manifest is renamed."""
    moved = copy.deepcopy(manifest)
    if moved["kind"] in _CLUSTER_WIDE:
        moved["metadata"]["name"] = namespace
        return moved
    moved["metadata"]["namespace"] = namespace
    for subject in moved.get("subjects", []):
        subject["namespace"] = namespace
    return moved


def _read_body(folder: Path, kind: str) -> Manifest:
    path = folder / "kustomization.yaml"
    body = yaml.safe_load(path.read_text())
    unknown = sorted(set(body) - _BODY)
    if unknown or body["kind"] != kind:
        raise KustomizeError(f"{path}: {', '.join(unknown) or body['kind']} is not known here; expected a {kind}")
    return dict(body)


def _documents(path: Path) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def _patched(folder: Path, body: Manifest, manifests: Sequence[Manifest]) -> list[Manifest]:
    found = list(manifests)
    for patch in body.get("patches", []):
        meant = [manifest for manifest in found if _matches(manifest, patch["target"])]
        if not meant:
            # kustomize passes over a patch without a target, which hides misspelt names. An overlay may well lack one
            # kind (a rendered study has no services), but then its caller leaves that kind's patches out.
            raise KustomizeError(f"{folder}: no manifest is {patch['target']}")
        if "patch" in patch:
            if yaml.safe_load(patch["patch"]).get("$patch") != "delete":
                raise KustomizeError(f"{folder}: of patches in place only $patch: delete is known here")
            found = [manifest for manifest in found if manifest not in meant]
            continue
        operations = yaml.safe_load((folder / patch["path"]).read_text())
        found = [apply_patch(manifest, operations) if manifest in meant else manifest for manifest in found]
    return found


def _matches(manifest: Manifest, target: Manifest) -> bool:
    group, _, version = manifest["apiVersion"].rpartition("/")
    facts = {"group": group, "version": version, "kind": manifest["kind"], "name": manifest["metadata"]["name"]}
    return all(facts[key] == value for key, value in target.items())


def apply_patch(manifest: Manifest, operations: Sequence[Manifest]) -> Manifest:
    """A manifest after a JSON patch (RFC 6902: add, replace, remove, test).

    Raises:
        KustomizeError: a path leads nowhere, a test does not hold, or the operation is another one.
    """
    done: Manifest = copy.deepcopy(manifest)
    for operation in operations:
        name, path = operation["op"], operation["path"]
        *steps, last = [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")[1:]]
        try:
            place: Any = done
            for step in steps:
                place = place[int(step) if isinstance(place, list) else step]
            key: Any = last
            if isinstance(place, list):
                key = len(place) if last == "-" else int(last)
            if name == "add" and isinstance(place, list):
                place.insert(key, copy.deepcopy(operation["value"]))
                continue
            if name != "add":
                # What is replaced, removed or tested has to be there.
                found = place[key]
            if name == "test" and found != operation["value"]:
                raise KustomizeError(f"{identity(manifest)} {path} is {found!r}, expected {operation['value']!r}")
            if name in ("add", "replace"):
                place[key] = copy.deepcopy(operation["value"])
            elif name == "remove":
                del place[key]
            elif name != "test":
                raise KustomizeError(f"{identity(manifest)} {path}: operation {name!r} is not known here")
        except (KeyError, IndexError, TypeError, ValueError) as error:
            if isinstance(error, KustomizeError):
                raise
            raise KustomizeError(f"{identity(manifest)} has no {path} to {name}") from None
    return done
