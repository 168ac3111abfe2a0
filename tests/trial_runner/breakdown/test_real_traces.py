"""Published traces of real profilers: each is read, its parts add up, its kernels are known, its figures stay.

The figures of the ROCm training step and of the H100 step were checked by hand against the events of the files, and
are painted again here nanosecond by nanosecond from the raw JSON.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trial_runner.breakdown import break_down
from trial_runner.breakdown import names
from trial_runner.breakdown.read import read_trace


DATA = Path(__file__).parents[2] / "data" / "traces"
AMD = "amd_trace__mi250_minitoy_train_ROCm6_2_kineto.json.gz"
GLOO = "cpu_only__rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz"
ALEXNET = "critical_path__alexnet__benchmark_result_2869224_1695835535_trace.json.gz"
NCCL = "nccl_parser_config__nccl_data.json.gz"
CONTROL = "trace_diff__control__control.json.gz"
SAMPLED = ("trace_filter__sampled_rank-0.json.gz", "trace_filter__sampled_rank-1.json.gz")
BERT = "tracelens__h100_bert_small.json.gz"
QWEN = "tracelens__mi300_qwen.json.gz"

FIGURES: dict[str, list[dict[str, Any]]] = json.loads((DATA / "figures.json").read_text())


@pytest.mark.parametrize("name", [AMD, GLOO, ALEXNET, NCCL, CONTROL, *SAMPLED, BERT, QWEN])
def test_every_trace_is_read_conserved_and_known(name: str) -> None:
    result = break_down([DATA / name])
    assert result.steps
    for step in result.steps:
        total = step.useful_s + sum(step.parts_s.values()) + step.unexplained_s
        assert total == pytest.approx(step.step_s, abs=1e-6)
        assert step.coverage_pct >= 95 or any("unknown kernels" in warning for warning in result.warnings)
        assert step.launches_without_kernel == 0
    found = [
        {
            "step": step.step,
            "rank": step.rank,
            "step_us": round(step.step_s * 1e6, 3),
            "useful_us": round(step.useful_s * 1e6, 3),
            "unexplained_us": round(step.unexplained_s * 1e6, 3),
            "launches": step.launches,
            "kernels": step.kernels,
            **{part: round(value * 1e6, 3) for part, value in step.parts_s.items() if value},
        }
        for step in result.steps
    ]
    assert found == FIGURES[name]


def _painted(name: str) -> dict[str, int]:
    """Nanoseconds of the first step by owner, painted from the raw events: compute over copies over launch."""
    events = json.loads(gzip.decompress((DATA / name).read_bytes()))["traceEvents"]
    events = [event for event in events if event.get("ph") == "X"]
    step = min((e for e in events if str(e["name"]).startswith("ProfilerStep") and e["cat"] == "user_annotation"),
               key=lambda e: e["ts"])  # fmt: skip
    canvas = np.zeros(round(step["dur"] * 1000), dtype=np.int8)
    for code, wanted in ((1, ("Memcpy HtoD",)), (2, None)):
        for event in events:
            device = event["cat"] == "kernel" or (event["cat"] == "gpu_memcpy" and "DtoD" in event["name"])
            if device if wanted is None else event["cat"] == "gpu_memcpy" and event["name"].startswith(wanted):
                low = round((event["ts"] - step["ts"]) * 1000)
                canvas[max(low, 0) : max(low + round(event["dur"] * 1000), 0)] = code
    counts = np.bincount(canvas, minlength=3)
    return {"cpu_launch": int(counts[0]), "data_wait": int(counts[1]), "compute": int(counts[2])}


@pytest.mark.parametrize("name", [AMD, BERT, QWEN])
def test_traces_without_communication_painted_by_the_nanosecond(name: str) -> None:
    step, painted = break_down([DATA / name]).steps[0], _painted(name)
    assert step.useful_s * 1e9 == pytest.approx(painted["compute"], abs=150)
    assert step.parts_s["data_wait"] * 1e9 == pytest.approx(painted["data_wait"], abs=50)
    assert step.parts_s["cpu_launch"] * 1e9 == pytest.approx(painted["cpu_launch"], abs=150)


def test_two_ranks_of_one_job_are_matched_where_they_meet() -> None:
    result = break_down([DATA / name for name in SAMPLED])
    for step in result.steps:
        total = step.useful_s + sum(step.parts_s.values()) + step.unexplained_s
        assert total == pytest.approx(step.step_s, abs=1e-6)
    assert [row.rank for row in result.stragglers] == [1]
    assert any("do not meet in time" in warning for warning in result.warnings)


def test_all_to_all_by_send_and_receive_kernels_is_no_bubble() -> None:
    step = break_down([DATA / SAMPLED[0]]).steps[0]
    kinds = {row.kind for row in step.collectives}
    assert "all_to_all" in kinds and "p2p" not in kinds
    assert step.parts_s["bubble"] == 0


def test_bytes_and_group_of_collectives_are_read() -> None:
    step = break_down([DATA / NCCL]).steps[0]
    reduces = [row for row in step.collectives if row.kind == "all_reduce"]
    assert sorted(row.size_bytes or 0 for row in reduces) == [8196000, 9724160, 26255360, 26550272, 31502336]
    assert {row.dimension for row in reduces} == {"DP"}


@pytest.mark.parametrize("name", [ALEXNET, NCCL, CONTROL, *SAMPLED, BERT, QWEN])
def test_few_distinct_kernels_are_unknown(name: str) -> None:
    trace = read_trace(DATA / name)
    kernels = {trace.names[index] for index in trace.name[trace.rows(0)]}
    unknown = [kernel for kernel in kernels if names.kernel_kind(kernel) is None]
    assert len(unknown) <= 2, unknown
