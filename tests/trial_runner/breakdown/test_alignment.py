"""Collectives of several ranks: groups, clocks, pipeline stages, and pairs that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trial_runner.breakdown import synth
from trial_runner.breakdown import break_down
from trial_runner.breakdown import Breakdown


def run(folder: Path, *traces: synth.Trace) -> Breakdown:
    result = break_down([trace.write(folder / f"t{index}.json") for index, trace in enumerate(traces)])
    for step in result.steps:
        total = step.useful_s + sum(step.parts_s.values()) + step.unexplained_s
        assert total == pytest.approx(step.step_s, abs=1e-6)
    return result


def reduce(trace: synth.Trace, start: float, end: float, **args: Any) -> None:
    known = {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Float"}
    trace.kernel(synth.ALL_REDUCE, start, end - start, stream=synth.COMM_STREAM, **known, **args)


def groups(rank: int, pipeline: int) -> list[dict[str, Any]]:
    """Groups of four ranks as data parallel 4 / pipeline, listed as kineto lists them."""
    per_stage = 4 // pipeline
    stage = rank // per_stage
    dp = list(range(stage * per_stage, (stage + 1) * per_stage))
    return [
        {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": [0, 1, 2, 3]},
        {"pg_name": f"{stage + 1}", "pg_desc": "mesh_dp_shard", "pg_size": len(dp), "ranks": dp},
    ]


def test_waiting_for_another_stage_is_bubble_and_for_the_own_stage_straggler(tmp_path: Path) -> None:
    """Ranks 0, 1 are stage 0 and ranks 2, 3 stage 1; rank 1 is late in its group, then stage 1 is late for all."""
    traces = []
    for rank in range(4):
        trace = synth.Trace(rank=rank, world_size=4)
        trace.step(0, 0, 1000)
        trace.kernel(synth.SEND_RECV, 0, 10, stream=synth.COMM_STREAM + 1)
        own = {"Process Group Name": f"{rank // 2 + 1}", "Group size": 2}
        reduce(trace, 200 if rank == 1 else 100, 220, **own)
        reduce(trace, 300 if rank < 2 else 500, 520, **{"Process Group Name": "0", "Group size": 4})
        trace.header["distributedInfo"] = {}
        traces.append(trace)
    paths = []
    for rank, trace in enumerate(traces):
        document = trace.document()
        document["distributedInfo"] = {"rank": rank, "world_size": 4, "pg_config": groups(rank, 2)}
        paths.append(tmp_path / f"r{rank}.json")
        paths[-1].write_text(json.dumps(document))
    result = break_down(paths)
    parts = {step.rank: step.parts_s for step in result.steps}
    assert parts[0]["straggler"] == pytest.approx(100e-6)
    assert parts[1]["straggler"] == parts[2]["straggler"] == parts[3]["straggler"] == 0
    assert parts[0]["bubble"] == parts[1]["bubble"] == pytest.approx(210e-6)
    assert parts[2]["bubble"] == pytest.approx(10e-6)
    assert [row.rank for row in result.stragglers] == [1]
    assert parts[0]["exposed_communication"] == pytest.approx(40e-6)


def test_groups_of_one_name_that_cannot_be_told_apart_are_not_matched(tmp_path: Path) -> None:
    traces = []
    for rank in range(4):
        trace = synth.Trace(rank=rank, world_size=4)
        trace.step(0, 0, 1000)
        group = {"Process Group Name": "1", "Process Group Description": "mesh_tp", "Group size": 2}
        reduce(trace, 100 + 50 * rank, 320, **group)
        traces.append(trace)
    result = run(tmp_path, *traces)
    assert all(step.parts_s["straggler"] == 0 for step in result.steps)
    assert any("not matched across the ranks" in warning for warning in result.warnings)


def test_groups_by_their_ranks_are_matched_each_for_itself(tmp_path: Path) -> None:
    traces = []
    for rank in range(4):
        trace = synth.Trace(rank=rank, world_size=4)
        trace.step(0, 0, 1000)
        members = [0, 1] if rank < 2 else [2, 3]
        group = {"Process Group Description": "mesh_tp", "Group size": 2, "Process Group Ranks": str(members)}
        reduce(trace, 100 + 50 * rank, 320, **group)
        traces.append(trace)
    parts = [step.parts_s["straggler"] for step in run(tmp_path, *traces).steps]
    assert parts == [pytest.approx(50e-6), 0, pytest.approx(50e-6), 0]


def test_events_that_do_not_meet_are_no_pair(tmp_path: Path) -> None:
    traces = [synth.Trace(rank=rank, world_size=2) for rank in range(2)]
    for rank, trace in enumerate(traces):
        trace.step(0, 0, 100_000)
        for index in range(3):
            at = index * 20_000
            reduce(trace, at, at + 1000, **{"Group size": 2})
        reduce(trace, 70_000 + 20_000 * rank, 71_000 + 20_000 * rank, **{"Group size": 2})
    result = run(tmp_path, *traces)
    assert all(step.parts_s["straggler"] == 0 for step in result.steps)
    assert any("1 of 4 pairings" in warning for warning in result.warnings)


def test_a_manifest_rank_takes_part_in_matching(tmp_path: Path) -> None:
    paths = []
    for index, start in enumerate((100, 300)):
        trace = synth.Trace(rank=None, world_size=2)
        trace.step(0, 0, 1000)
        reduce(trace, start, 400, **{"Group size": 2})
        paths.append(trace.write(tmp_path / f"node{index}.json"))
    (tmp_path / "manifest.json").write_text(json.dumps({"node0.json": 8, "node1.json": 9}))
    result = break_down(paths)
    assert {step.rank: round(step.parts_s["straggler"] * 1e6) for step in result.steps} == {8: 200, 9: 0}
    assert result.stragglers[0].rank == 9


def test_clocks_that_differ_are_aligned_and_said(tmp_path: Path) -> None:
    traces = [synth.Trace(rank=0, world_size=2), synth.Trace(rank=1, world_size=2, origin_us=5_000_000)]
    for rank, trace in enumerate(traces):
        trace.step(0, 0, 1000)
        for index in range(3):
            reduce(trace, 100 + 300 * index + 50 * rank, 200 + 300 * index, **{"Group size": 2})
    result = run(tmp_path, *traces)
    assert [step.parts_s["straggler"] for step in result.steps] == [pytest.approx(150e-6), 0]
    assert any("clocks of the ranks differ" in warning for warning in result.warnings)
