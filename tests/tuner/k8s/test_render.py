"""A job as manifests: what is rendered keeps every rule, and what cannot run is refused."""

from __future__ import annotations

import json
from pathlib import Path
import shlex
from typing import Any

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest
import yaml

from search_space.errors import UserError
from search_space.job import Job
from search_space.job_file import parse_job
from tests.tuner.k8s.rules import wrong_by_policy
from tests.tuner.k8s.rules import wrong_by_schema
from trial_runner.devices import SHM_PER_RANK_GIB
from tuner.cli import main
from tuner.k8s.render import render
from tuner.k8s.render import RenderOptions
from tuner.k8s.render import study_name


IMAGE = "registry.acme.dev/ledgertune:0.1.0"


def text(ranks: int = 8, nodes: int = 1, gpu: str = "H100-SXM", more: str = "") -> str:
    return (
        f'[model]\ntorchtitan = "llama3:llama3_8b"\n[cluster]\ngpu = "{gpu}"\n'
        f"gpus_per_node = {ranks}\nnodes = {nodes}\n"
        f"[budget]\ngpu_hours = 40\n{more}"
    )


def job_of(body: str) -> Job:
    return parse_job(body, name="job.toml")


def rendered(body: str, services: bool = False, **options: Any) -> list[dict[str, Any]]:
    return render(job_of(body), body, RenderOptions(**{"image": IMAGE, **options}), services)


@settings(max_examples=12, deadline=None)
@given(
    ranks=st.integers(1, 16),
    nodes=st.integers(1, 64),
    gpu=st.sampled_from(["H100-SXM", "cpu"]),
    parts=st.sets(st.sampled_from(["kueue", "rdma", "s3"])),
    extra=st.integers(0, 3),
)
def test_whatever_is_rendered_keeps_schemas_and_policies(
    ranks: int, nodes: int, gpu: str, parts: set[str], extra: int
) -> None:
    options: dict[str, Any] = {"components": tuple(sorted(parts)), "gpu_workers": nodes + extra}
    options |= {"node_selector": {"pool": "a"}, "env_secret": "hf", "namespace": "team-a"}
    body = text(ranks, nodes, gpu)
    manifests = [*rendered(body, services=True, **options), *rendered(body, **options)]
    for manifest in manifests:
        assert (manifest["kind"], wrong_by_schema(manifest), wrong_by_policy(manifest)) == (manifest["kind"], [], [])
        assert manifest["metadata"].get("namespace", manifest["metadata"]["name"]) == "team-a"
    [rayjob] = [manifest for manifest in manifests if manifest["kind"] == "RayJob"]
    [worker] = rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert worker["replicas"] == worker["minReplicas"] == worker["maxReplicas"] == nodes + extra
    pod = worker["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == (None if gpu == "cpu" else str(ranks))
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")["emptyDir"]["sizeLimit"]
    assert SHM_PER_RANK_GIB * ranks < int(shm.removesuffix("Gi")) < int(limits["memory"].removesuffix("Gi"))
    if gpu == "cpu":
        assert json.loads(json.loads(worker["rayStartParams"]["resources"])) == {"tune_slot": ranks}


def test_the_entrypoint_starts_or_resumes_the_study_with_the_whole_budget() -> None:
    config, rayjob = rendered(text(), study="one", budget_s=20 * 3600)
    command = shlex.split(rayjob["spec"]["entrypoint"])
    assert command[:3] == ["tune", "start", "/etc/ledgertune/job.toml"]
    assert command[command.index("--study") + 1] == "one"
    assert command[command.index("--budget") + 1] == "20-gpu-hours"
    assert {"--or-resume", "--json"} <= set(command)
    head = rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert {"name": "job", "configMap": {"name": config["metadata"]["name"]}} in head["volumes"]
    assert rayjob["spec"]["activeDeadlineSeconds"] > rayjob["spec"]["preRunningDeadlineSeconds"] + 20 * 3600 / 8


def test_the_same_job_file_is_the_same_study_and_another_is_another() -> None:
    options = RenderOptions(image=IMAGE)
    one, two = text(), text(nodes=2)
    assert study_name(job_of(one), one, options) == study_name(job_of(one), one, options)
    assert study_name(job_of(one), one, options) != study_name(job_of(two), two, options)
    assert study_name(job_of(one), one, options).startswith("llama3-8b-")


@pytest.mark.parametrize(
    ("body", "options", "expected"),
    [
        (text().replace('gpu = "H100-SXM"\n', ""), {}, "has no GPU to look at"),
        (text().replace("gpus_per_node = 8\n", ""), {}, "has no GPU to look at"),
        (text().replace("[budget]\ngpu_hours = 40\n", ""), {}, "needs a budget"),
        (text(more='[records]\ncommit_to = "/home/me/repo"\n'), {}, "the pods see the volume at /studies only"),
        (text(), {"image": "registry.acme.dev/ledgertune:latest"}, "latest means another program"),
        (text(), {"image": "registry.acme.dev:5000/ledgertune"}, "with its tag or digest"),
        (text(), {"image": "registry.example.com/ledgertune:0.1.0"}, "the image that you built"),
        (text(), {"study": "My_Study"}, "Kubernetes needs"),
        (text(), {"study": "a" * 48}, "Kubernetes needs"),
        (text(nodes=2), {"gpu_workers": 1}, "needs 2"),
        (text(), {"components": ("nothing",)}, "known are"),
        (text(), {"worker_memory_gib": 16}, "17 GiB of it are shared memory"),
    ],
)
def test_what_cannot_run_is_refused(body: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        rendered(body, **options)


def test_render_prints_yaml_or_one_document(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "job.toml"
    path.write_text(text())
    command = ["k8s", "render", str(path), "--image", IMAGE, "--study", "one", "--with", "rdma"]
    command += ["--toleration", "dedicated=train:NoSchedule", "--node-selector", "pool=h100"]
    assert main(command) == 0
    printed = list(yaml.safe_load_all(capsys.readouterr().out))
    assert main([*command, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["manifests"] == printed and facts["study"] == "one"
    pod = printed[1]["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
    assert pod["nodeSelector"] == {"pool": "h100"}
    assert {"key": "dedicated", "operator": "Equal", "value": "train", "effect": "NoSchedule"} in pod["tolerations"]
    assert main([*command, "--toleration", "x"]) == 2
    assert main([*command, "--node-selector", "x"]) == 2
    assert main([*command, "--wait", "0"]) == 2
