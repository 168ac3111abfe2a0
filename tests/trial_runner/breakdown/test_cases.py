"""Reports from people who read traces, each as a test named after the report's id."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from search_space.errors import UserError
from tests.trial_runner.breakdown import synth
from trial_runner.breakdown import break_down
from trial_runner.breakdown import Breakdown
from trial_runner.breakdown import names


def run(folder: Path, *traces: synth.Trace, **options: object) -> Breakdown:
    paths = [trace.write(folder / f"t{index}.json") for index, trace in enumerate(traces)]
    result = break_down(paths, **options)  # type: ignore[arg-type]
    for step in result.steps:
        total = step.useful_s + sum(step.parts_s.values()) + step.unexplained_s
        assert total == pytest.approx(step.step_s, abs=1e-6)
    return result


@pytest.mark.parametrize(
    "name",
    [
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        "ncclDevKernel_Generic(ncclDevComm*)",
        "nccldevkernel_allgather_ring_ll",
    ],
)
def test_trc_01_every_generation_of_communication_names(tmp_path: Path, name: str) -> None:
    trace = synth.Trace(world_size=2)
    trace.step(0, 0, 1000)
    trace.kernel(synth.GEMM, 0, 600)
    trace.kernel(name, 600, 300, stream=synth.COMM_STREAM)
    trace.add("user_annotation", "nccl:all_reduce", 0, 1000, synth.MAIN)
    step = run(tmp_path, trace).steps[0]
    assert step.parts_s["exposed_communication"] == pytest.approx(300e-6)
    assert step.kernels == 2


def test_trc_01_no_communication_in_a_job_of_several_ranks_is_an_error(tmp_path: Path) -> None:
    trace = synth.Trace(world_size=2)
    trace.step(0, 0, 1000)
    trace.kernel(synth.GEMM, 0, 600)
    trace.add("user_annotation", "nccl:all_reduce", 0, 1000, synth.MAIN)
    with pytest.raises(UserError, match="2 ranks, but no communication"):
        run(tmp_path, trace)


def test_trc_03_uncovered_communication_is_seen(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 100_000)
    trace.kernel(synth.GEMM, 0, 80_000)
    trace.kernel(synth.ALL_REDUCE, 71_000, 18_000, stream=synth.COMM_STREAM)
    step = run(tmp_path, trace).steps[0]
    assert 100 * step.parts_s["exposed_communication"] / step.step_s == pytest.approx(9.0, abs=0.1)


def test_trc_04_no_step_marks_are_inferred_and_labelled(tmp_path: Path) -> None:
    trace = synth.Trace()
    for repeat in range(3):
        for index, name in enumerate((synth.GEMM, "void flash_fwd_kernel<T>()", synth.GEMM, "adam_kernel")):
            trace.kernel(name, repeat * 1000 + index * 100, 50 + 10 * repeat)
    result = run(tmp_path, trace)
    assert [step.step for step in result.steps] == [0, 1, 2]
    assert all("inferred" in step.inferred for step in result.steps)
    assert [round(step.useful_s * 1e6) for step in result.steps] == [200, 240, 280]
    assert any("inferred" in warning for warning in result.warnings)


def test_trc_06_rank_from_the_file_name_or_a_manifest(tmp_path: Path) -> None:
    trace = synth.Trace(rank=None)
    trace.step(0, 0, 100)
    trace.kernel(synth.GEMM, 0, 50)
    named = trace.write(tmp_path / "rank3_trace.json")
    assert break_down([named]).steps[0].rank == 3
    (tmp_path / "manifest.json").write_text(json.dumps({"a.json": 5}))
    listed = trace.write(tmp_path / "a.json")
    assert {step.rank for step in break_down([named, listed]).steps} == {3, 5}
    other = trace.write(tmp_path / "b.json")
    with pytest.raises(UserError, match=r"b\.json: no rank"):
        break_down([named, other])
    again = trace.write(tmp_path / "again_rank3.json")
    with pytest.raises(UserError, match="rank 3 again"):
        break_down([named, again])


def test_trc_07_category_and_not_stream_tells_device_from_cpu(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 1000)
    trace.kernel(synth.GEMM, 0, 100)
    trace.op("triton_poi_fused_add_0", 200, 40, stream=0)
    step = run(tmp_path, trace).steps[0]
    assert (step.kernels, step.useful_s) == (1, pytest.approx(100e-6))


@pytest.mark.parametrize(
    "call",
    [
        "cudaLaunchKernel",
        "cudaLaunchKernelExC",
        "cuLaunchKernel",
        "cuLaunchKernelEx",
        "hipLaunchKernel",
        "hipExtModuleLaunchKernel",
    ],
)
def test_trc_08_every_launch_call_counts(tmp_path: Path, call: str) -> None:
    assert names.is_launch(call)
    trace = synth.Trace()
    trace.step(0, 0, 1000)
    trace.kernel(synth.GEMM, 100, 100, called=50, call=call)
    trace.kernel(synth.GEMM, 700, 100, called=690, call=call)
    trace.kernel(synth.GEMM, 900, 100, called=300, call=call)
    step = run(tmp_path, trace).steps[0]
    assert (step.launches, step.launches_without_kernel) == (3, 0)
    assert step.parts_s["cpu_launch"] == pytest.approx(700e-6)
    assert step.launch_bound_s == pytest.approx(600e-6)


def test_trc_09_a_graph_replay_is_one_launch(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 1000)
    trace.add("cuda_runtime", "cudaGraphLaunch", 5, 20, synth.MAIN, {"correlation": 9})
    for index in range(24):
        args = {"correlation": 9, "stream": 7}
        trace.add("kernel", synth.GEMM, 30 + index * 40, 40, "stream 7", args)
    step = run(tmp_path, trace).steps[0]
    assert (step.launches, step.kernels, step.launches_without_kernel) == (1, 24, 0)
    assert step.parts_s["cpu_launch"] == pytest.approx(40e-6)
    assert step.reliable


def test_trc_10_lost_kernels_make_a_step_unreliable(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 7_242_000)
    for index in range(300):
        trace.add("cuda_runtime", "cudaGraphLaunch", index * 20_000, 20, synth.MAIN, {"correlation": index + 1})
    for index in range(40):
        args = {"correlation": index + 1, "stream": 7}
        trace.add("kernel", synth.GEMM, index * 20_000 + 50, 1575, "stream 7", args)
    result = run(tmp_path, trace, ideal_s=0.05, measured_step_s=0.1)
    step = result.steps[0]
    assert not step.reliable
    assert step.mfu_pct == pytest.approx(50.0)
    assert any("unreliable" in warning and "prefer the MFU" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    "name",
    [
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTN",
        "nvjet_sm90_hss_320x128",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
        "cutlass3x_sm100_tensorop_s256x128x16gemm_bf16",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16>",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
    ],
)
def test_trc_11_gemm_names_of_every_generation(name: str) -> None:
    assert names.kernel_kind(name) == names.GEMM


def test_trc_11_unknown_kernels_are_named_with_their_share(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 1000)
    trace.kernel(synth.GEMM, 0, 900)
    trace.kernel("ZqxMystery<7>(int)", 900, 100)
    result = run(tmp_path, trace)
    assert result.steps[0].coverage_pct == pytest.approx(90.0)
    assert result.steps[0].unknown_kernels[0]["name"] == "ZqxMystery<7>(int)"
    assert any("ZqxMystery<7>(int) (10.0%)" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x32x256_MI16x16x1_SN", names.GEMM),
        ("_gemm_a8w8_blockscale_kernel_GRID_MN_1", names.GEMM),
        ("void ck::kernel_gemm_xdl_cshuffle_v3<ck::GridwiseGemm>(Argument)", names.GEMM),
        ("ncclDevKernel_Generic(ncclDevComm*, channelMasks, ncclWork*)", names.COMMUNICATION),
    ],
)
def test_trc_12_names_of_rocm(name: str, kind: str) -> None:
    assert names.kernel_kind(name) == kind


@pytest.mark.parametrize(("collective", "kind"), [("allgather", "all_gather"), ("reduce_scatter", "reduce_scatter")])
def test_trc_13_kind_of_a_generic_kernel_from_its_operator(tmp_path: Path, collective: str, kind: str) -> None:
    trace = synth.Trace(world_size=2)
    trace.step(0, 0, 1000)
    args = {"External id": 77, "Collective name": collective, "In msg nelems": 1024, "dtype": "BFloat16"}
    trace.op("record_param_comms", 10, 30, **args)
    trace.kernel("ncclDevKernel_Generic(ncclDevComm*)", 100, 200, stream=1, **{"External id": 77})
    trace.kernel("ncclDevKernel_Generic(ncclDevComm*)", 400, 200, stream=1)
    step = run(tmp_path, trace).steps[0]
    assert {row.kind: row.count for row in step.collectives} == {kind: 1, "unknown": 1}
    assert step.parts_s["exposed_communication"] == pytest.approx(400e-6)


def test_trc_15_events_at_time_zero_are_dropped_and_counted(tmp_path: Path) -> None:
    trace = synth.Trace(origin_us=1.6e15)
    for _ in range(1000):
        trace.events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": synth.GEMM,
                "pid": 0,
                "tid": 7,
                "ts": 0,
                "dur": 0,
                "args": {"stream": 7},
            }
        )
    for repeat in range(3):
        trace.kernel(synth.GEMM, repeat * 100, 40)
        trace.kernel("adam_kernel", repeat * 100 + 50, 40)
    result = run(tmp_path, trace)
    assert sum(step.step_s for step in result.steps) == pytest.approx(290e-6)
    assert any("1000 events with time zero" in warning for warning in result.warnings)


@pytest.mark.parametrize("unit", ["ns", "ms"])
def test_trc_17_the_unit_is_always_microseconds(tmp_path: Path, unit: str) -> None:
    whole = synth.Trace(header={"displayTimeUnit": "ms"})
    whole.step(0, 1_495_175_212_670, 1000)
    whole.kernel(synth.GEMM, 1_495_175_212_700, 500)
    text = synth.Trace(header={"displayTimeUnit": unit})
    text.step(0, 0, 0)
    text.kernel(synth.GEMM, 0, 0)
    text.events[0] |= {"ts": "1495175212670.754", "dur": "1000.0"}
    text.events[1] |= {"ts": "1495175212700.754", "dur": 500.0}
    first, second = run(tmp_path, whole).steps[0], run(tmp_path, text).steps[0]
    assert (first.step_s, first.useful_s) == (second.step_s, second.useful_s) == (1e-3, 5e-4)


def test_trc_19_a_step_that_lost_its_first_kernels_is_not_analysed(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(1, 0, 10_000)
    trace.step(2, 10_000, 10_000)
    for index in range(400):
        at = index * 50
        if index < 50:
            trace.add("cuda_runtime", "cudaLaunchKernel", at, 2, synth.MAIN, {"correlation": 10_000 + index})
        else:
            trace.kernel(synth.GEMM, at + 5, 40, called=at)
    result = run(tmp_path, trace)
    assert [step.step for step in result.steps] == [2]
    assert any("50 of 200 launches" in warning for warning in result.warnings)


def test_trc_20_overlapping_steps_share_no_time(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(5, 0, 100)
    trace.step(6, 98, 102)
    trace.kernel(synth.GEMM, 0, 200)
    result = run(tmp_path, trace)
    assert sum(step.step_s for step in result.steps) == pytest.approx(200e-6)
    assert not any("overlap" in warning for warning in result.warnings)
    trace.events[1] |= {"ts": 60, "dur": 140}
    result = run(tmp_path, trace)
    assert sum(step.step_s for step in result.steps) == pytest.approx(200e-6)
    assert any("overlap by 40%" in warning for warning in result.warnings)


def test_trc_21_the_profilers_overhead_is_not_launch_loss(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 140_000)
    trace.kernel(synth.GEMM, 0, 95_000)
    result = run(tmp_path, trace, ideal_s=0.05, measured_step_s=0.1)
    step = result.steps[0]
    assert step.mfu_pct == pytest.approx(50.0)
    assert step.overhead_pct == pytest.approx(40.0)
    assert step.scaled_parts_s is not None
    assert step.scaled_parts_s["cpu_launch"] == pytest.approx(0.005)
    assert step.useful_s + sum(step.scaled_parts_s.values()) == pytest.approx(0.1)
    assert any("40% longer" in warning for warning in result.warnings)


def test_trc_23_plain_and_packed_traces_are_the_same_and_a_cut_one_is_incomplete(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 1000)
    for index in range(200):
        trace.kernel(f"{synth.GEMM}{index * 7919}", index * 5, 4)
    plain = trace.write(tmp_path / "rank0_trace.json", indent=2)
    packed = trace.write(tmp_path / "rank0_trace.json.gz", indent=2)
    first, second = break_down([plain]).to_json()["steps"][0], break_down([packed]).to_json()["steps"][0]
    assert {**first, "file": ""} == {**second, "file": ""}
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(packed.read_bytes()[:-200])
    with pytest.raises(UserError, match="incomplete"):
        break_down([cut])


def _all_reduce(rank: int, start: float, end: float, world: int = 2, **args: object) -> synth.Trace:
    trace = synth.Trace(rank=rank, world_size=world)
    trace.step(0, 0, 1_100_000)
    trace.kernel(synth.GEMM, 0, start)
    trace.kernel(synth.ALL_REDUCE, start, end - start, stream=synth.COMM_STREAM, **args)
    return trace


def test_trc_24_waiting_for_a_late_rank_is_no_communication(tmp_path: Path) -> None:
    early, late = _all_reduce(0, 100_000, 1_100_000), _all_reduce(1, 1_000_000, 1_100_000)
    result = run(tmp_path, early, late)
    for step in result.steps:
        assert step.parts_s["exposed_communication"] == pytest.approx(0.1)
    assert [step.parts_s["straggler"] for step in result.steps] == [pytest.approx(0.9), 0]
    assert (result.stragglers[0].rank, result.stragglers[0].late_s) == (1, pytest.approx(0.9))
    alone = run(tmp_path, early).steps[0]
    assert alone.parts_s["exposed_communication"] <= 0.1
    assert alone.parts_s["straggler"] == 0
    assert alone.unexplained_s >= 0.9
    sized = {"Collective name": "allreduce", "In msg nelems": 1 << 26, "dtype": "Float"}
    alone = run(tmp_path, _all_reduce(0, 100_000, 1_100_000, **sized)).steps[0]
    assert alone.parts_s["exposed_communication"] < 0.3


@pytest.mark.parametrize("slow", [0, 3])
def test_trc_25_the_straggler_loss_does_not_depend_on_who_is_slow(tmp_path: Path, slow: int) -> None:
    traces = [_all_reduce(rank, 50_000 if rank == slow else 1, 60_000, 4) for rank in range(4)]
    result = run(tmp_path, *traces)
    assert result.straggler_loss_s == pytest.approx(0.049999)
    assert [(row.rank, round(row.late_s, 6)) for row in result.stragglers] == [(slow, 0.049999)]


def test_trc_30_bandwidth_is_of_the_last_to_arrive(tmp_path: Path) -> None:
    args = {"Collective name": "allreduce", "In msg nelems": 25_000_000, "dtype": "Float", "Group size": 2}
    result = run(tmp_path, _all_reduce(0, 10, 90_000, **args), _all_reduce(1, 80_000, 90_000, **args))
    for step in result.steps:
        assert step.collectives[0].bandwidth_gb_s == pytest.approx(10.0)
