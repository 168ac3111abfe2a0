"""The compile cache that all trials share: a second trial of the same graph compiles from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


FOLDER = "LEDGERTUNE_COMPILE_CACHE"
"""Environment variable that names the cache's folder; on a cluster one that outlives the containers."""

PARTS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
"""What the compilers call their folders, and ours below the cache's."""


def cache_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Variables that point the compilers at the shared cache; what is set already stays.

    Entries are named by what was compiled and written whole, so trials that run at once do not disturb each other, and
    no trial ever removes one.
    """
    home = env.get("XDG_CACHE_HOME") or str(Path(env.get("HOME") or Path.home()) / ".cache")
    root = Path(env.get(FOLDER) or Path(home) / "ledgertune" / "compile")
    return {name: str(root / part) for name, part in PARTS.items() if name not in env}


def cache_counters() -> tuple[int, int]:
    """Graphs that this process found in the cache, and those that it had to compile, so far."""
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    return int(found.get("fxgraph_cache_hit", 0)), int(found.get("fxgraph_cache_miss", 0))


def cache_use(steps: Mapping[int, list[dict[str, Any]]]) -> dict[str, int]:
    """Graphs found in the cache and compiled anew, over all ranks of a trial; both 0 without compiling.

    Args:
        steps: step lines of each rank.
    """
    lines = [step for rank in steps.values() for step in rank]
    return {key: sum(step.get(f"cache_{key}", 0) for step in lines) for key in ("hits", "misses")}
