"""How the layers of a model are dealt out to pipeline stages, and stages to pipeline ranks."""

from __future__ import annotations

import numpy as np

from search_space.candidate import V_SCHEDULES
from search_space.errors import UserError


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each of ``stages`` consecutive stages; they always add up to ``layers``.

    Stages differ by at most one layer. The spare layers go to the middle stages first and to the last stage
    never, because the first stage also holds the embedding and the last one the head and the loss.

    Raises:
        UserError: there are more stages than layers.
    """
    if stages > layers:
        raise UserError(f"{stages} stages exceed the {layers} layers; use at most {layers} stages")
    base, spare = divmod(layers, stages)
    order = [*range(1, stages - 1), 0]
    extra = set(order[:spare])
    return tuple(base + (stage in extra) for stage in range(stages))


def split_by_cost(layers: int, stages: int, head: float) -> tuple[int, ...]:
    """Layers of each stage when the head counts as ``head`` layers of the last stage (Megatron's and nanotron's
    cost-balanced cuts). Stages without blocks are possible: embedding, norm and head are pieces too.
    """
    if stages == 1:
        return (layers,)
    fair = (layers + head) / stages
    last = max(0, min(layers - (stages - 1), round(fair - head)))
    rest = layers - last
    base, spare = divmod(rest, stages - 1)
    return (*(base + (stage < spare) for stage in range(stages - 1)), last)


def check_split(layers: int, split: tuple[int, ...]) -> None:
    """Refuse a split that loses, repeats or leaves out layers.

    Raises:
        UserError: the stages do not add up to the model, or one is empty or negative.
    """
    if sum(split) != layers or min(split, default=0) < 1:
        raise UserError(
            f"stages of {', '.join(map(str, split))} layers hold {sum(split)}, the model has {layers}; "
            f"use {', '.join(map(str, split_layers(layers, len(split))))}"
        )


def stage_ranks(schedule: str, pipeline_parallel: int, virtual_stages: int) -> tuple[int, ...]:
    """Pipeline rank that holds each stage.

    Looped schedules deal stages out round-robin; V schedules fold the second half back, so that rank 0 holds the
    first and the last stage (torch.distributed.pipelining's ``loop`` and ``v`` stage styles).
    """
    if schedule in V_SCHEDULES:
        forth = list(range(pipeline_parallel))
        return tuple(forth + forth[::-1])
    return tuple(stage % pipeline_parallel for stage in range(pipeline_parallel * virtual_stages))


def layers_by_rank(layers: int, schedule: str, pipeline_parallel: int, virtual_stages: int) -> np.ndarray:
    """Layers held by each pipeline rank, shape (pipeline_parallel,)."""
    counts = np.zeros(pipeline_parallel, dtype=np.int64)
    split = split_layers(layers, pipeline_parallel * virtual_stages)
    for rank, held in zip(stage_ranks(schedule, pipeline_parallel, virtual_stages), split):
        counts[rank] += held
    return counts


def stage_modules(layers: int, stages: int) -> list[list[str]]:
    """torchtitan's ``module_fqns_per_model_part``: the modules of each stage, every layer exactly once."""
    modules = []
    next_layer = 0
    for stage, count in enumerate(split_layers(layers, stages)):
        names = [f"layers.{i}" for i in range(next_layer, next_layer + count)]
        next_layer += count
        if stage == 0:
            names.insert(0, "tok_embeddings")
        if stage == stages - 1:
            names += ["norm", "lm_head"]
        modules.append(names)
    return modules
