"""Synthetic traces over many shapes: parts are recovered exactly, and time is conserved whatever a trace holds."""

from __future__ import annotations

from pathlib import Path
import tempfile

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from tests.trial_runner.breakdown import synth
from trial_runner.breakdown import break_down
from trial_runner.breakdown import Breakdown
from trial_runner.breakdown import intervals
from trial_runner.breakdown import PARTS


def conserved(result: Breakdown) -> None:
    assert result.steps
    for step in result.steps:
        assert set(step.parts_s) == set(PARTS)
        assert all(value >= 0 for value in step.parts_s.values())
        assert step.useful_s >= 0 and step.unexplained_s >= 0
        total = step.useful_s + sum(step.parts_s.values()) + step.unexplained_s
        assert total == pytest.approx(step.step_s, abs=1e-6)


def run(*traces: synth.Trace, **options: object) -> Breakdown:
    with tempfile.TemporaryDirectory() as folder:
        paths = [trace.write(Path(folder) / f"trace{index}.json") for index, trace in enumerate(traces)]
        return break_down(paths, **options)  # type: ignore[arg-type]


KINDS = ("compute", "recompute", "bubble", "exposed_communication", "data_wait", "cpu_launch")
segments = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 5000)), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(segments, st.data())
def test_parts_of_one_rank_are_recovered_exactly(pieces: list[tuple[str, int]], data: st.DataObject) -> None:
    trace = synth.Trace(origin_us=data.draw(st.sampled_from([0.0, 4.2e12, 1.695835542514261e15])))
    now = 0.0
    expected = {kind: 0 for kind in KINDS}
    for kind, length in pieces:
        expected[kind] += length
        if kind == "compute":
            _compute(trace, now, length, data)
        elif kind == "recompute":
            trace.op("autograd::engine::evaluate_function: MmBackward0", now - 50_000, 10, synth.BACKWARD)
            trace.op("aten::mm", now - 50_000 + 1, 8, synth.BACKWARD, **{"Sequence number": 7, "Fwd thread id": 0})
            trace.kernel(synth.GEMM, now, length, called=now - 50_000 + 3, tid=synth.BACKWARD)
        elif kind == "bubble":
            trace.kernel(synth.SEND_RECV, now, length, stream=synth.COMM_STREAM)
        elif kind == "exposed_communication":
            trace.kernel(synth.ALL_GATHER, now, length, stream=synth.COMM_STREAM)
        elif kind == "data_wait":
            trace.add("user_annotation", synth.NEXT_BATCH, now, length, synth.MAIN)
        now += length
    trace.step(3, 0, now)
    result = run(trace)
    conserved(result)
    step = result.steps[0]
    assert step.step_s == pytest.approx(now / 1e6, abs=1e-9)
    assert step.useful_s == pytest.approx(expected.pop("compute") / 1e6, abs=5e-7 * len(pieces))
    for part, value in expected.items():
        assert step.parts_s[part] == pytest.approx(value / 1e6, abs=5e-7 * len(pieces)), part
    assert step.unexplained_s == 0


def _compute(trace: synth.Trace, now: float, length: int, data: st.DataObject) -> None:
    """A stretch of compute on one or two streams, with hidden communication and loading beside it."""
    cut = data.draw(st.integers(0, length))
    trace.kernel(synth.GEMM, now, cut)
    trace.kernel("void at::native::vectorized_elementwise_kernel<4, F>(int)", now + cut, length - cut)
    if data.draw(st.booleans()):
        trace.kernel(synth.GEMM, now + cut / 2, length / 2, stream=8)
    if data.draw(st.booleans()):
        trace.kernel(synth.ALL_REDUCE, now, length, stream=synth.COMM_STREAM)
    if data.draw(st.booleans()):
        trace.kernel(synth.SEND_RECV, now, length, stream=synth.COMM_STREAM + 1)
    if data.draw(st.booleans()):
        trace.add("user_annotation", synth.NEXT_BATCH, now, length, synth.MAIN)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(10, 5000), min_size=2, max_size=5), st.integers(1, 3000)),
        min_size=1,
        max_size=8,
    ),
    st.lists(st.integers(-(10**7), 10**7), min_size=5, max_size=5),
)
def test_straggler_and_transfer_are_separated_exactly(rounds: list[tuple[list[int], int]], skew: list[int]) -> None:
    """Ranks compute for different times, meet in a collective, and it transfers: waits and transfers are known."""
    ranks = min(len(work) for work, _ in rounds)
    traces = [synth.Trace(rank=rank, world_size=ranks, base_ns=10**18 + skew[rank] * 1000) for rank in range(ranks)]
    waits, transfers, works = [0] * ranks, 0, [0] * ranks
    now = 0
    for index, (work, transfer) in enumerate(rounds):
        last = max(work[:ranks])
        for rank, trace in enumerate(traces):
            shift = -skew[rank]
            trace.kernel(synth.GEMM, now + shift, work[rank])
            trace.kernel(
                synth.ALL_REDUCE,
                now + shift + work[rank],
                last - work[rank] + transfer,
                stream=synth.COMM_STREAM,
                **{
                    "Collective name": "allreduce",
                    "In msg nelems": 1000 + index,
                    "dtype": "Float",
                    "Group size": ranks,
                },
            )
            waits[rank] += last - work[rank]
            works[rank] += work[rank]
        transfers += transfer
        now += last + transfer
    for rank, trace in enumerate(traces):
        trace.step(0, -skew[rank], now)
    result = run(*traces)
    conserved(result)
    for step in result.steps:
        assert step.useful_s == pytest.approx(works[step.rank] / 1e6, abs=1e-9)
        assert step.parts_s["straggler"] == pytest.approx(waits[step.rank] / 1e6, abs=1e-9)
        assert step.parts_s["exposed_communication"] == pytest.approx(transfers / 1e6, abs=1e-9)
        assert step.unexplained_s == 0


names = st.sampled_from(
    [
        synth.GEMM,
        synth.ALL_REDUCE,
        synth.SEND_RECV,
        "mystery",
        "gloo:all_reduce",
        "aten::mm",
        synth.NEXT_BATCH,
        "ProfilerStep#1",
        "ProfilerStep#2",
        "autograd::engine::evaluate_function: X",
        "Memcpy HtoD",
        "nccl:all_gather",
    ]
)
soup = st.lists(
    st.tuples(
        st.sampled_from(["kernel", "cpu_op", "user_annotation", "gpu_memcpy", "cuda_runtime", "python_function"]),
        names,
        st.integers(0, 2000),
        st.one_of(st.none(), st.integers(0, 500)),
        st.integers(1, 3),
        st.integers(-1, 5),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(soup, st.one_of(st.none(), st.integers(1, 3)))
def test_time_is_conserved_whatever_the_trace_holds(events: list[tuple], world: int | None) -> None:  # type: ignore[type-arg]
    trace = synth.Trace(world_size=world)
    trace.step(0, 100, 1500)
    trace.kernel(synth.ALL_REDUCE, 200, 5)
    for cat, name, start, length, tid, correlation in events:
        trace.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 1,
                "tid": tid,
                "ts": start,
                "args": {"correlation": correlation},
            }
            | ({} if length is None else {"dur": length})
        )
    conserved(run(trace))


@settings(max_examples=60, deadline=None)
@given(segments, st.floats(0.05, 1.0))
def test_with_an_ideal_time_the_rest_of_compute_is_kernel_efficiency(
    pieces: list[tuple[str, int]], share: float
) -> None:
    trace = synth.Trace()
    now = compute = 0
    for kind, length in [("compute", 100), *pieces]:
        if kind == "compute":
            trace.kernel(synth.GEMM, now, length)
            compute += length
        now += length
    trace.step(0, 0, now)
    result = run(trace, ideal_s=share * compute / 1e6)
    conserved(result)
    step = result.steps[0]
    assert step.useful_s == pytest.approx(share * compute / 1e6, abs=1e-9)
    assert step.parts_s["kernel_efficiency"] == pytest.approx((1 - share) * compute / 1e6, abs=1e-6)
    assert step.mfu_pct == pytest.approx(100 * share * compute / now)
    first, exact = step.points("cpu_launch") or (0, 0)
    lost = step.parts_s["cpu_launch"]
    assert first == pytest.approx(100 * lost * step.ideal_s / step.step_s**2)  # type: ignore[operator]
    assert exact >= first - 1e-9


def test_only_frames_that_fetch_are_data_loading() -> None:
    trace = synth.Trace()
    trace.step(0, 0, 1000)
    trace.kernel(synth.GEMM, 0, 300)
    trace.add("python_function", "train_dataloader.py(10): train_step", 0, 1000, 0)
    trace.add("python_function", "torch/utils/data/dataloader.py(630): __next__", 400, 100, 0)
    trace.add("python_function", "trainer.py(665): batch_generator", 390, 120, 0)
    step = run(trace).steps[0]
    assert step.parts_s["data_wait"] == pytest.approx(120e-6)
    trace.add("user_annotation", synth.NEXT_BATCH, 600, 50, synth.MAIN)
    trace.add("user_annotation", synth.NEXT_BATCH, 700, 200, synth.LOADER)
    assert run(trace).steps[0].parts_s["data_wait"] == pytest.approx(50e-6)


def test_a_compiled_graph_on_the_cpu_is_compute_but_for_the_communication_in_it() -> None:
    trace = synth.Trace()
    trace.step(0, 0, 1000)
    trace.add("user_annotation", "## Call CompiledFxGraph abc ##", 100, 600, synth.MAIN)
    trace.op("aten::mm", 150, 100)
    trace.op("_c10d_functional::wait_tensor", 300, 200)
    trace.add("user_annotation", "gloo:all_reduce", 290, 200, synth.LOADER)
    step = run(trace).steps[0]
    assert step.useful_s == pytest.approx(400e-6)
    assert step.parts_s["exposed_communication"] == pytest.approx(200e-6)
    assert step.parts_s["cpu_launch"] == pytest.approx(400e-6)


bounds = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


@settings(max_examples=200, deadline=None)
@given(bounds, bounds)
def test_interval_sets_agree_with_sets_of_points(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    def both(pairs: list[tuple[int, int]]) -> tuple[intervals.Intervals, set[int]]:
        array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        points = {point for low, high in pairs for point in range(low, high)}
        return intervals.union(array[:, 0], array[:, 1]), points

    def points(found: intervals.Intervals) -> set[int]:
        assert (found[:, 0] < found[:, 1]).all() and (found[1:, 0] > found[:-1, 1]).all()
        return {point for low, high in found.tolist() for point in range(low, high)}

    (a, in_a), (b, in_b) = both(left), both(right)
    assert points(a) == in_a
    assert points(intervals.intersect(a, b)) == in_a & in_b
    assert points(intervals.subtract(a, b)) == in_a - in_b
    assert points(intervals.join(a, b)) == in_a | in_b
    assert points(intervals.clip(a, 10, 30)) == {point for point in in_a if 10 <= point < 30}
    assert intervals.Cover(a)(b) == len(in_a & in_b)
    assert intervals.total(a) == len(in_a)
    asked = np.arange(61)
    assert [int(i) for i in asked[intervals.contains(a, asked)]] == sorted(in_a)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_time_is_conserved_on_several_ranks(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(2, 4))
    traces = []
    for rank in range(ranks):
        trace = synth.Trace(rank=rank, world_size=ranks, base_ns=data.draw(st.sampled_from([None, 10**18])))
        trace.step(0, 0, 1000)
        for _ in range(data.draw(st.integers(1, 8))):
            name = data.draw(st.sampled_from([synth.GEMM, synth.ALL_REDUCE, synth.ALL_GATHER, synth.SEND_RECV]))
            args = data.draw(
                st.fixed_dictionaries(
                    {},
                    optional={
                        "Process Group Name": st.sampled_from(["0", "1"]),
                        "Process Group Description": st.sampled_from(["mesh_tp", "mesh_pp", "default_pg"]),
                        "Process Group Ranks": st.sampled_from(["[0, 1]", "[0, 1, 2, 3]", "[0, 1, ...]"]),
                        "Group size": st.integers(1, 4),
                        "In msg nelems": st.integers(0, 10**9),
                        "dtype": st.sampled_from(["Float", "BFloat16", "x"]),
                        "Collective name": st.sampled_from(["allreduce", "_allgather_base", "send", "all_to_allv"]),
                    },
                )
            )
            trace.kernel(name, data.draw(st.integers(0, 900)), data.draw(st.integers(0, 500)), **args)
        trace.kernel(synth.ALL_REDUCE, 990, 5)
        traces.append(trace)
    conserved(run(*traces))


def test_a_cpu_that_runs_ahead_is_said() -> None:
    trace = synth.Trace()
    trace.step(0, 0, 1000)
    trace.kernel(synth.GEMM, 100, 950, called=10)
    assert not run(trace).warnings
    trace.kernel(synth.GEMM, 1050, 300, called=20)
    result = run(trace)
    assert any("the CPU runs ahead" in warning for warning in result.warnings)
    assert result.steps[0].step_s == pytest.approx(1e-3)
