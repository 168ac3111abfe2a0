"""Every manifest of base, overlays and components keeps schemas and policies; our kustomize is kustomize's."""

from __future__ import annotations

import copy
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from tests.tuner.k8s.rules import open_ports
from tests.tuner.k8s.rules import pods
from tests.tuner.k8s.rules import wrong_by_policy
from tests.tuner.k8s.rules import wrong_by_schema
from tuner.k8s.kustomize import add_component
from tuner.k8s.kustomize import apply_patch
from tuner.k8s.kustomize import build
from tuner.k8s.kustomize import COMPONENTS
from tuner.k8s.kustomize import FOLDER
from tuner.k8s.kustomize import identity
from tuner.k8s.kustomize import KustomizeError


BUILDS = ["base", *sorted(f"overlays/{path.name}" for path in (FOLDER / "overlays").iterdir())]
KUBECTL = shutil.which("kubectl")
OUTSIDE = {"app": "anything-else"}
PART = "app.kubernetes.io/part-of"
COMPONENT = "app.kubernetes.io/component"


def built(name: str) -> list[dict[str, Any]]:
    base, _, component = name.partition("+")
    manifests = build(FOLDER / base)
    return add_component(FOLDER / "components" / component, manifests) if component else manifests


EVERYTHING = [*BUILDS, *(f"base+{name}" for name in COMPONENTS)]


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_manifest_keeps_its_schema(name: str) -> None:
    assert {identity(m): faults for m in built(name) if (faults := wrong_by_schema(m))} == {}


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_manifest_keeps_the_policies(name: str) -> None:
    assert {identity(m): faults for m in built(name) if (faults := wrong_by_policy(m))} == {}


def test_the_checks_see_faults() -> None:
    rayjob = next(m for m in build(FOLDER / "base") if m["kind"] == "RayJob")
    worker = ["spec", "rayClusterSpec", "workerGroupSpecs", 0, "template", "spec"]

    def changed(path: list[Any], value: Any) -> dict[str, Any]:
        done = copy.deepcopy(rayjob)
        place: Any = done
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        return done

    assert wrong_by_schema(changed(["spec", "backofflimit"], 0))
    assert wrong_by_schema(changed([*worker, "containers", 0, "volumeMount"], []))
    assert wrong_by_schema(changed(["spec", "preRunningDeadlineSeconds"], "soon"))
    assert wrong_by_policy(changed(["spec", "backoffLimit"], 3)) == ["a retry that is not ours"]
    assert wrong_by_policy(changed([*worker, "hostNetwork"], True))
    assert wrong_by_policy(changed([*worker, "containers", 0, "image"], "x/ledgertune:latest"))
    assert wrong_by_policy(changed([*worker, "containers", 0, "securityContext", "privileged"], True))
    assert wrong_by_policy(changed([*worker, "containers", 0, "env"], [{"name": "HF_TOKEN", "value": "hf_x"}]))
    assert wrong_by_policy(changed([*worker, "serviceAccountName"], "default"))
    assert wrong_by_policy(changed([*worker, "containers", 0, "resources", "limits"], {}))


@pytest.mark.parametrize("name", BUILDS)
def test_network_policies_close_ray_mlflow_and_the_database(name: str) -> None:
    manifests = built(name)
    found = {labels[COMPONENT]: labels for m in manifests for _, _, labels in pods(m)}
    assert {"ray", "mlflow", "postgres"} <= set(found)
    for labels in found.values():
        assert open_ports(manifests, labels, OUTSIDE) == []
    ray, mlflow, postgres = found["ray"], found["mlflow"], found["postgres"]
    assert open_ports(manifests, ray, ray) is None
    assert open_ports(manifests, ray, {PART: "ledgertune", COMPONENT: "submitter"}) == [8265]
    assert open_ports(manifests, ray, {COMPONENT: "kuberay-operator"}) == [8265]
    assert open_ports(manifests, ray, mlflow) == []
    assert open_ports(manifests, mlflow, ray) == [5000]
    assert open_ports(manifests, postgres, mlflow) == [5432]
    assert open_ports(manifests, postgres, ray) == []


def test_the_interactive_cluster_has_the_pods_of_the_job() -> None:
    [rayjob] = [m for m in build(FOLDER / "base") if m["kind"] == "RayJob"]
    [cluster] = [m for m in build(FOLDER / "overlays" / "interactive") if m["kind"] == "RayCluster"]
    of_job, alone = copy.deepcopy(rayjob["spec"]["rayClusterSpec"]), copy.deepcopy(cluster["spec"])
    head = of_job["headGroupSpec"]["template"]["spec"]
    assert head["volumes"].pop() == {"name": "job", "configMap": {"name": "ledgertune-study"}}
    assert head["containers"][0]["volumeMounts"].pop()["name"] == "job"
    for body, policy in ((of_job, "Never"), (alone, "Always")):
        for _, spec, _ in pods(body):
            assert spec.pop("restartPolicy") == policy
    assert of_job == alone


@pytest.mark.skipif(KUBECTL is None, reason="needs kubectl")
@pytest.mark.parametrize("name", ["base", "base/services", *BUILDS[1:]])
def test_our_kustomize_gives_what_kubectl_gives(name: str) -> None:
    done = subprocess.run(
        [str(KUBECTL), "kustomize", str(FOLDER / name)], capture_output=True, text=True, check=True, timeout=60
    )
    theirs = sorted(yaml.safe_load_all(done.stdout), key=identity)
    assert sorted(build(FOLDER / name), key=identity) == theirs


def test_what_our_kustomize_does_not_do_is_refused(tmp_path: Any) -> None:
    body = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "namePrefix": "x-"}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(body))
    with pytest.raises(KustomizeError, match="namePrefix is not known here"):
        build(tmp_path)


def test_a_patch_that_does_not_fit_is_refused() -> None:
    manifest = {"kind": "Thing", "metadata": {"name": "one"}, "spec": {"list": [1, 2], "a/b": 1}}
    for operation in (
        {"op": "replace", "path": "/spec/other", "value": 1},
        {"op": "remove", "path": "/spec/list/2"},
        {"op": "test", "path": "/spec/a~1b", "value": 2},
        {"op": "add", "path": "/spec/nowhere/x", "value": 2},
        {"op": "move", "path": "/spec/list"},
    ):
        with pytest.raises(KustomizeError):
            apply_patch(manifest, [operation])
    done = apply_patch(
        manifest, [{"op": "add", "path": "/spec/list/-", "value": 3}, {"op": "remove", "path": "/spec/a~1b"}]
    )
    assert done["spec"] == {"list": [1, 2, 3]}
    assert manifest["spec"]["list"] == [1, 2]


def test_a_component_without_its_target_is_refused() -> None:
    with pytest.raises(KustomizeError, match="no manifest is"):
        add_component(FOLDER / "components" / "rdma", build(FOLDER / "base" / "services"))
