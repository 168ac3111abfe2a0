"""Moves: a large part of a breakdown raises exactly the neighbours that make it smaller, and the report says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from search_space.candidate import Candidate
from search_space.pool import Pool
from search_space.sampler import Prior
from tuner.cli.report import move_lines
from tuner.study.asking import Asker
from tuner.study.moves import diagnose
from tuner.study.moves import hopeless_part
from tuner.study.moves import NO_MOVE
from tuner.study.moves import TABLE


PARTS = (
    "bubble",
    "exposed_communication",
    "recompute",
    "data_wait",
    "kernel_efficiency",
    "cpu_launch",
    "straggler",
)
BASE = Candidate(tensor_parallel=4, pipeline_parallel=2, data_parallel_shard=2, micro_batch=2)


def record(candidate: Candidate, **parts: float) -> dict[str, Any]:
    """A measured trial whose step of 1 s has these parts."""
    found = dict.fromkeys(PARTS, 0.0) | parts
    return {
        "number": 7,
        "candidate": candidate.to_json(),
        "step_time_s": 1.0,
        "breakdown": {"step_s": 1.0, "parts_s": found},
    }


def raised(candidate: Candidate, others: list[Candidate], spare: float = 0.5, **parts: float) -> dict[int, str]:
    pool = Pool.from_candidates([candidate, *others])
    return {i - 1: why.move for i, why in diagnose(record(candidate, **parts), pool, spare).items()}


@pytest.mark.parametrize(
    ("parts", "change", "move"),
    [
        ({"exposed_communication": 0.3}, {"async_tp": True, "compile": True}, "async tensor parallelism"),
        (
            {"exposed_communication": 0.3},
            {"tensor_parallel": 2, "data_parallel_shard": 4},
            "smaller tensor parallelism",
        ),
        ({"exposed_communication": 0.3}, {"symm_mem": True}, "symmetric memory"),
        ({"cpu_launch": 0.2}, {"compile": True}, "compile"),
        ({"cpu_launch": 0.2}, {"micro_batch": 4}, "larger micro-batch"),
        (
            {"bubble": 0.2},
            {"virtual_stages": 2, "schedule": "Interleaved1F1B"},
            "more virtual stages or another schedule",
        ),
        ({"bubble": 0.2}, {"micro_batch": 1}, "smaller micro-batch"),
        ({"kernel_efficiency": 0.5}, {"compile": True}, "compile"),
    ],
)
def test_each_part_raises_its_neighbour_and_nothing_else(parts: dict[str, float], change: Any, move: str) -> None:
    good = replace(BASE, **change)
    far = replace(good, activation_checkpoint="full")
    assert raised(BASE, [good, far], **parts) == {0: move}
    assert not raised(BASE, [good, far])


def test_recompute_calls_for_weaker_checkpointing_only_where_memory_is_left() -> None:
    full = replace(BASE, activation_checkpoint="full")
    others = [replace(BASE, activation_checkpoint="selective"), BASE]
    assert set(raised(full, others, spare=0.5, recompute=0.2)) == {0, 1}
    assert not raised(full, others, spare=0.02, recompute=0.2)
    assert set(raised(others[0], [full, BASE], recompute=0.2)) == {1}


def test_largest_part_names_the_reason() -> None:
    compiled = replace(BASE, compile=True)
    pool = Pool.from_candidates([compiled])
    why = diagnose(record(BASE, cpu_launch=0.1, kernel_efficiency=0.6), pool, 0.5)[0]
    assert why.part == "kernel_efficiency" and why.from_trial == 7


def test_table_is_about_parts_that_exist_and_says_why() -> None:
    assert {move.part for move in TABLE} | set(NO_MOVE) == set(PARTS)
    assert all(move.reason and move.may_change for move in TABLE)


def test_what_no_knob_mends_is_said_first() -> None:
    slow = record(BASE, data_wait=0.7)
    said = hopeless_part(slow)
    assert said is not None and "70%" in said and "no layout helps" in said
    assert hopeless_part(record(BASE, bubble=0.7)) is None and hopeless_part({}) is None


def test_a_raised_candidate_is_asked_before_its_like() -> None:
    pool = Pool.from_candidates([replace(BASE, micro_batch=b, compile=c) for b in (1, 2, 4) for c in (False, True)])
    n = len(pool)
    prior = Prior(log_step_time=np.zeros(n), sigma=np.full(n, 0.2), cost=np.ones(n), allowed=np.full(n, True))
    for target in range(n):
        favour = np.ones(n)
        favour[target] = 1.5
        chosen = Asker(None, "s", pool, lambda f=favour: replace(prior, favour=f), "ours", 0).ask()[1]  # type: ignore[misc]
        assert chosen == pool.candidate(target)


def test_report_says_which_move_came_from_which_part() -> None:
    move = {"from_trial": 7, "part": "cpu_launch", "move": "compile", "reason": "fewer launches"}
    trials = [
        record(BASE) | {"state": "measured"},
        record(BASE) | {"number": 8, "state": "measured", "step_time_s": 0.8, "move": move, "hopeless_part": "feed it"},
    ]
    lines = move_lines(trials)
    assert lines[0].startswith("trial 8 came from trial 7: cpu launch → compile (fewer launches); step time -20.0%")
    assert lines[1] == "first of all: feed it"
