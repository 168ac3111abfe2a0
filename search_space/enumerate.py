"""Enumeration: every candidate that a setting and a search section allow, before any rule is asked."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from search_space.candidate import Candidate
from search_space.candidate import LOOPED_SCHEDULES
from search_space.candidate import V_SCHEDULES
from search_space.pool import CODES
from search_space.pool import DTYPES
from search_space.pool import NAMES
from search_space.pool import Pool
from search_space.setting import Setting


def divisors(number: int) -> list[int]:
    """The divisors of ``number``, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]


def default_values(setting: Setting, allow_numeric_changes: bool = False) -> dict[str, list[Any]]:
    """The values each knob takes when the job does not list them.

    Parallel degrees are divisors of the device count (tensor parallel stays inside a node); knobs that this kind
    of device cannot run, and numeric changes nobody asked for, are left at their default.
    """
    devices, gpu = setting.num_devices, not setting.on_cpu
    torchtitan = setting.framework == "torchtitan"
    per_replica = setting.global_batch_seqs
    schedules = ["1F1B", "Interleaved1F1B"]
    return {
        "tensor_parallel": [d for d in divisors(devices) if d <= setting.devices_per_node],
        "pipeline_parallel": [d for d in divisors(devices) if d <= setting.shape.layers],
        "schedule": schedules,
        "virtual_stages": [1, 2, 4],
        "context_parallel": divisors(devices) if gpu and setting.seq_len >= 32768 else [1],
        "expert_parallel": [d for d in divisors(devices) if d <= setting.shape.experts]
        if setting.shape.is_moe
        else [1],
        "data_parallel_replicate": divisors(devices),
        "data_parallel_shard": divisors(devices) if torchtitan else [1],
        "reshard_after_forward": ["default", "always", "never"] if torchtitan else ["default"],
        "micro_batch": [b for b in (1, 2, 4, 8, 16) if b <= per_replica],
        "activation_checkpoint": ["none", "selective", "full"],
        "memory_budget": [0.5],
        "first_n": [0],
        "compile": [False, True] if torchtitan else [False],
        "async_tp": [False],
        "float8": [False, True] if allow_numeric_changes and gpu else [False],
        "fsdp_bucket": [1],
        "accumulate_without_sync": [False],
        "forward_prefetch": [0],
        "symm_mem": [False],
        "loss_chunks": [8] if torchtitan else [1],
        "zero_stage": [3] if torchtitan else [1],
        "env": ["default"],
    }


def enumerate_pool(
    setting: Setting, knobs: dict[str, tuple[Any, ...]] | None = None, allow_numeric_changes: bool = False
) -> Pool:
    """Every distinct candidate whose degrees multiply to the device count and whose batch divides evenly.

    Args:
        setting: model, hardware, scale and recipe.
        knobs: allowed values by knob name; knobs that are absent take :func:`default_values`.
        allow_numeric_changes: whether float8 and the like belong to the default values.

    Returns:
        The pool, in a stable order. Combinations that differ only in a knob without effect appear once.
    """
    asked = knobs or {}
    values = default_values(setting, allow_numeric_changes) | {k: list(v) for k, v in asked.items()}
    env_names = tuple(dict.fromkeys(["default", *values["env"]]))
    blocks = []
    for tp, pp, cp, dpr, dps in itertools.product(
        *(
            values[name]
            for name in (
                "tensor_parallel",
                "pipeline_parallel",
                "context_parallel",
                "data_parallel_replicate",
                "data_parallel_shard",
            )
        )
    ):
        if tp * pp * cp * dpr * dps != setting.num_devices:
            continue
        per_replica, rest = divmod(setting.global_batch_seqs, dpr * dps)
        if rest:
            continue
        micro_batches = [b for b in values["micro_batch"] if b <= per_replica and per_replica % b == 0]
        sharded = dps > 1 or cp > 1
        axes: dict[str, list[Any]] = {
            "micro_batch": micro_batches,
            "expert_parallel": values["expert_parallel"],
            "reshard_after_forward": values["reshard_after_forward"] if sharded else ["default"],
            "float8": values["float8"],
            "fsdp_bucket": values["fsdp_bucket"],
            "accumulate_without_sync": values["accumulate_without_sync"],
            "forward_prefetch": values["forward_prefetch"] if sharded else [0],
            "symm_mem": values["symm_mem"] if sharded else [False],
            "loss_chunks": values["loss_chunks"],
            "zero_stage": values["zero_stage"],
            "env": values["env"],
        }
        pairs = {
            ("schedule", "virtual_stages"): _schedules(pp, values),
            ("activation_checkpoint", "memory_budget", "first_n"): _checkpoints(values),
            ("compile", "async_tp"): _compiles(tp, values),
        }
        degrees = {
            "tensor_parallel": tp,
            "pipeline_parallel": pp,
            "context_parallel": cp,
            "data_parallel_replicate": dpr,
            "data_parallel_shard": dps,
        }
        block = _product(degrees, axes, pairs, env_names)
        if len(block):
            blocks.append(block)
    return Pool.concatenate(blocks) if blocks else Pool.from_candidates([]).take(np.zeros(0, dtype=int))


def _schedules(pp: int, values: dict[str, list[Any]]) -> list[tuple[Any, ...]]:
    if pp == 1:
        return [("1F1B", 1)]
    pairs = []
    for schedule in values["schedule"]:
        if schedule in V_SCHEDULES:
            pairs.append((schedule, 2))
        elif schedule in LOOPED_SCHEDULES:
            pairs += [(schedule, v) for v in values["virtual_stages"] if v > 1]
        else:
            pairs.append((schedule, 1))
    return list(dict.fromkeys(pairs))


def _checkpoints(values: dict[str, list[Any]]) -> list[tuple[Any, ...]]:
    triples: list[tuple[Any, ...]] = []
    for kind in values["activation_checkpoint"]:
        if kind == "memory_budget":
            triples += [(kind, share, 0) for share in values["memory_budget"]]
        elif kind == "first_n":
            triples += [(kind, 1.0, n) for n in values["first_n"] if n > 0]
        else:
            triples.append((kind, 1.0, 0))
    return triples


def _compiles(tp: int, values: dict[str, list[Any]]) -> list[tuple[Any, ...]]:
    pairs = [(c, a and c and tp > 1) for c in values["compile"] for a in values["async_tp"]]
    return list(dict.fromkeys(pairs))


def _product(
    fixed: dict[str, int],
    axes: dict[str, list[Any]],
    pairs: dict[tuple[str, ...], list[tuple[Any, ...]]],
    env_names: tuple[str, ...],
) -> Pool:
    """The cartesian product of axes and coupled axes, as arrays."""
    sizes = [len(v) for v in axes.values()] + [len(v) for v in pairs.values()]
    total = int(np.prod(sizes))
    grid = np.unravel_index(np.arange(total), sizes)
    columns: dict[str, np.ndarray] = {}
    defaults = Candidate()
    for (name, allowed), index in zip(axes.items(), grid[: len(axes)]):
        columns[name] = _coded(name, allowed, env_names)[index]
    for (names, tuples), index in zip(pairs.items(), grid[len(axes) :]):
        for position, name in enumerate(names):
            columns[name] = _coded(name, [t[position] for t in tuples], env_names)[index]
    for name in NAMES:
        if name not in columns:
            value = fixed.get(name, getattr(defaults, name))
            columns[name] = np.full(total, value, dtype=DTYPES.get(name, np.int32))
    return Pool({name: columns[name] for name in NAMES}, env_names)


def _coded(name: str, values: list[Any], env_names: tuple[str, ...]) -> np.ndarray:
    if name in CODES:
        values = [CODES[name].index(value) for value in values]
    elif name == "env":
        values = [env_names.index(value) for value in values]
    return np.array(values, dtype=DTYPES.get(name, np.int32))
