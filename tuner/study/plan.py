"""From a job to a plan: model, devices, recipe, baseline and pool, before anything is spent."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from importlib import metadata
from pathlib import Path
import platform
import shutil
from typing import Any

import psutil

from search_space.candidate import Candidate
from search_space.enumerate import enumerate_pool
from search_space.errors import UserError
from search_space.hardware import detect_hardware
from search_space.hardware import find_hardware
from search_space.hardware import GIB
from search_space.hardware import Hardware
from search_space.hardware import TABLE
from search_space.job import ClusterSection
from search_space.job import Job
from search_space.pool import canonical
from search_space.pool import Pool
from search_space.resolve import hardware_from_section
from search_space.setting import Setting
from trial_runner import devices
from trial_runner.recipe.base import BaseFunction
from trial_runner.recipe.base import describe
from trial_runner.recipe.config_file import Recipe


PACKAGES = ("torch", "torchtitan", "ray", "optuna", "mlflow")
"""Packages whose versions every record carries."""


@dataclass(frozen=True)
class StudyPlan:
    """Everything that is fixed before the first trial."""

    job: Job
    """The job."""

    base: BaseFunction
    """The user's torchtitan config function."""

    setting: Setting
    """Model, devices, scale, recipe."""

    pool: Pool
    """Every candidate, the baseline among them."""

    baseline: Candidate
    """The configuration run today."""

    device: str
    """``cpu`` or ``gpu``."""

    threads: int
    """Threads of one CPU slot."""

    workdir: str
    """Folder that relative paths in the user's config function mean."""

    notes: tuple[str, ...] = ()
    """What the user should know before the first trial."""

    module: tuple[str, str] | None = None
    """Text of a config file and the function in it that every trial runs; None: each candidate's is written."""

    @property
    def rehearsal(self) -> bool:
        """Whether ranks only pretend to train; nothing that comes of it is a measurement."""
        return self.job.measure.rehearse

    @property
    def recipe(self) -> Recipe:
        """Recipe in torchtitan's terms."""
        return Recipe(
            seq_len=self.setting.seq_len,
            global_batch_seqs=self.setting.global_batch_seqs,
            precision=self.setting.precision,
        )


def versions() -> dict[str, str]:
    """Installed versions of :data:`PACKAGES`, ledgertune and Python."""
    found = {"python": platform.python_version()}
    for package in (*PACKAGES, "ledgertune"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def make_plan(
    job: Job, peak_flops: float | None = None, workdir: str | None = None, *, share_nodes: bool = False
) -> StudyPlan:
    """Resolve a job on this machine.

    Args:
        job: the job.
        peak_flops: peak of one device, FLOP/s, when it is known from an earlier session of the same study.
        workdir: folder that relative paths of the config function mean; None: the user's, else the present one.
        share_nodes: whether gangs may share a node: a CPU slot then has one core, not its part of all of them.

    Raises:
        UserError: the model cannot be read, the recipe does not fit the baseline, or the cluster is contradictory.
    """
    if job.model.torchtitan is None:
        raise UserError('model: trials need torchtitan = "module:function"; a bare shape can only be planned')
    if job.search.framework != "torchtitan":
        raise UserError(
            f'search: framework = "{job.search.framework}" can be planned (`tune plan`), but trials run torchtitan; '
            "leave it out to start a study"
        )
    base = describe(job.model.torchtitan, job.model.path)
    notes = list(base.warnings)
    device, slots = _devices(job.cluster)
    threads = max(1, devices.num_cpu_slots() // slots) if device == "cpu" and not share_nodes else 1
    hardware = _hardware(job, device, slots, threads, peak_flops)
    seq_len = job.recipe.seq_len or base.seq_len
    num_devices = slots * job.cluster.nodes
    baseline = _baseline(job, base, num_devices)
    setting = Setting(
        shape=base.shape,
        hardware=hardware,
        devices_per_node=slots,
        nodes=job.cluster.nodes,
        seq_len=seq_len,
        global_batch_seqs=_global_batch(job, base, seq_len, baseline),
        precision=job.recipe.precision,
        framework="torchtitan",
        versions=versions(),
        memory_margin=job.measure.memory_margin,
    )
    baseline = _fit_micro_batch(baseline, setting)
    knobs = dict(job.search.knobs)
    if device == "cpu" and "compile" not in knobs and shutil.which("g++") is None:
        knobs["compile"] = (False,)
        notes.append("compile is left out: torch.compile on a CPU needs g++, which is not installed")
    # The loss stays as the user's function computes it unless the job lists other chunk counts.
    knobs.setdefault("loss_chunks", (baseline.loss_chunks,))
    pool = enumerate_pool(setting, knobs, job.search.allow_numeric_changes)
    where = workdir or base.user_path or str(Path.cwd())
    return StudyPlan(job, base, setting, _with(pool, baseline), baseline, device, threads, where, tuple(notes))


def _devices(cluster: ClusterSection) -> tuple[str, int]:
    """Kind of device and devices per node: as stated, else as found on this machine."""
    gpus = devices.num_gpus()
    if cluster.gpu is not None and cluster.gpu.lower() == "cpu":
        device = "cpu"
    elif cluster.gpu is not None or gpus:
        device = "gpu"
    else:
        device = "cpu"
    found = gpus if device == "gpu" else devices.num_cpu_slots()
    slots = cluster.gpus_per_node or found
    if not slots:
        raise UserError(
            f'cluster: gpu = {cluster.gpu!r}, but no GPU is visible here; set gpus_per_node, or gpu = "cpu"'
        )
    return device, slots


def _hardware(job: Job, device: str, slots: int, threads: int, peak_flops: float | None) -> Hardware:
    """The hardware table's entry with the job's overrides; on a CPU with this machine's own figures."""
    cluster, precision = job.cluster, job.recipe.precision
    if device == "cpu":
        stated = cluster.peak_tflops * 1e12 if cluster.peak_tflops else None
        peak = peak_flops or stated or devices.cpu_peak_flops(precision, threads)
        memory = cluster.hbm_gib * GIB if cluster.hbm_gib else psutil.virtual_memory().total / slots
        hardware = find_hardware("cpu").override(peak_flops={precision: peak}, memory_bytes=memory)
        return _with_links(hardware, cluster)
    named = cluster if cluster.gpu else cluster.model_copy(update={"gpu": _detected(devices.gpu_names())})
    return hardware_from_section(named, precision)


def _with_links(hardware: Hardware, cluster: ClusterSection) -> Hardware:
    if cluster.nvlink_gb_s:
        hardware = hardware.override(domain_bandwidth=cluster.nvlink_gb_s * 1e9)
    if cluster.nic_gb_s:
        hardware = hardware.override(nic_bandwidth=cluster.nic_gb_s * 1e9)
    return hardware


def _detected(names: list[str]) -> str:
    """The table's name of the GPUs that the driver lists.

    Raises:
        UserError: the driver's name is none of the table's.
    """
    first = names[0] if names else ""
    found = detect_hardware(first)
    if found is None:
        raise UserError(
            f"cluster: GPU {first!r} is not in the hardware table, so its peak is unknown; set cluster.gpu to one of "
            f"{', '.join(TABLE)}, or cluster.peak_tflops and hbm_gib"
        )
    return found


def _baseline(job: Job, base: BaseFunction, num_devices: int) -> Candidate:
    """The configuration run today: the job's, else the torchtitan function as it is.

    Raises:
        UserError: its degrees do not multiply to the device count.
    """
    values: dict[str, Any] = {k: v for k, v in base.knobs.items() if k != "pipeline_microbatch"}
    values["micro_batch"] = base.local_batch
    if values["pipeline_parallel"] > 1:
        values["micro_batch"] = base.knobs["pipeline_microbatch"]
        values["virtual_stages"] = 1 if values["schedule"] in ("1F1B", "GPipe") else 2
    if job.baseline:
        stated = dict(job.baseline)
        if "dp" in stated:
            stated["data_parallel_shard"], stated["data_parallel_replicate"] = stated.pop("dp"), 1
        values |= {"data_parallel_shard": -1, "data_parallel_replicate": 1} | stated
    if values["data_parallel_shard"] == -1:
        others = (
            values["tensor_parallel"]
            * values["pipeline_parallel"]
            * values["context_parallel"]
            * values["data_parallel_replicate"]
        )
        values["data_parallel_shard"] = max(1, num_devices // others)
    baseline = Candidate.from_json(values)
    if baseline.num_devices != num_devices:
        raise UserError(
            f"baseline: its degrees multiply to {baseline.num_devices} devices, the cluster has {num_devices}; "
            "set [baseline] tensor_parallel, pipeline_parallel, … so that they match"
        )
    return canonical(baseline)


def _global_batch(job: Job, base: BaseFunction, seq_len: int, baseline: Candidate) -> int:
    if job.recipe.global_batch_seqs is not None:
        return job.recipe.global_batch_seqs
    if job.recipe.global_batch_tokens is not None:
        seqs, rest = divmod(job.recipe.global_batch_tokens, seq_len)
        if rest or not seqs:
            raise UserError(f"recipe: global_batch_tokens {job.recipe.global_batch_tokens} is no multiple of {seq_len}")
        return seqs
    return base.global_batch if base.global_batch > 0 else base.local_batch * baseline.data_parallel


def _fit_micro_batch(baseline: Candidate, setting: Setting) -> Candidate:
    """The baseline with the largest micro-batch not above its own that divides the recipe's batch.

    Raises:
        UserError: the recipe's batch does not divide over the baseline's data-parallel ranks.
    """
    per_replica, rest = divmod(setting.global_batch_seqs, baseline.data_parallel)
    if rest or not per_replica:
        raise UserError(
            f"recipe: a global batch of {setting.global_batch_seqs} sequences does not divide over the baseline's "
            f"{baseline.data_parallel} data-parallel ranks; change global_batch_seqs or [baseline]"
        )
    fitting = max(b for b in range(1, per_replica + 1) if per_replica % b == 0 and b <= baseline.micro_batch)
    return replace(baseline, micro_batch=fitting)


def _with(pool: Pool, baseline: Candidate) -> Pool:
    """The pool with the baseline in it."""
    if len(pool) and any(pool.candidate(i) == baseline for i in range(len(pool))):
        return pool
    names = tuple(dict.fromkeys([*pool.env_names, baseline.env]))
    alone = Pool.from_candidates([baseline])
    alone.columns["env"][:] = names.index(baseline.env)
    return Pool.concatenate([replace(pool, env_names=names), replace(alone, env_names=names)])
