"""CPU ranks keep freed memory, so that step times are of the work and not of mapping pages."""

from __future__ import annotations

from pathlib import Path

from trial_runner.gang import KEEP_FREED_MEMORY
from trial_runner.gang import rank_environment
from trial_runner.spec import TrialSpec


def environment(folder: Path, device: str, **env: str) -> dict[str, str]:
    spec = TrialSpec(
        study="s",
        trial=0,
        folder=str(folder),
        config_file="",
        config_function="",
        world_size=1,
        device=device,
        warmup_steps=1,
        steps=1,
        env=env,
    )
    return rank_environment(spec, 0, 0, 1, 0, ("127.0.0.1", 1), None)


def test_cpu_ranks_keep_freed_memory_unless_the_candidate_says_otherwise(tmp_path: Path) -> None:
    assert KEEP_FREED_MEMORY.items() <= environment(tmp_path, "cpu").items()
    assert "MALLOC_MMAP_MAX_" not in environment(tmp_path, "gpu")
    assert environment(tmp_path, "cpu", MALLOC_MMAP_MAX_="7")["MALLOC_MMAP_MAX_"] == "7"


def test_threads_of_a_cpu_rank_sleep_at_barriers(tmp_path: Path) -> None:
    """Two spinning gangs on the same cores slowed each other twentyfold, and both outlived their allowance."""
    assert environment(tmp_path, "cpu")["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment(tmp_path, "cpu", OMP_WAIT_POLICY="ACTIVE")["OMP_WAIT_POLICY"] == "ACTIVE"
