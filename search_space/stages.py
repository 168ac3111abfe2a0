"""How layers are split over pipeline stages, and stages over pipeline ranks."""

from __future__ import annotations

from search_space.candidate import V_SCHEDULES


def layers_per_stage(layers: int, stages: int) -> list[int]:
    """Layers of each stage, length ``stages``; they sum to ``layers``.

    As even as it gets; what does not divide goes to the stages in the middle, since the first also holds the
    embedding and the last the output head.

    Raises:
        ValueError: there are more stages than layers (a stage would be empty).
    """
    if stages > layers:
        raise ValueError(f"{stages} stages exceed {layers} layers")
    base, extra = divmod(layers, stages)
    counts = [base] * stages
    first = (stages - extra) // 2
    for stage in range(first, first + extra):
        counts[stage] += 1
    return counts


def stages_of_rank(rank: int, pipeline_parallel: int, virtual_stages: int, schedule: str) -> list[int]:
    """The stages that pipeline rank ``rank`` holds, first to last.

    Looped schedules deal stages out round-robin; V schedules fold them, so a rank holds stage r and its mirror.
    """
    if schedule in V_SCHEDULES:
        return [rank, 2 * pipeline_parallel - 1 - rank]
    return [rank + pipeline_parallel * v for v in range(virtual_stages)]


def stage_modules(layers: int, stages: int) -> list[list[str]]:
    """torchtitan's ``module_fqns_per_model_part``: the modules of each stage, every layer exactly once."""
    modules = []
    next_layer = 0
    for stage, count in enumerate(layers_per_stage(layers, stages)):
        names = [f"layers.{i}" for i in range(next_layer, next_layer + count)]
        next_layer += count
        if stage == 0:
            names.insert(0, "tok_embeddings")
        if stage == stages - 1:
            names += ["norm", "lm_head"]
        modules.append(names)
    return modules
