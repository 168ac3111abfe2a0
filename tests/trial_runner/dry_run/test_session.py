"""One warm process runs many candidates; a child that dies or is late is an answer, not a hang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from search_space.candidate import Candidate
from trial_runner.dry_run import dry_run
from trial_runner.dry_run import Session
from trial_runner.dry_run.shorten import warm_up
from trial_runner.recipe.base import describe
from trial_runner.recipe.config_file import Recipe


RECIPE = Recipe(seq_len=256, global_batch_seqs=8, precision="bf16")


class Parallelism:
    """The two fields of torchtitan's parallelism config that matter here."""

    def __init__(self, ranks: int, schedule: str) -> None:
        self.pipeline_parallel_degree, self.pipeline_parallel_schedule = ranks, schedule


def test_candidates_of_one_session_do_not_touch_each_other() -> None:
    base = describe("llama3:llama3_debugmodel")
    layouts = [Candidate(micro_batch=4), Candidate(pipeline_parallel=2, micro_batch=2), Candidate(micro_batch=4)]
    with Session() as session:
        first, piped, again = (dry_run(layout, base, RECIPE, session=session) for layout in layouts)
    assert first.valid and piped.valid, first.error or piped.error
    assert first.ranks[0].peak_allocated_bytes == again.ranks[0].peak_allocated_bytes
    assert first.ranks[0].collectives == again.ranks[0].collectives
    assert len(piped.ranks) == 2


def test_a_late_child_is_said_to_be_late() -> None:
    base = describe("llama3:llama3_debugmodel")
    found = dry_run(Candidate(micro_batch=4), base, RECIPE, timeout_s=0.05)
    assert not found.valid and found.error is not None and "took more than" in found.error


def test_a_process_that_ends_fails_what_waits_for_it(tmp_path: Path) -> None:
    order: dict[str, Any] = {"rank": 0, "timeout_s": 60, "gpu_kernels": False}
    with Session() as session:
        session._process.kill()
        facts = session.submit(order).result(timeout=30)
    assert not facts["valid"] and "process ended" in facts["error"]


def test_the_first_step_is_as_short_as_the_schedule_allows() -> None:
    assert warm_up(Parallelism(1, "1F1B"), 8) == 1
    assert warm_up(Parallelism(4, "1F1B"), 16) == 4
    assert warm_up(Parallelism(4, "Interleaved1F1B"), 16) == 4
    assert warm_up(Parallelism(4, "Interleaved1F1B"), 10) == 10
    assert warm_up(Parallelism(4, "DualPipeV"), 16) == 8
    assert warm_up(Parallelism(4, "DualPipeV"), 4) == 4
