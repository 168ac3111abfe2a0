"""The whole account of one candidate, term by term, with the source of every formula."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pruning import decisions
from pruning.accounts.account import Account
from pruning.accounts.account import find_account
from pruning.accounts.simple import layer_activation_bytes
from pruning.accounts.simple import simple_memory
from pruning.assess import assess
from pruning.assess import Assessment
from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from pruning.ledger.activations import kept_tensors
from pruning.ledger.activations import tensor_bytes
from pruning.ledger.communication import Traffic
from pruning.ledger.layout import Layout
from pruning.ledger.layout import layout_of
from pruning.ledger.layout import ranks_of
from pruning.ledger.memory import memory_of
from pruning.ledger.parameters import local_parameters
from pruning.ledger.pipeline import flow_of
from pruning.ledger.schedule import bubble_over_useful
from pruning.ledger.schedule import bubble_share_of_total
from pruning.ledger.step_time import traffic_of
from pruning.limits import max_expert_imbalance
from search_space.candidate import ACTIVATION_CHECKPOINT
from search_space.candidate import Candidate
from search_space.flop import flop_per_token
from search_space.flop import recompute_flop_per_token
from search_space.hardware import GIB
from search_space.pool import Pool
from search_space.setting import Setting


SOURCES = {
    "memory": "state by FSDP2 or ZeRO (Rajbhandari et al. 2020); kept tensors read off autograd for one block",
    "pipeline": "simulated order of torch.distributed.pipelining 2.14; closed forms of Narayanan et al. 2021",
    "communication": "payload × (g-1)/g / bandwidth + messages × latency; 8 collectives per block (Korthikanti 2022)",
    "flop": "6N + 12·L·h·s per token (PaLM, appendix B); recompute not counted",
    "step_time": "ideal + seven parts; coefficients with uncertainty in pruning/coefficients.py",
}
"""Where each kind of figure comes from."""


def plan_entry(assessment: Assessment, i: int) -> dict[str, Any]:
    """One candidate with the keys of ``tune plan``'s ``candidates``."""
    prices = assessment.prices
    by_rank = prices.memory_by_rank_bytes[i]
    # A step time's optimistic end may lie below the ideal one, which no program reaches.
    mfu = [100 * min(1.0, prices.ideal_s[i] / end[i]) for end in (prices.step_time_high_s, prices.step_time_low_s)]
    return {
        "candidate": assessment.pool.candidate(i).to_json(),
        "label": assessment.pool.candidate(i).label(),
        "mfu_pct": float(prices.mfu_pct[i]),
        "mfu_pct_interval": [float(value) for value in mfu],
        "step_time_s": float(prices.step_time_s[i]),
        "step_time_interval_s": [float(prices.step_time_low_s[i]), float(prices.step_time_high_s[i])],
        "memory_gib_by_rank": [float(value) / GIB for value in by_rank[~np.isnan(by_rank)]],
        "may_not_fit": bool(assessment.doubtful[i]),
        "memory_gib_interval": [
            float(prices.memory_low_bytes[i]) / GIB,
            float(prices.memory_high_bytes[i]) / GIB,
        ],
        "parts_s": {name: float(seconds[i]) for name, seconds in prices.parts_s.items()},
        "ideal_s": float(prices.ideal_s[i]),
    }


def communication_rows(layout: Layout, account: Account, coefficients: Coefficients) -> list[dict[str, Any]]:
    """Every kind of collective of one candidate's step."""
    return [_traffic_row(traffic) for traffic in traffic_of(layout, account, coefficients) if traffic.bytes[0] > 0]


def _traffic_row(traffic: Traffic) -> dict[str, Any]:
    return {
        "dimension": traffic.dimension,
        "primitive": traffic.primitive,
        "link": "network" if traffic.network[0] else "fast domain",
        "group": int(traffic.group[0]),
        "bytes": float(traffic.bytes[0]),
        "wire_bytes": float(traffic.wire_bytes[0]),
        "messages": int(traffic.messages[0]),
        "message_bytes": float(traffic.bytes[0] / max(1.0, traffic.messages[0])),
        "time_s": float(traffic.time_s[0]),
        "hideable": traffic.hideable,
    }


def explain(
    candidate: Candidate,
    setting: Setting,
    coefficients: Coefficients | None = None,
    account_name: str | None = None,
) -> dict[str, Any]:
    """The whole account of one candidate.

    Args:
        candidate: what to explain.
        setting: the job's setting.
        coefficients: calibrated coefficients; absent: shipped priors.
        account_name: whose account: ``torchtitan``, ``megatron`` or ``simple``; absent: the setting's framework.

    Returns:
        The keys of ``tune explain``: those of one plan candidate, ``memory_terms_gib``, ``communication``,
        ``pipeline``, ``flop``, ``verdict``, ``decisions`` and more.

    Raises:
        UserError: the account is unknown.
    """
    if account_name not in (None, "simple"):
        setting = replace(setting, framework=account_name)
        coefficients = None
    used = coefficients or prior(setting)
    pool = Pool.from_candidates([candidate])
    assessment = assess(pool, setting, coefficients)
    account = find_account(setting.framework)
    layout = layout_of(pool, setting)
    ranks = ranks_of(layout, account.balances_head)
    flow = flow_of(layout, ranks)
    memory = memory_of(layout, ranks, flow, account, used, itemise=True)
    entry = plan_entry(assessment, 0)
    pp = candidate.pipeline_parallel
    entry["account"] = account_name or account.name
    entry["memory_terms_gib"] = {
        name: [float(value) / GIB for value in term[0, :pp]] for name, term in memory.terms.items()
    }
    entry["allocated_gib_by_rank"] = [float(value) / GIB for value in memory.allocated[0, :pp]]
    entry["reserved_gib_by_rank"] = [float(value) / GIB for value in memory.reserved[0, :pp]]
    kind = ACTIVATION_CHECKPOINT[int(pool["activation_checkpoint"][0])]
    basis = kind if kind in ("selective", "full") else "none"
    entry["activation_tensors_gib"] = {
        tensor.name: float(tensor_bytes(layout, account, tensor)[0]) / GIB
        for tensor in kept_tensors(setting.shape, account, basis, candidate.compile)
    }
    entry["communication"] = communication_rows(layout, account, used)
    m = int(layout.micro_batches[0])
    bubble = float(flow.bubble[0])
    entry["pipeline"] = {
        "micro_batches": m,
        "bubble_over_useful": bubble,
        "bubble_share_of_total": bubble / (1 + bubble),
        "bubble_over_useful_even": bubble_over_useful(pp, m, candidate.virtual_stages),
        "bubble_share_of_total_even": bubble_share_of_total(pp, m, candidate.virtual_stages),
        "inflight_by_rank": [float(value) for value in flow.inflight[0, :pp]],
        "inflight_unit": "block micro-batches",
        "layers_by_rank": [int(value) for value in ranks.layers[0, :pp]],
    }
    per_token = flop_per_token(setting.shape, setting.seq_len)
    entry["flop"] = {
        "parameters": setting.shape.num_params,
        "active_parameters": setting.shape.num_active_params,
        "per_token": per_token,
        "per_step": setting.flop_per_step,
        "recompute_per_token_full": recompute_flop_per_token(setting.shape, setting.seq_len),
        "nominal_peak": setting.hardware.peak(setting.precision),
    }
    reasons = [reason.to_json() for reason in assessment.reasons(0)]
    risks = [risk.to_json() for risk in assessment.risks(0)]
    entry["verdict"] = {"feasible": bool(assessment.feasible[0]), "reasons": reasons, "risks": risks}
    if setting.shape.is_moe:
        entry["expert_imbalance"] = {
            "assumed": account.expert_imbalance,
            "feasible_up_to": max_expert_imbalance(candidate, setting),
        }
    entry["to_become_feasible"] = _changes(candidate, assessment)
    entry["decisions"] = decision_steps(candidate, layout, setting)
    entry["placement"] = placement(candidate, setting)
    entry["sources"] = SOURCES
    if account_name == "simple":
        entry["simple"] = _simple(candidate, setting, layout)
    return entry


def _simple(candidate: Candidate, setting: Setting, layout: Layout) -> dict[str, Any]:
    shape = setting.shape
    tp, pp = candidate.tensor_parallel, candidate.pipeline_parallel
    layer = layer_activation_bytes(setting.seq_len, candidate.micro_batch, shape.hidden, tp)
    held = min(int(layout.micro_batches[0]), pp) * shape.layers / pp
    memory = simple_memory(shape.num_params, tp, pp, candidate.data_parallel, layer, held)
    return {
        "layer_activation_gb": layer / 1e9,
        "static_gb": memory.static / 1e9,
        "activations_gb": memory.activations / 1e9,
        "overhead_gb": memory.overhead / 1e9,
        "total_gb": memory.total / 1e9,
        "note": "closed forms for teaching; the verdict is the ledger's",
    }


def _changes(candidate: Candidate, assessment: Assessment) -> list[str]:
    """One-knob changes that make a refused candidate feasible, nearest first."""
    if assessment.feasible[0]:
        return []
    tried: list[Candidate] = []
    for kind in ("selective", "full"):
        tried.append(replace(candidate, activation_checkpoint=kind))
    for size in (8, 4, 2, 1):
        if size < candidate.micro_batch:
            tried.append(replace(candidate, micro_batch=size))
    dp = candidate.data_parallel_shard
    for name in ("pipeline_parallel", "tensor_parallel"):
        if dp % 2 == 0:
            values = {name: getattr(candidate, name) * 2, "data_parallel_shard": dp // 2}
            tried.append(replace(candidate, **values))
    if candidate.data_parallel_replicate > 1:
        whole = candidate.data_parallel
        tried.append(replace(candidate, data_parallel_replicate=1, data_parallel_shard=whole))
    if candidate.reshard_after_forward != "always":
        tried.append(replace(candidate, reshard_after_forward="always"))
    pool = Pool.from_candidates(tried)
    found = assess(pool, assessment.setting)
    order = np.argsort(found.prices.step_time_s)
    words = []
    for i in order:
        if found.feasible[i]:
            changed = ", ".join(f"{key}={value}" for key, value in tried[int(i)].changed(candidate).items())
            words.append(f"{changed} (predicted {found.prices.step_time_s[i]:.3g} s a step)")
    return words


def decision_steps(candidate: Candidate, layout: Layout, setting: Setting) -> list[dict[str, Any]]:
    """The order of decision tensor → pipeline → data → context parallel, each with its numbers."""
    hardware, shape = setting.hardware, setting.shape
    peak = hardware.peak(setting.precision)
    inside = decisions.arithmetic_intensity(peak, 2 * hardware.domain_bandwidth)
    across = decisions.arithmetic_intensity(peak, 2 * hardware.nic_bandwidth)
    limit = decisions.tensor_parallel_limit(max(shape.ffn, 1), inside)
    local = float(local_parameters(layout)[0])
    m, pp = int(layout.micro_batches[0]), candidate.pipeline_parallel
    sharding = decisions.zero1_or_fsdp(local, m, hardware.memory_bytes * 0.5)
    tokens = setting.tokens_per_step / setting.num_devices
    return [
        {
            "step": "tensor_parallel",
            "text": f"at most F/(C/W) = {limit} ranks and the fast domain of {setting.fast_domain}",
            "value": candidate.tensor_parallel,
            "limit": min(limit, setting.fast_domain),
            "crosses_domain": candidate.tensor_parallel > setting.fast_domain,
        },
        {
            "step": "pipeline_parallel",
            "text": f"{local / 1e9:.2f} billion parameters a device; m = {m} micro-batches, m ≥ 4p asks for {4 * pp}",
            "value": pp,
            "enough_micro_batches": decisions.enough_micro_batches(m, pp),
        },
        {
            "step": "data_parallel",
            "text": f"{tokens:.0f} tokens a device; below {across:.0f} full sharding across nodes is network-bound",
            "value": candidate.data_parallel,
            "choice": sharding.choice,
            "zero1_bytes": sharding.zero1_bytes,
            "fsdp_bytes": sharding.fsdp_bytes,
        },
        {
            "step": "context_parallel",
            "text": f"sequences of {setting.seq_len} tokens, worth it from {decisions.CONTEXT_PARALLEL_FROM}",
            "value": candidate.context_parallel,
            "needed": decisions.needs_context_parallel(setting.seq_len),
        },
    ]


def placement(candidate: Candidate, setting: Setting) -> list[dict[str, Any]]:
    """The rank-to-node map: for each dimension its size, the distance of neighbours and the link it crosses."""
    rows = []
    stride = 1
    for name in (
        "tensor_parallel",
        "context_parallel",
        "data_parallel_shard",
        "data_parallel_replicate",
        "pipeline_parallel",
    ):
        size = getattr(candidate, name)
        if size > 1:
            inside = stride * size <= setting.fast_domain
            first = [rank * stride for rank in range(min(size, 4))]
            rows.append(
                {
                    "dimension": name,
                    "size": size,
                    "stride": stride,
                    "link": "fast domain" if inside else "network",
                    "first_ranks": first,
                    "first_nodes": [rank // setting.devices_per_node for rank in first],
                }
            )
        stride *= size
    return rows
