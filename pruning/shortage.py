"""When nothing fits: which term is tightest, how much is missing, and what would help."""

from __future__ import annotations

from typing import Any

import numpy as np

from pruning.accounts.account import find_account
from pruning.assess import Assessment
from pruning.coefficients import Coefficients
from pruning.explain import explain
from search_space.hardware import GIB
from search_space.pool import Pool


STATES = ("parameters", "gradients", "optimizer")
"""Terms that sharding over more devices makes smaller without end."""


def shortage(assessment: Assessment, coefficients: Coefficients | None = None) -> dict[str, Any] | None:
    """What keeps even the nearest candidate out; None where something is feasible or the nearest is short of no memory.

    Returns:
        ``label`` of the nearest candidate, ``over_gib`` (GiB it needs beyond what is allowed), ``tightest_term`` and
        ``terms_gib`` on its worst rank, ``devices_at_least`` (devices over which the model's states alone would fit,
        fully sharded) and ``help`` (sentences).
    """
    if assessment.feasible.any() or not len(assessment.pool):
        return None
    setting, legal = assessment.setting, assessment.judgement.legal
    if not legal.any():
        return None
    needed = np.where(legal, assessment.prices.memory_bytes, np.inf)
    nearest = int(np.argmin(needed))
    candidate = assessment.pool.candidate(nearest)
    allowed = assessment.allowed_bytes
    account = explain(candidate, setting, coefficients)
    rank = int(np.argmax(account["memory_gib_by_rank"]))
    terms = {name: values[rank] for name, values in account["memory_terms_gib"].items()}
    tightest = max(terms, key=lambda name: terms[name])
    states = find_account(setting.framework).state_bytes * setting.shape.num_params
    least = int(np.ceil(states / allowed))
    return {
        "label": candidate.label(),
        "over_gib": (needed[nearest] - allowed) / GIB,
        "tightest_term": tightest,
        "terms_gib": terms,
        "devices_at_least": least,
        "help": _help(assessment.pool, setting.num_devices, tightest, least, candidate.activation_checkpoint),
    }


def _help(pool: Pool, devices: int, tightest: str, least: int, checkpoint: str) -> list[str]:
    found = []
    if least > devices:
        found.append(
            f"more devices: the model's states alone need at least {least}, fully sharded; there are {devices}"
        )
    elif tightest in STATES:
        found.append("more devices to shard the model's states over")
    if checkpoint != "full":
        found.append('activation_checkpoint = "full" among the allowed values')
    if tightest == "activations" and pool["micro_batch"].min() > 1:
        found.append("a micro-batch of 1 among the allowed values")
    if tightest == "activations" and not found:
        found.append("shorter sequences, or more tensor, context or pipeline parallel ranks")
    return found or ["a device with more memory, or a smaller memory_margin"]
