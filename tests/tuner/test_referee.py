"""Ledger and dry run count the same: a few cases in the normal run, all of them by hand (`tune validate`)."""

from __future__ import annotations

import pytest

from search_space.candidate import Candidate
from trial_runner.dry_run import Session
from tuner.referee.cases import Case
from tuner.referee.cases import cases
from tuner.referee.compare import compare_case
from tuner.referee.compare import compare_rank
from tuner.referee.compare import Counted
from tuner.referee.compare import summary
from tuner.referee.compare import unmodelled


def test_there_are_enough_cases_and_none_twice() -> None:
    every = cases()
    assert len(every) >= 60
    assert len({(case.name(), case.micro_batches) for case in every}) == len(every)
    kinds = {case.candidate.activation_checkpoint for case in every}
    schedules = {case.candidate.schedule for case in every if case.candidate.pipeline_parallel > 1}
    assert kinds == {"none", "selective", "full"} and len(schedules) == 3


def test_flop_collectives_and_memory_agree_on_small_cases() -> None:
    wanted = ("tp2 fsdp4 b1 ac=selective", "fsdp2 ddp2", "pp2(1F1B) fsdp4 b1 ac=full", "tp2 pp2v2")
    small = [case for case in cases() if "debugmodel" in case.name() and any(w in case.name() for w in wanted)]
    assert len(small) == len(wanted)
    with Session() as session:
        for case in small:
            row = compare_case(case, session)
            assert row["error"] is None, row["error"]
            for rank in row["ranks"]:
                assert rank["flop_equal"], row["label"]
                assert rank["collectives_equal"], rank["collectives_differ"]
                assert abs(rank["allocated_difference_pct"]) < 7, row["label"]


def test_experts_spread_over_ranks_agree_on_small_cases() -> None:
    wanted = ("qwen3_moe_debug 8 layers, ep2 fsdp4 b1 ac=full", "qwen3_moe_debug 8 layers, tp2 ep4 fsdp2 b1 ac=none")
    small = [case for case in cases() if case.name() in wanted]
    assert len(small) == len(wanted)
    with Session() as session:
        for case in small:
            row = compare_case(case, session)
            assert row["error"] is None, row["error"]
            (rank,) = row["ranks"]
            assert rank["flop_equal"] and rank["collectives_equal"], rank["collectives_differ"]
            assert abs(rank["allocated_difference_pct"]) < 5, row["label"]


def test_a_difference_is_named() -> None:
    ledger = Counted(allocated_bytes=110, flop=1.0, collectives={("data", "all_gather"): (2, 100.0)})
    dry = Counted(allocated_bytes=100, flop=2.0, collectives={("data", "all_gather"): (3, 100.0)})
    row = compare_rank(0, ledger, dry)
    assert row["allocated_difference_pct"] == pytest.approx(10) and row["flop_difference_pct"] == pytest.approx(-50)
    assert not row["flop_equal"] and not row["collectives_equal"]
    assert row["collectives_differ"][0]["kind"] == "data all_gather"


def test_what_is_not_modelled_is_kept_apart() -> None:
    folded = Candidate(pipeline_parallel=2, schedule="ZBVZeroBubble", virtual_stages=2, activation_checkpoint="full")
    assert unmodelled(folded) is not None and unmodelled(Candidate(activation_checkpoint="full")) is None
    rank = {"allocated_difference_pct": 40.0, "flop_equal": False, "collectives_equal": True}
    good = {"allocated_difference_pct": -2.0, "flop_equal": True, "collectives_equal": True}
    rows = [
        {"ranks": [rank], "unmodelled": "why"},
        {"ranks": [good], "unmodelled": None},
        {"ranks": [], "unmodelled": None},
    ]
    overall = summary(rows)
    assert overall["allocated_max_pct"] == 2.0 and overall["apart_allocated_max_pct"] == 40.0
    assert overall["refused_by_framework"] == 1 and overall["flop_equal_ranks"] == 1


def test_a_case_says_its_batch() -> None:
    case = Case(
        model="llama3:llama3_8b",
        layers=2,
        seq_len=128,
        micro_batches=3,
        candidate=Candidate(data_parallel_shard=4, data_parallel_replicate=2, micro_batch=2),
    )
    assert case.global_batch_seqs == 48
