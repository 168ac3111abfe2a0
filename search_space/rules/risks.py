"""Combinations that are known to fail or to be unreliable although each part works: legal, but tried last."""

from __future__ import annotations

import numpy as np

from search_space.candidate import ACTIVATION_CHECKPOINT
from search_space.pool import Pool
from search_space.rules.rule import Rule
from search_space.setting import Setting


def _recomputes(pool: Pool) -> np.ndarray:
    return np.asarray(pool["activation_checkpoint"] != ACTIVATION_CHECKPOINT.index("none"))


def _full(pool: Pool) -> np.ndarray:
    return np.asarray(pool["activation_checkpoint"] == ACTIVATION_CHECKPOINT.index("full"))


def _one(pool: Pool, setting: Setting) -> float:
    return 1.0


def _none(pool: Pool, setting: Setting) -> float:
    return 0.0


RISKS: tuple[Rule, ...] = (
    Rule(
        code="pipeline_compile_checkpoint_experts",
        frameworks=("torchtitan",),
        versions="before 0.3.0; not tried since",
        source="backward failed with pipeline, compile, checkpointing and expert parallelism together",
        violated=lambda pool, setting: (
            (pool["pipeline_parallel"] > 1) & pool["compile"] & _recomputes(pool) & (pool["expert_parallel"] > 1)
        ),
        required=_one,
        available=_none,
        unit="known runs",
        text="pipeline, compile, checkpointing and expert parallelism together failed in backward",
    ),
    Rule(
        code="full_checkpoint_around_compile",
        frameworks=("torchtitan",),
        versions="torch before 2.8",
        source="recomputation of a compiled block saved another number of tensors",
        violated=lambda pool, setting: pool["compile"] & _full(pool),
        required=_one,
        available=_none,
        unit="known runs",
        text="full checkpointing around compiled blocks aborted with some PyTorch builds",
    ),
    Rule(
        code="float8_async_tp_full_checkpoint",
        frameworks=("torchtitan",),
        versions="rowwise float8",
        source="float8, async tensor parallelism and full checkpointing together: leading dimensions did not match",
        violated=lambda pool, setting: pool["float8"] & pool["async_tp"] & _full(pool),
        required=_one,
        available=_none,
        unit="known runs",
        text="float8 with async_tp and full checkpointing failed; any two of the three worked",
    ),
    Rule(
        code="float8_experts_tensor_parallel",
        frameworks=("torchtitan",),
        versions="any",
        source="token counts per expert lose their alignment under expert and tensor parallelism",
        violated=lambda pool, setting: pool["float8"] & (pool["expert_parallel"] > 1) & (pool["tensor_parallel"] > 1),
        required=_one,
        available=_none,
        unit="known runs",
        text="float8 experts with expert and tensor parallelism lose the alignment of their token counts",
    ),
)
"""Every known risk; judged like rules, but a candidate that has one stays legal."""
