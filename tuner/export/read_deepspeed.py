"""DeepSpeed JSON as a baseline."""

from __future__ import annotations

import json
import re
from typing import Any

from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.model import ModelShape
from search_space.pool import canonical
from tuner.export.deepspeed import ELEMENTS
from tuner.export.imported import Imported
from tuner.export.megatron import block_parameters_of


KNOWN = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
    "zero_optimization",
    "tensor_parallel",
    "pipeline",
    "activation_checkpointing",
    "compile",
}
"""Top-level keys that mean something here."""

COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/|#[^\n]*', re.S)
"""A text in quotes, or a comment."""


def read(
    text: str, devices: int | None = None, framework: str = "deepspeed", shape: ModelShape | None = None
) -> Imported:
    """Read a DeepSpeed file; comments may stand in it.

    Args:
        text: the file.
        devices: devices of the job; they check the degrees.
        framework: whose knobs the candidate is to be in.
        shape: the model, which such a file does not say; it turns bucket sizes into blocks.

    Raises:
        UserError: it is no JSON object of DeepSpeed's, or its batch sizes contradict each other.
    """
    values = parse(text)
    if not KNOWN & set(values):
        raise UserError(f"import: no DeepSpeed key found (looked for {', '.join(sorted(KNOWN)[:4])} …)")
    assumed: list[str] = []
    missing = ["[model] (a DeepSpeed file does not say it)", "[recipe] seq_len", '[cluster] gpu, such as "H100-SXM"']
    zero = _section(values, "zero_optimization")
    stage = _whole(zero.get("stage", 0), "zero_optimization.stage", least=0)
    if stage > 3:
        raise UserError(f"import: zero_optimization.stage {stage}, known are 0 to 3")
    micro, steps, batch, dp = _batch(values, assumed)
    tp = max(
        1, _whole(_section(values, "tensor_parallel").get("autotp_size", 1), "tensor_parallel.autotp_size", least=0)
    )
    stages = _section(values, "pipeline").get("stages", 1)
    pp = _whole(stages, "pipeline.stages") if isinstance(stages, int) else 1
    if dp is None:
        if devices is None:
            missing.append("devices (--gpus N): the file states no batch that tells the data-parallel ranks")
            dp = 1
        else:
            dp, rest = divmod(devices, tp * pp)
            if rest or not dp:
                raise UserError(f"import: tensor × pipeline parallel = {tp * pp} does not divide {devices} devices")
        batch = micro * steps * dp
    elif devices is not None and devices != dp * tp * pp:
        raise UserError(
            f"import: --gpus {devices}, but the batch sizes mean {dp} data-parallel ranks × {tp * pp}; one of "
            "them is wrong"
        )
    interval = _section(values, "pipeline").get("activation_checkpoint_interval", 0)
    checkpointed = bool(interval) or "activation_checkpointing" in values
    knobs: dict[str, Any] = {
        "tensor_parallel": tp,
        "pipeline_parallel": pp,
        "micro_batch": micro,
        "activation_checkpoint": "full" if checkpointed else "none",
        "compile": bool(_section(values, "compile").get("deepcompile", False)),
        "loss_chunks": 1,
    }
    size = zero.get("reduce_bucket_size", ELEMENTS)
    size = ELEMENTS if size == "auto" else size
    if shape is not None and size != ELEMENTS:
        blocks = _whole(size, "zero_optimization.reduce_bucket_size") * tp / block_parameters_of(shape)
        knobs["fsdp_bucket"] = max(1, round(blocks))
    knobs |= _sharding(stage, dp, framework, assumed)
    total = dp * tp * pp
    each = min(8, total)
    if total % each == 0:
        assumed.append(f"{each} devices a node")
    ignored = [key for key in values if key not in KNOWN]
    if shape is None and size != ELEMENTS:
        ignored.append("zero_optimization.reduce_bucket_size (--model turns it into blocks)")
    ignored += [f"zero_optimization.{key}" for key in zero if "offload" in key]
    if _section(values, "fp16").get("enabled") is True:
        assumed.append("fp16 is read as bf16: the same arithmetic rate and bytes")
    switches = [_section(values, name).get("enabled") for name in ("bf16", "fp16")]
    precision = "bf16" if True in switches else None if "auto" in switches else "fp32"
    if precision is None:
        missing.append("[recipe] precision (the file leaves it to its launcher)")
    return Imported(
        kind="deepspeed",
        framework=framework,
        candidate=canonical(Candidate.from_json(knobs)),
        devices_per_node=each if total % each == 0 else None,
        nodes=total // each if total % each == 0 else None,
        global_batch_seqs=batch,
        precision=precision,
        ignored=tuple(ignored),
        assumed=tuple(assumed),
        missing=tuple(missing),
    )


def parse(text: str) -> dict[str, Any]:
    """The values of a JSON file with comments and trailing commas.

    Raises:
        UserError: it is no JSON object.
    """
    bare = COMMENT.sub(lambda match: match[1] or "", text.lstrip("\ufeff"))
    bare = re.sub(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', lambda match: match[1] or "", bare)
    try:
        values = json.loads(bare)
    except json.JSONDecodeError as error:
        raise UserError(f"import: no JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"import: a JSON object is needed, found {type(values).__name__}")
    return values


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name, {})
    if isinstance(found, bool):
        return {"enabled": found}
    if not isinstance(found, dict):
        raise UserError(f"import: {name} = {found!r}, an object is needed")
    return found


def _whole(value: Any, name: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < least:
        raise UserError(f"import: {name} = {value!r}, needs a whole number of at least {least}")
    return int(value)


def _batch(values: dict[str, Any], assumed: list[str]) -> tuple[int, int, int, int | None]:
    """(micro-batch, accumulation steps, global batch, data-parallel ranks where all three sizes tell them)."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    found = [values.get(name) for name in names]
    found = [None if value == "auto" else value for value in found]
    micro, steps, batch = (None if v is None else _whole(v, name) for v, name in zip(found, names))
    if micro is None:
        micro = 1
        assumed.append("micro-batch 1: the file does not state it")
    if batch is not None and steps is not None:
        ranks, rest = divmod(batch, micro * steps)
        if rest or not ranks:
            raise UserError(
                f"import: train_batch_size {batch} is no multiple of micro-batch {micro} × accumulation {steps}"
            )
        return micro, steps, batch, ranks
    if steps is None:
        steps = 1
        assumed.append("one accumulation step: the file does not state it")
    if batch is not None:
        ranks, rest = divmod(batch, micro)
        return micro, 1, batch, ranks if not rest else None
    return micro, steps, micro * steps, None


def _sharding(stage: int, dp: int, framework: str, assumed: list[str]) -> dict[str, Any]:
    if framework != "torchtitan":
        return {"data_parallel_replicate": dp, "data_parallel_shard": 1, "zero_stage": stage}
    if stage == 0:
        return {"data_parallel_replicate": dp}
    if stage == 1:
        assumed.append("ZeRO-1 is nearest to sharding without resharding (ZeRO-2)")
    return {
        "data_parallel_shard": dp,
        "reshard_after_forward": "always" if stage == 3 else "never",
    }
