"""Traces of real torchtitan runs on CPUs with gloo: what was done to the run is what the breakdown names."""

from __future__ import annotations

from pathlib import Path
import statistics

import pytest

from trial_runner.breakdown import break_down
from trial_runner.breakdown import Breakdown
from trial_runner.breakdown import StepBreakdown


DATA = Path(__file__).parents[2] / "data" / "traces"


def run(name: str, ranks: int = 2, **options: object) -> Breakdown:
    paths = [DATA / f"torchtitan_cpu__{name}__rank{rank}.json.gz" for rank in range(ranks)]
    result = break_down(paths, **options)  # type: ignore[arg-type]
    for step in result.steps:
        total = step.useful_s + sum(step.parts_s.values()) + step.unexplained_s
        assert total == pytest.approx(step.step_s, abs=1e-6)
        assert step.coverage_pct == 100
    return result


def largest(step: StepBreakdown) -> str:
    return max(step.parts_s, key=lambda part: step.parts_s[part])


def test_tensor_parallel_communication_is_seen() -> None:
    for step in run("tp2").steps:
        assert largest(step) == "exposed_communication"
        assert step.exposed_by_dimension_s["TP"] > 0.9 * step.parts_s["exposed_communication"]
        assert {"all_reduce", "all_gather"} <= {row.kind for row in step.collectives}
        assert step.parts_s["bubble"] == step.parts_s["recompute"] == 0


def test_pipeline_waiting_is_bubble_on_both_stages() -> None:
    result = run("pp2")
    for step in result.steps:
        assert largest(step) == "bubble"
        assert step.parts_s["bubble"] > 0.2 * step.step_s
        assert step.parts_s["straggler"] == step.parts_s["recompute"] == 0
        assert {row.dimension for row in step.collectives} == {"PP"}
    assert result.stragglers == []


def test_a_slowed_rank_is_named() -> None:
    result = run("fsdp2_slow_rank")
    waiting, slow = result.steps
    assert largest(waiting) == "straggler"
    assert waiting.parts_s["straggler"] == pytest.approx(0.3, rel=0.1)
    assert result.stragglers[0].rank == 1
    assert result.stragglers[0].late_s == pytest.approx(0.3, rel=0.1)
    assert slow.parts_s["straggler"] < waiting.parts_s["straggler"]
    assert slow.exposed_by_dimension_s["FSDP"] == pytest.approx(slow.parts_s["exposed_communication"])


def test_a_slow_loader_is_data_wait() -> None:
    result = run("fsdp2_slow_loader")
    for step in result.steps:
        assert largest(step) == "data_wait"
        assert step.parts_s["data_wait"] == pytest.approx(0.4, rel=0.02)


def test_recompute_of_full_checkpointing_is_the_extra_time() -> None:
    steps = run("full_ac", ranks=1).steps
    with_, without = steps[0::2], steps[1::2]
    assert all(step.parts_s["recompute"] == 0 for step in without)
    assert all(step.recompute_basis == "forward operators inside backward" for step in with_)
    extra = statistics.fmean(s.step_s for s in with_) - statistics.fmean(s.step_s for s in without)
    found = statistics.fmean(step.parts_s["recompute"] for step in with_)
    assert found == pytest.approx(extra, rel=0.15)


def test_without_the_peers_trace_waiting_is_not_a_straggler() -> None:
    alone = run("fsdp2_slow_rank", ranks=1).steps[0]
    both = run("fsdp2_slow_rank").steps[0]
    assert alone.parts_s["straggler"] == 0
    assert alone.unexplained_s > 0.2
    assert alone.parts_s["exposed_communication"] < both.parts_s["exposed_communication"] + 0.1
    assert alone.useful_s == both.useful_s


def test_matrix_products_have_shapes_and_rates() -> None:
    for step in run("tp2", peak_flops=1e11, memory_bandwidth=2e9).steps:
        assert step.matrix_products
        for row in step.matrix_products:
            assert row.tflops == pytest.approx(2 * row.m * row.n * row.k * row.count / row.time_s / 1e12)
            assert row.efficiency_pct is not None and 0 < row.efficiency_pct < 150
            moved = 4 * (row.m * row.k + row.k * row.n + row.m * row.n)
            roof = min(0.1, 2 * row.m * row.n * row.k / moved * 2e9 / 1e12)
            assert row.roofline_pct == pytest.approx(100 * row.tflops / roof)
