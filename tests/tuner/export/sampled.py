"""Sampled legal candidates as export subjects."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from search_space.enumerate import enumerate_pool
from search_space.hardware import find_hardware
from search_space.model_torchtitan import preset_shape
from search_space.pool import canonical
from search_space.rules import judge
from search_space.rules import RULES
from search_space.setting import Setting
from tuner.export.subject import Subject


COUNT = 150
"""Candidates of each sample."""


def setting(framework: str, model: str = "llama3:llama3_8b") -> Setting:
    shape = preset_shape(model)
    assert shape is not None
    return Setting(
        shape=shape,
        hardware=find_hardware("H100-SXM"),
        devices_per_node=8,
        nodes=8,
        seq_len=8192,
        global_batch_seqs=256,
        framework=framework,
    )


@cache
def subjects(framework: str, model: str = "llama3:llama3_8b") -> tuple[Subject, ...]:
    """A seeded sample over every knob that the framework has."""
    place = setting(framework, model)
    knobs: dict[str, tuple[object, ...]] = {
        "activation_checkpoint": ("none", "selective", "full", "memory_budget", "first_n"),
        "first_n": (0, 2, 3),
        "async_tp": (False, True),
    }
    if framework == "torchtitan":
        knobs |= {
            "micro_batch": (1, 2),
            "fsdp_bucket": (1, 3),
            "forward_prefetch": (0, 2),
            "symm_mem": (False, True),
            "accumulate_without_sync": (False, True),
            "schedule": ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"),
            "virtual_stages": (1, 2),
            "tensor_parallel": (1, 2, 8),
            "data_parallel_replicate": (1, 4),
        }
    else:
        knobs |= {"zero_stage": (0, 1, 2, 3), "fsdp_bucket": (1, 2)}
    pool = enumerate_pool(place, knobs, False)
    legal = np.flatnonzero(judge(pool, place, RULES).legal)
    drawn = np.random.default_rng(7).permutation(legal)
    found: dict[str, Subject] = {}
    for i in drawn:
        candidate = canonical(pool.candidate(int(i)))
        if place.global_batch_seqs % (candidate.data_parallel * candidate.micro_batch):
            continue
        found.setdefault(candidate.key(), Subject(candidate=candidate, setting=place, source="test", why="sampled"))
        if len(found) == COUNT:
            break
    assert len(found) == COUNT and len(pool) > COUNT
    return tuple(found.values())


def spoken(subject: Subject, gaps: set[str], imported: object) -> tuple[object, object]:
    """Both candidates with the knobs that have no counterpart set alike, canonical."""
    defaults = {name: getattr(imported, name) for name in gaps}
    return canonical(replace(subject.candidate, **defaults)), imported
