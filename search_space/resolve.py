"""From a job to a setting, without importing torch: shapes from presets, numbers or a Hugging Face config."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from search_space.errors import UserError
from search_space.hardware import find_hardware
from search_space.hardware import GIB
from search_space.hardware import Hardware
from search_space.job import ClusterSection
from search_space.job import Job
from search_space.job import ModelSection
from search_space.model import ModelShape
from search_space.model_huggingface import shape_from_huggingface
from search_space.model_torchtitan import presets
from search_space.setting import Setting


def shape_from_section(model: ModelSection) -> ModelShape:
    """The shape that a job's ``[model]`` section describes.

    Raises:
        UserError: it names a torchtitan function that no preset is shipped for, or a config that cannot be read.
    """
    if model.layers is not None:
        return _from_numbers(model)
    if model.huggingface is not None:
        return shape_from_huggingface(model.huggingface)
    function = (model.torchtitan or "").removeprefix("torchtitan.models.")
    entry = presets().get(function)
    if entry is None:
        raise UserError(
            f"model {function!r}: no shape is shipped for it; known are {', '.join(sorted(presets()))}; "
            "or give layers, hidden, heads, ffn and vocab beside it"
        )
    return ModelShape.from_json(entry["shape"])


def _from_numbers(model: ModelSection) -> ModelShape:
    stated = model.model_dump()
    values: dict[str, Any] = {key: stated[key] for key in ModelShape.__dataclass_fields__ if key in stated}
    values["name"] = model.name or "model"
    values["kv_heads"] = model.kv_heads or model.heads
    values["head_dim"] = model.head_dim or 0
    return ModelShape.from_json(values)


def hardware_from_section(cluster: ClusterSection, precision: str) -> Hardware:
    """The hardware table's entry with a job's overrides.

    Raises:
        UserError: no kind of device is named, or the table does not know it.
    """
    if cluster.gpu is None:
        raise UserError('cluster: gpu is not set; name a kind of device such as gpu = "H100-SXM", or "cpu"')
    changes: dict[str, Any] = {}
    try:
        hardware = find_hardware(cluster.gpu)
    except UserError:
        if cluster.hbm_gib is None or cluster.peak_tflops is None:
            raise
        hardware = find_hardware("H100-SXM")
        changes = {"name": cluster.gpu, "peak_flops": {}, "source": "the job file; links as H100-SXM unless stated"}
    if cluster.hbm_gib is not None:
        changes["memory_bytes"] = cluster.hbm_gib * GIB
    if cluster.nvlink_gb_s is not None:
        changes["domain_bandwidth"] = cluster.nvlink_gb_s * 1e9
    if cluster.nic_gb_s is not None:
        changes["nic_bandwidth"] = cluster.nic_gb_s * 1e9
    if cluster.peak_tflops is not None:
        changes["peak_flops"] = changes.get("peak_flops", hardware.peak_flops) | {precision: cluster.peak_tflops * 1e12}
    return hardware.override(**changes)


def setting_from_job(job: Job, *, shape: ModelShape | None = None, hardware: Hardware | None = None) -> Setting:
    """The setting that a job describes, as far as the job file and the shipped presets say it.

    Args:
        job: the job.
        shape: the model's shape where it is known already (read from a user's module in a child process).
        hardware: the devices where they are known already (detected or measured).

    Raises:
        UserError: model, device kind, sequence length or global batch is neither stated nor shipped.
    """
    entry = presets().get((job.model.torchtitan or "").removeprefix("torchtitan.models."), {})
    seq_len = job.recipe.seq_len or entry.get("seq_len")
    if seq_len is None:
        raise UserError("recipe: seq_len is not set and no preset says it; set [recipe] seq_len (tokens)")
    device = hardware or hardware_from_section(job.cluster, job.recipe.precision)
    per_node = job.cluster.gpus_per_node or 8
    batch = _global_batch(job, entry, seq_len, per_node * job.cluster.nodes)
    versions = {}
    for package in ("torch", "torchtitan"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return Setting(
        shape=shape or shape_from_section(job.model),
        hardware=device,
        devices_per_node=per_node,
        nodes=job.cluster.nodes,
        seq_len=seq_len,
        global_batch_seqs=batch,
        precision=job.recipe.precision,
        framework=job.search.framework,
        versions=versions,
        memory_margin=job.measure.memory_margin,
    )


def _global_batch(job: Job, entry: dict[str, Any], seq_len: int, devices: int) -> int:
    recipe = job.recipe
    if recipe.global_batch_seqs is not None:
        return recipe.global_batch_seqs
    if recipe.global_batch_tokens is not None:
        sequences, rest = divmod(recipe.global_batch_tokens, seq_len)
        if rest:
            raise UserError(
                f"recipe: global_batch_tokens {recipe.global_batch_tokens} is no multiple of seq_len {seq_len}"
            )
        return sequences
    if entry:
        stated = int(entry["global_batch_size"])
        return stated if stated > 0 else int(entry["local_batch_size"]) * devices
    raise UserError("recipe: set global_batch_tokens or global_batch_seqs (over all devices)")
