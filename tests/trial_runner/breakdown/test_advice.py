"""Expected against found: what is outside its range, with causes in the order to act."""

from __future__ import annotations

from pathlib import Path

import pytest

from search_space.errors import UserError
from tests.trial_runner.breakdown import synth
from trial_runner.breakdown import break_down
from trial_runner.breakdown import Breakdown
from trial_runner.breakdown import PARTS
from trial_runner.breakdown.advice_rules import GROUPS
from trial_runner.breakdown.advice_rules import RULES


def late_trace(rank: int) -> synth.Trace:
    """A step with every loss in it: 2 ranks, rank 1 late, exposed gathers, loading, small late kernels, recompute."""
    trace = synth.Trace(rank=rank, world_size=2)
    trace.step(0, 0, 100_000)
    trace.add("user_annotation", synth.NEXT_BATCH, 0, 10_000, synth.MAIN)
    start = 10_000
    for index in range(1200):
        at = start + index * 25
        trace.kernel("void at::native::vectorized_elementwise_kernel<4>()", at + 10, 15, called=at + 7)
    group = {"Process Group Name": "1", "Process Group Description": "mesh_fsdp", "Group size": 2}
    big = {"Collective name": "_allgather_base", "In msg nelems": 64 << 20, "dtype": "BFloat16", **group}
    trace.kernel(synth.ALL_GATHER, 40_000 + 5000 * rank, 20_000 - 5000 * rank, stream=synth.COMM_STREAM, **big)
    trace.op("autograd::engine::evaluate_function: X", 1, 20, synth.BACKWARD)
    trace.op("aten::mm", 2, 15, synth.BACKWARD, **{"Sequence number": 1, "Fwd thread id": 0})
    trace.kernel(synth.GEMM, 60_000, 10_000, called=5, tid=synth.BACKWARD)
    trace.op("aten::mm", 30, 5, **{"Input Dims": [[1024, 4096], [4096, 16032]], "Input type": ["c10::BFloat16"] * 2})
    trace.kernel(synth.GEMM, 70_000, 20_000, called=32)
    trace.kernel(synth.SEND_RECV, 90_000, 5000, stream=synth.COMM_STREAM)
    trace.add("cuda_runtime", "cudaStreamSynchronize", 95_000, 1000, synth.MAIN, {"correlation": 99_999})
    for index in range(5):
        trace.add("cuda_runtime", "cudaDeviceSynchronize", 96_000 + 700 * index, 600, synth.MAIN, {})
    return trace


def run(folder: Path, expected: dict[str, tuple[float, float]], ranks: int = 2) -> Breakdown:
    paths = [late_trace(rank).write(folder / f"rank{rank}.json") for rank in range(ranks)]
    return break_down(paths, expected=expected, ideal_s=0.01, peak_flops=989e12)


def test_every_part_above_its_range_has_a_cause_and_a_change(tmp_path: Path) -> None:
    result = run(tmp_path, {part: (0.0, 0.0) for part in PARTS})
    assert {finding.part for finding in result.findings} == set(PARTS)
    order = [GROUPS.index(finding.group) for finding in result.findings]
    assert order == sorted(order)
    causes = {finding.cause for finding in result.findings}
    for expected in (
        "communication is not overlapped with compute",
        "communication buckets are too large: the first and the last cannot hide",
        "many small kernels",
        "kernels are launched late",
        "the CPU synchronises with the device",
        "matrix products of unfriendly shape",
        "unfused kernels beside the matrix products",
        "activation checkpointing that memory may not need",
        "the data loader is slower than the step",
        "a slow rank keeps the others waiting",
    ):
        assert expected in causes
    padding = next(f for f in result.findings if f.cause == "matrix products of unfriendly shape")
    assert "16032" in padding.evidence and "16128" in padding.evidence
    assert "rank 1" in next(f for f in result.findings if f.part == "straggler").evidence


def test_inside_its_range_is_no_finding(tmp_path: Path) -> None:
    assert run(tmp_path, {part: (0.0, 1.0) for part in PARTS}).findings == []
    found = run(tmp_path, {"cpu_launch": (0.5, 0.6)}).findings
    assert [(f.part, f.group, f.cause) for f in found] == [("cpu_launch", "expectation", "less time than expected")]


def test_without_evidence_the_first_cause_is_named_as_a_guess(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 1000)
    trace.kernel(synth.GEMM, 0, 900)
    result = break_down([trace.write(tmp_path / "t.json")], expected={"cpu_launch": (0, 1e-6)})
    assert result.findings[0].cause.startswith("not told by the trace")


def test_expectations_that_are_none_are_refused(tmp_path: Path) -> None:
    for expected in ({"luck": (0.0, 1.0)}, {"bubble": (2.0, 1.0)}, {"bubble": (-1.0, 1.0)}):
        with pytest.raises(UserError, match="expected"):
            run(tmp_path, expected)


def test_the_rule_table_covers_every_part_with_a_known_group() -> None:
    assert {rule.part for rule in RULES} == set(PARTS)
    assert {rule.group for rule in RULES} <= set(GROUPS)
    assert all(rule.cause and rule.change for rule in RULES)
