"""How much of a step is enough: the first step only makes optimizer states and fills the framework's caches."""

from __future__ import annotations

from typing import Any

from search_space.candidate import LOOPED_SCHEDULES
from search_space.candidate import V_SCHEDULES


def warm_up(parallelism: Any, passes: int) -> int:
    """Micro-batches of the first step: as few as the schedule accepts. The second step, which counts, runs all.

    Args:
        parallelism: torchtitan's parallelism config.
        passes: micro-batches of a whole step (a pipeline's, or accumulated gradients').
    """
    ranks = parallelism.pipeline_parallel_degree
    if ranks == 1:
        return 1
    schedule = parallelism.pipeline_parallel_schedule
    enough = 2 * ranks if schedule in V_SCHEDULES else ranks
    if schedule in LOOPED_SCHEDULES and passes % ranks:
        return passes
    return min(passes, enough)
