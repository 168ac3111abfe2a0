"""A job as Kubernetes manifests, from the same files that kustomize reads."""

from __future__ import annotations

from collections.abc import Sequence
import copy
from dataclasses import dataclass
from dataclasses import field
import hashlib
import json
import re
import shlex
from typing import Any

from search_space.errors import UserError
from search_space.job import Job
from trial_runner.devices import shared_memory_gib
from trial_runner.devices import SHM_PER_RANK_GIB
from tuner.k8s.kustomize import add_component
from tuner.k8s.kustomize import build
from tuner.k8s.kustomize import COMPONENTS
from tuner.k8s.kustomize import FOLDER
from tuner.k8s.kustomize import identity
from tuner.k8s.kustomize import Manifest
from tuner.k8s.kustomize import placed_in


PART_OF = "app.kubernetes.io/part-of"
JOB_HASH = "ledgertune.io/job-sha256"
"""Annotation: hash of the job file, so that another job under the same study name is noticed."""

STUDY = "ledgertune.io/study"
"""Label of everything that belongs to one study."""

OURS = "registry.example.com/ledgertune"
"""The image that the files name where ours belongs; it exists nowhere."""

CPU_PER_DEVICE, MEMORY_PER_DEVICE_GIB = 8, 64
"""A GPU worker's cores and memory for each GPU, unless stated: what nodes with 8 GPUs at least have."""

SLACK_S = 3600
"""Added to a study's deadline for planning, image pulls between trials and the commit, seconds."""


@dataclass(frozen=True, kw_only=True)
class RenderOptions:
    """What the job file does not say."""

    image: str
    """Container image made from our Dockerfile, with a tag or digest."""

    namespace: str = "ledgertune"

    study: str | None = None
    """Name of study, RayJob and ConfigMap; None: the model's name and a hash of the job file."""

    budget_s: float | None = None
    """Device-seconds; None: the job's."""

    gpu_workers: int | None = None
    """Worker pods; None: as many as one trial needs. More let trials run at once."""

    components: tuple[str, ...] = ()
    """Of :data:`COMPONENTS`."""

    node_selector: dict[str, str] = field(default_factory=dict)
    """Labels that a worker's node must have."""

    tolerations: tuple[dict[str, str], ...] = ()
    """Taints that workers bear, as Kubernetes writes them."""

    worker_cpu: int | None = None
    """Cores of a worker (count)."""

    worker_memory_gib: int | None = None
    """Memory of a worker, its shared memory included (GiB)."""

    env_secret: str | None = None
    """Secret whose keys become environment variables of Ray's pods, such as HF_TOKEN."""

    wait_s: int = 3600
    """Longest wait for nodes and images before the job counts as failed (seconds)."""


def render(job: Job, text: str, options: RenderOptions, services: bool = False) -> list[Manifest]:
    """The manifests of a study.

    Args:
        job: the job, as it was read from ``text``.
        text: the job file.
        options: what it does not say.
        services: what studies share (accounts, network rules, storage, MLflow) instead of the study.

    Raises:
        UserError: the job cannot run on a cluster as it stands, or an option does not fit it.
    """
    devices = _check(job, options)
    name = study_name(job, text, options)
    manifests = build(FOLDER / "base")
    on_cpu = (job.cluster.gpu or "").lower() == "cpu"
    wanted = (*(["cpu"] if on_cpu else []), *options.components)
    for component in dict.fromkeys(wanted):
        manifests = add_component(FOLDER / "components" / component, manifests)
    found = {identity(manifest): _with_image(manifest, options.image) for manifest in manifests}
    config, rayjob = found.pop(("ConfigMap", "ledgertune-study")), found.pop(("RayJob", "ledgertune-study"))
    study = [_config(config, name, text), _rayjob(rayjob, name, job, text, devices, options, on_cpu)]
    return [placed_in(manifest, options.namespace) for manifest in (found.values() if services else study)]


def study_name(job: Job, text: str, options: RenderOptions) -> str:
    """The study's name: as asked, else such that the same job file always has the same.

    Raises:
        UserError: Kubernetes allows no such name.
    """
    if options.study is not None:
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", options.study):
            raise UserError(
                f"--study {options.study!r}: Kubernetes needs up to 47 lower-case letters, digits and -, the first "
                "a letter"
            )
        return options.study
    model = str(job.model.torchtitan).split(":")[-1]
    stem = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:36].strip("-") or "study"
    return f"{stem if stem[0].isalpha() else 'm-' + stem}-{digest(text)[:8]}"


def digest(text: str) -> str:
    """Hash of a job file, hex."""
    return hashlib.sha256(text.encode()).hexdigest()


def _check(job: Job, options: RenderOptions) -> int:
    """Devices of one trial.

    Raises:
        UserError: something is missing, or does not exist inside the pods.
    """
    cluster = job.cluster
    if job.model.torchtitan is None:
        raise UserError('model: trials need torchtitan = "module:function"; a bare shape can only be planned')
    if cluster.gpu is None or cluster.gpus_per_node is None:
        raise UserError(
            "cluster: the pod that plans the study has no GPU to look at; write gpu and gpus_per_node under [cluster]"
        )
    commit_to = job.records.commit_to
    if commit_to is not None and not commit_to.startswith("/studies/"):
        raise UserError(
            f"records.commit_to = {commit_to!r}: the pods see the volume at /studies only; leave it out (the winner is "
            "then committed in the study's own repository, on that volume), or name a path under /studies/"
        )
    if options.budget_s is None and job.budget.gpu_hours is None:
        raise UserError("a study needs a budget: --budget 40-gpu-hours, or gpu_hours under [budget] in the job file")
    if options.image.startswith(OURS) or not re.fullmatch(r"\S+(:[\w][\w.-]*|@sha256:[0-9a-f]{64})", options.image):
        raise UserError(
            f"--image {options.image!r}: name the image that you built from the Dockerfile and pushed, with its tag or "
            "digest (docs/kubernetes.md)"
        )
    if options.image.endswith(":latest"):
        raise UserError(
            f"--image {options.image!r}: latest means another program tomorrow, and a resumed study refuses other "
            "versions; give a tag that stays, or a digest"
        )
    if options.gpu_workers is not None and options.gpu_workers < cluster.nodes:
        raise UserError(
            f"--gpu-workers {options.gpu_workers}: one trial of this job needs {cluster.nodes} (cluster.nodes)"
        )
    unknown = [name for name in options.components if name not in COMPONENTS]
    if unknown:
        raise UserError(f"--with {unknown[0]!r}: known are {', '.join(COMPONENTS)}")
    shared = shared_memory_gib(cluster.gpus_per_node)
    if options.worker_memory_gib is not None and options.worker_memory_gib <= shared:
        raise UserError(
            f"--worker-memory {options.worker_memory_gib}: {shared} GiB of it are shared memory (Ray's object store "
            f"and {SHM_PER_RANK_GIB} GiB for each of {cluster.gpus_per_node} ranks); give more"
        )
    return cluster.nodes * cluster.gpus_per_node


def _with_image(manifest: Manifest, image: str) -> Manifest:
    """A manifest whose containers of ours run an image."""

    def put(value: Any) -> Any:
        if isinstance(value, list):
            return [put(item) for item in value]
        if not isinstance(value, dict):
            return value
        done = {key: put(item) for key, item in value.items()}
        if isinstance(done.get("image"), str) and done["image"].startswith(f"{OURS}:"):
            done["image"] = image
        return done

    return dict(put(manifest))


def _config(manifest: Manifest, name: str, text: str) -> Manifest:
    done = _named(manifest, name)
    done["data"] = {"job.toml": text}
    # What a running study reads cannot be changed under it.
    done["immutable"] = True
    return done


def _named(manifest: Manifest, name: str) -> Manifest:
    done = copy.deepcopy(manifest)
    done["metadata"]["name"] = name
    done["metadata"]["labels"][STUDY] = name
    return done


def _rayjob(
    manifest: Manifest, name: str, job: Job, text: str, devices: int, options: RenderOptions, on_cpu: bool
) -> Manifest:
    done = _named(manifest, name)
    done["metadata"].setdefault("annotations", {})[JOB_HASH] = digest(text)
    spec = done["spec"]
    spec["entrypoint"] = shlex.join(_entrypoint(name, options))
    spec["preRunningDeadlineSeconds"] = options.wait_s
    budget = options.budget_s if options.budget_s is not None else 3600 * (job.budget.gpu_hours or 0)
    # Devices that stand idle between trials are no part of the budget, so the job has an end in wall time too.
    spec["activeDeadlineSeconds"] = int(2 * budget / devices) + options.wait_s + SLACK_S
    cluster = spec["rayClusterSpec"]
    head, [worker] = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    for template in (head["template"], worker["template"], spec["submitterPodTemplate"]):
        template["metadata"]["labels"][STUDY] = name
    job_volume = next(volume for volume in head["template"]["spec"]["volumes"] if volume["name"] == "job")
    job_volume["configMap"]["name"] = name
    _size_workers(worker, job, options, on_cpu)
    if options.env_secret is not None:
        for template in (head["template"], worker["template"]):
            template["spec"]["containers"][0]["envFrom"] = [{"secretRef": {"name": options.env_secret}}]
    return done


def _entrypoint(name: str, options: RenderOptions) -> Sequence[str]:
    command = ["tune", "start", "/etc/ledgertune/job.toml", "--study", name, "--or-resume", "--address", "auto"]
    command += ["--mlflow-uri", "http://ledgertune-mlflow:5000", "--json"]
    if options.budget_s is not None:
        command += ["--budget", f"{options.budget_s / 3600:g}-gpu-hours"]
    return command


def _size_workers(worker: Manifest, job: Job, options: RenderOptions, on_cpu: bool) -> None:
    ranks = job.cluster.gpus_per_node
    assert ranks is not None
    count = options.gpu_workers or job.cluster.nodes * max(1, job.search.parallel_trials)
    worker["replicas"] = worker["minReplicas"] = worker["maxReplicas"] = count
    pod = worker["template"]["spec"]
    container = pod["containers"][0]
    shared = shared_memory_gib(ranks)
    cpu = options.worker_cpu or (ranks if on_cpu else CPU_PER_DEVICE * ranks)
    memory = options.worker_memory_gib or (shared + 4 * ranks if on_cpu else MEMORY_PER_DEVICE_GIB * ranks)
    sizes = {"cpu": str(cpu), "memory": f"{memory}Gi"}
    if on_cpu:
        worker["rayStartParams"]["resources"] = json.dumps(json.dumps({"tune_slot": ranks}))
    else:
        sizes["nvidia.com/gpu"] = str(ranks)
    for kind in ("requests", "limits"):
        container["resources"][kind].update(sizes)
    next(volume for volume in pod["volumes"] if volume["name"] == "shm")["emptyDir"]["sizeLimit"] = f"{shared}Gi"
    if options.node_selector:
        pod["nodeSelector"] = {**pod.get("nodeSelector", {}), **options.node_selector}
    if options.tolerations:
        pod["tolerations"] = [*pod.get("tolerations", []), *options.tolerations]
