"""From a measured row to a setting, a candidate and the habits of its framework, or the reason why not."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from functools import cache
from importlib import resources
import json
from math import log2
import re
from typing import Any

from pruning.accounts.account import Account
from pruning.accounts.account import find_account
from pruning.validate.rows import Row
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.hardware import find_hardware
from search_space.hardware import Hardware
from search_space.model import ModelShape
from search_space.setting import Setting


@dataclass(frozen=True)
class Priced:
    """A row in the ledger's terms."""

    row: Row
    """The row."""

    setting: Setting
    """What its group has in common."""

    candidate: Candidate
    """Its configuration."""

    account: Account
    """Its framework's habits, kernels included."""

    group: tuple[str, ...]
    """Table, model, hardware, GPUs, sequence, global batch (and whether before a fix)."""

    family: str
    """Framework and hardware that coefficients are shared in."""

    links: tuple[float, float]
    """Bandwidths inside a node and of the network, bytes/s and device."""

    judged: bool
    """Whether its memory can be judged: the table says what is recomputed."""

    shaped: bool
    """Whether the table gives the model's whole shape; else its absolute memory rests on assumed sizes."""


class CannotPrice(Exception):
    """A row lacks something that pricing needs; the message says what."""


class Refused(CannotPrice):
    """A row whose layout a validity rule refuses: a verdict, not a gap."""


@cache
def _models() -> dict[str, dict[str, Any]]:
    text = resources.files("pruning").joinpath("validate/models.json").read_text(encoding="utf-8")
    loaded: dict[str, dict[str, Any]] = json.loads(text)
    return loaded


def _known(model: str) -> dict[str, Any]:
    """The published shape of a model that a table only names; empty when unknown."""
    name = re.sub(r"\(.*?\)|sft|lora|cross_entropy|paxml|fp8|bf16", "", model.lower()).strip().replace("_", "-")
    name = re.sub(r"[\s]+", "-", name).strip("-")
    name = (
        name.replace("gpt3-", "gpt-").replace("deepseekv3", "deepseek-v3").replace("deepseek-v3-16b", "deepseek_v3-16b")
    )
    name = re.sub(r"^(gpt5b|gpt-5b).*", "gpt-5b", name)
    return _models().get(name, {})


def shape_of(row: Row) -> ModelShape:
    """The row's model, its cells first, else the published shape of that name.

    Raises:
        CannotPrice: neither says enough.
    """
    known = dict(_known(row["model"]))
    values: dict[str, Any] = {}
    for column in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"):
        stated = row.whole(column)
        values[column] = stated if stated else known.get(column)
    experts = re.search(r"(?:moe|mixtral)\S*-e(\d+)$", row["model"].lower())
    if experts and not known:
        known = {"experts": int(experts[1]), "experts_active": min(2, int(experts[1]))}
    if not known and re.search(
        r"moe|hybrid|nemotron.3|ci-nemotron|a\d+b|deepseek|kimi|gpt.?oss|scout|16e", row["model"].lower()
    ):
        raise CannotPrice(f"model {row['model'] or 'unnamed'}: experts or hybrid layers are not in the table")
    if values["hidden"] and not values["heads"] and values["hidden"] % 128 == 0:
        values["heads"] = values["hidden"] // 128
    if values["hidden"] and not values["ffn"]:
        values["ffn"] = 4 * values["hidden"]
    if values["hidden"] and not values["vocab"]:
        values["vocab"] = 50304
    missing = [column for column in ("layers", "hidden", "heads") if not values[column]]
    if missing:
        raise CannotPrice(f"model {row['model'] or 'unnamed'}: {', '.join(missing)} not in the table")
    values["kv_heads"] = values["kv_heads"] or values["heads"]
    gated = row.flag("gated_mlp")
    values["gated_mlp"] = known.get("gated_mlp", True) if gated is None else gated
    if known.get("experts") and "expert_ffn" not in known:
        known["expert_ffn"] = values["ffn"]
    if row.table == "megatron_lm_ci_golden":
        known["tied_embeddings"] = "untie-embeddings-and-output-weights=True" not in row["notes"]
    extra = {k: v for k, v in known.items() if k not in values}
    return ModelShape(name=row["model"], **values, **extra)


_DEVICES = (
    (r"gb300", "GB300"),
    (r"gb200", "GB200"),
    (r"b300", "B300"),
    (r"b200", "B200"),
    (r"h200", "H200"),
    (r"h100-96gb|h100 96", "H100-96GB"),
    (r"h100", "H100-SXM"),
    (r"a800", "A800"),
    (r"a100-40gb", "A100-40GB"),
    (r"a100", "A100-80GB"),
    (r"mi355x", "MI355X"),
    (r"mi325x", "MI325X"),
    (r"mi300x", "MI300X"),
    (r"v5p", "TPU-v5p"),
    (r"v5e", "TPU-v5e"),
    (r"tpu v4", "TPU-v4"),
)


def hardware_of(row: Row) -> Hardware:
    """The hardware table's entry for the row's device.

    Raises:
        CannotPrice: the table has none.
    """
    text = row["hardware"].lower()
    for pattern, name in _DEVICES:
        if re.search(pattern, text):
            return find_hardware(name)
    raise CannotPrice(f"hardware {row['hardware'] or 'unnamed'} is not in the hardware table")


_PROBED = re.compile(r"measured busbw GB/s AR/AG/RS ([\d.]+)/\S+ intra ([\d.]+)/([\d.]+)/([\d.]+)")


def probed_links(row: Row, hardware: Hardware) -> tuple[float, float]:
    """Bandwidths inside a node and of the network, bytes/s and device, as a probe before the run measured them.

    The all-reduce bus bandwidth over all nodes is what a node's network cards carry together; a device's share is an
    eighth of it. Inside a node, sequence parallelism uses all-gather and reduce-scatter, about half as fast as an
    all-reduce that the switch does. Rows without a probe in their notes have the hardware table's links.
    """
    found = _PROBED.search(row["notes"])
    if not found:
        return hardware.domain_bandwidth, hardware.nic_bandwidth
    across, reduce, gather, scatter = (float(text) * 1e9 for text in found.groups())
    several = (row.whole("gpus") or 0) > 8
    inside = min(gather, scatter) if row.flag("sp") and (row.whole("tp", 1) or 1) > 1 else reduce
    network = min(across / 8, hardware.nic_bandwidth) if several else hardware.nic_bandwidth
    return min(inside, hardware.domain_bandwidth), network


def _framework(row: Row) -> str:
    text = row["framework"].lower()
    if "nanotron" in text:
        return "nanotron"
    if "torchtitan" in text:
        return "torchtitan"
    if any(word in text for word in ("fsdp", "foundry", "deepspeed 0", "maxtext", "pax")):
        return "fsdp1"
    return "megatron"


def account_of(row: Row) -> Account:
    """The framework's habits with the row's kernels and sequence parallelism."""
    account = find_account(_framework(row))
    kernel = row["attention_kernel"].lower()
    changes: dict[str, Any] = {"expert_imbalance": 1.0}
    if kernel in ("torch",) or "unfused" in kernel:
        changes["attention"] = "unfused"
    elif (kernel == "fused" and row.table.startswith("hagemann")) or "fused softmax" in kernel:
        changes["attention"] = "fused_softmax"
    if "v1" in kernel:
        changes["attention_speed"] = 0.6
    parallel = row.flag("sp")
    if account.name in ("megatron", "nanotron") and not parallel:
        changes["sequence_parallel"] = bool(parallel)
    if row.table.startswith("hagemann"):
        changes["fused_norm"] = "rms" in kernel
        # bf16 gradients without an fp32 buffer: nothing larger fits in the runs that ran
        changes |= {
            "fused_activation": False,
            "gradient_bytes": 2.0,
            "balances_head": True,
            "parallel_logits": False,
            "logit_bytes": 14.0,
        }
    if account.name == "nanotron":
        changes |= _nanotron_build(row)
    if account.name == "torchtitan" and not row["framework_version"].startswith("0.3"):
        changes["copies_attention_output"] = False
        if "bf16 params" in row["precision"]:
            changes |= {"parameter_bytes": 2.0, "gradient_bytes": 2.0}
        if "bf16 states" in row["optimizer_note"]:
            changes["optimizer_bytes"] = 4.0
        if "bf16 grad reduce" in row["notes"]:
            changes["reduce_bytes"] = 2.0
    if "liger" in row["framework"].lower():
        changes |= {"logit_bytes": 0.5, "optimizer_bytes": 0.0 if "offload" in row["optimizer_note"].lower() else 8.0}
    if account.name == "megatron" and "BF16 opt" not in row["optimizer_note"] and row["precision"] == "fp32":
        changes["parameter_bytes"] = 4.0
    if "fp4" in row["precision"].lower():
        changes["product_speed"] = 1.3
    return replace(account, **changes)


REGATHERS_FROM, KEEPS_IN_PIPELINES_FROM = 14_018_000, 14_090_000
"""Job numbers of the nanotron table at which what a block keeps changes; the source names no build."""


def _nanotron_build(row: Row) -> dict[str, Any]:
    """What a nanotron block keeps beyond its itemised set, by the number of the job that ran it.

    Runs of equal configuration differ by about two gathered inputs a block: without a pipeline, jobs up to 14,018,000
    hold them (1.75 hidden widths a token) and later ones gather again; in pipelines, jobs from 14,090,000 on (the
    pipeline fix) hold them for all micro-batches in flight but two.
    """
    job, pp = int(row["row_id"].partition(":")[2] or 0), row.whole("pp", 1) or 1
    if pp == 1:
        return {"token_extra": 0.0, "parallel_extra": 2.0, "gathered_extra": 1.75 if job < REGATHERS_FROM else 0.0}
    return {"gathered_extra": 1.55 * (1 - 2 / pp) if job >= KEEPS_IN_PIPELINES_FROM else 0.0}


def _implied_seq_len(row: Row) -> int | None:
    """Sequence length from what a row's notes say, or from tokens per second × step time / batch."""
    stated = re.search(r"sequence length (\d+)", row["notes"])
    if stated:
        return int(stated[1])
    rate, gpus, step = row.number("tokens_per_s_per_gpu"), row.number("gpus"), row.number("step_time_s")
    batch = row.number("global_batch_seqs")
    if not rate or not gpus or not step or not batch:
        return None
    implied = rate * gpus * step / batch
    whole = 2 ** round(log2(implied))
    return int(whole) if abs(implied / whole - 1) < 0.02 else None


def _checkpoint(row: Row) -> dict[str, Any]:
    text = row["act_ckpt"].lower()
    if text.startswith("memory_budget="):
        return {"activation_checkpoint": "memory_budget", "memory_budget": float(text.split("=")[1])}
    if text.startswith(("full", "minimal_with", "qkv_proj")):
        return {"activation_checkpoint": "full"}
    if text.startswith("selective") and re.search(r"mlp|moe|norm|mla_up_proj|shared_expert", text):
        # named modules: about the share of a block's kept tensors that stays
        share = 0.2 if re.search(r"\bmoe\b", text) else 0.45 if "mlp" in text else 0.75
        return {"activation_checkpoint": "memory_budget", "memory_budget": share}
    if text.startswith(("selective", "minimal")):
        return {"activation_checkpoint": "selective"}
    return {}


def translate(row: Row) -> Priced:
    """The row in the ledger's terms.

    Raises:
        CannotPrice: something that pricing needs is absent or contradictory.
    """
    shape, hardware = shape_of(row), hardware_of(row)
    gpus = row.whole("gpus")
    if not gpus and row.table == "megatron_lm_ci_golden" and "DGX" in row["hardware"]:
        gpus = 8  # every DGX row of that table that states it ran on one node
    if not gpus:
        raise CannotPrice("number of GPUs not in the table")
    seq_len = row.whole("seq_len") or _implied_seq_len(row)
    if not seq_len:
        raise CannotPrice("sequence length not in the table")
    tp, pp, cp = (row.whole(name, 1) or 1 for name in ("tp", "pp", "cp"))
    dp, rest = divmod(gpus, tp * pp * cp)
    if rest or dp < 1:
        raise CannotPrice(f"tp {tp} × pp {pp} × cp {cp} does not divide {gpus} GPUs")
    framework, account = _framework(row), account_of(row)
    micro, batch = row.whole("micro_batch"), row.whole("global_batch_seqs")
    accumulate = row.whole("grad_accum", 1) or 1
    if not micro and batch:
        micro = max(1, batch // (dp * accumulate)) if row.number("grad_accum") and "MBS not" not in row["notes"] else 1
    if micro and pp > 1 and "microbatch size not stated" in row["notes"]:
        micro = 1
    if not batch and micro:
        batch = micro * dp * accumulate
    if not micro or not batch:
        raise CannotPrice("micro-batch and global batch not in the table")
    if batch % (dp * micro):
        micro = max(1, min(micro, batch // dp))
        if batch < dp or batch % (dp * micro):
            raise CannotPrice(f"global batch {batch} does not divide into {dp} ranks × micro-batch {micro}")
    vp = row.whole("vp", 1) or 1
    if pp * vp > shape.layers + (4 if account.balances_head else 0):
        raise Refused(f"{pp * vp} stages exceed {shape.layers} layers")
    replicate, shard = row.whole("dp_replicate", 0) or 0, row.whole("dp_shard", 0) or 0
    if account.sharded:
        if not shard or replicate * shard != dp:
            replicate, shard = (replicate, dp // replicate) if replicate and dp % replicate == 0 else (1, dp)
    else:
        replicate, shard = dp, 1
    zero = row.whole("zero_stage", 1 if framework == "megatron" else 0) or 0
    precision = row["precision"].lower()
    low = "fp8" in precision or "float8" in precision or "fp4" in precision
    recent = row["framework_version"].startswith(("0.3", "2026"))
    old = account.name == "torchtitan" and not recent and "chunk" not in row["notes"]
    chunks = re.search(r"num_chunks=(\d+)", row["notes"])
    candidate = Candidate(
        tensor_parallel=tp,
        pipeline_parallel=pp,
        virtual_stages=vp if pp > 1 else 1,
        schedule="Interleaved1F1B" if vp > 1 and pp > 1 else "1F1B",
        context_parallel=cp,
        expert_parallel=max(1, row.whole("ep", 1) or 1) if shape.is_moe else 1,
        data_parallel_replicate=replicate,
        data_parallel_shard=shard,
        reshard_after_forward="never" if "reshard_after_forward=never" in row["notes"] or zero == 2 else "default",
        micro_batch=micro,
        compile=bool(row.flag("compile")),
        async_tp=bool(row.flag("async_tp")) and framework == "torchtitan",
        float8=low,
        loss_chunks=1 if old or account.name != "torchtitan" else int(chunks[1]) if chunks else 8,
        zero_stage=zero,
        **_checkpoint(row),
    )
    per_node = 8 if gpus >= 8 else gpus
    try:
        setting = Setting(
            shape=shape,
            hardware=hardware,
            devices_per_node=per_node,
            nodes=max(1, gpus // per_node),
            seq_len=seq_len,
            global_batch_seqs=batch,
            precision="bf16",
            framework=account.name,
        )
    except UserError as error:
        raise CannotPrice(str(error)) from None
    judged = bool(row["act_ckpt"]) and not row.table.startswith("ibm")
    group = (row.table, row["model"], row["hardware"], str(gpus), str(seq_len), str(batch))
    if row.before_fix:
        group = (*group[:1], f"{row['model']} (before its pipeline fix)", *group[2:])
    family = f"{row['framework'].split()[0]} {hardware.name}" + (" before fix" if row.before_fix else "")
    shaped = bool(_known(row["model"])) or all(row.whole(column) for column in ("layers", "hidden", "ffn", "vocab"))
    return Priced(row, setting, candidate, account, group, family, probed_links(row, hardware), judged, shaped)
