"""Recompute by marks, by shapes and by the ratio of times, and what is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trial_runner.breakdown import synth
from trial_runner.breakdown import break_down
from trial_runner.breakdown import StepBreakdown


NODE = "autograd::engine::evaluate_function: MmBackward0"


def run(folder: Path, trace: synth.Trace) -> StepBreakdown:
    step = break_down([trace.write(folder / "rank0.json")]).steps[0]
    total = step.useful_s + sum(step.parts_s.values()) + step.unexplained_s
    assert total == pytest.approx(step.step_s, abs=1e-6)
    return step


def product(trace: synth.Trace, m: int, n: int, k: int, at: float, length: float, tid: int) -> None:
    """A matrix product: the operator with its shapes, its launch, its kernel 500 µs later."""
    dims = [[m, k], [k, n]]
    trace.op("aten::mm", at, 8, tid, **{"Input Dims": dims, "Input type": ["float", "float"]})
    trace.kernel(synth.GEMM, at + 500, length, called=at + 3, tid=tid)


def compiled(again: bool) -> synth.Trace:
    """A compiled layer pair of (64, 32, 16) and (64, 16, 32): forward, perhaps forward again, backward."""
    trace = synth.Trace()
    trace.step(0, 0, 2000)
    trace.op("Torch-Compiled Region: 0/0", 0, 100)
    product(trace, 64, 32, 16, 10, 30, synth.MAIN)
    product(trace, 64, 16, 32, 50, 20, synth.MAIN)
    trace.op("autograd::engine::evaluate_function: CompiledFunctionBackward", 200, 400, synth.BACKWARD)
    at = 210
    shapes = [(64, 32, 16), (64, 16, 32)] if again else []
    shapes += [(64, 16, 32), (16, 32, 64), (64, 32, 16), (32, 16, 64)]
    for shape in shapes:
        product(trace, *shape, at, 25, synth.BACKWARD)
        at += 40
    return trace


def test_shapes_tell_recompute_inside_a_compiled_backward(tmp_path: Path) -> None:
    step = run(tmp_path, compiled(again=True))
    assert step.parts_s["recompute"] == pytest.approx(50e-6)
    assert step.recompute_basis == "shapes"
    step = run(tmp_path, compiled(again=False))
    assert step.parts_s["recompute"] == 0
    assert step.useful_s == pytest.approx(150e-6)


def test_a_reentrant_checkpoint_runs_forward_before_its_inner_backward(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 2000)
    trace.kernel(synth.GEMM, 500, 40, called=5)
    trace.op("autograd::engine::evaluate_function: CheckpointFunctionBackward", 100, 300, synth.BACKWARD)
    trace.op("CheckpointFunctionBackward", 101, 298, synth.BACKWARD)
    trace.kernel(synth.GEMM, 600, 45, called=110, tid=synth.BACKWARD)
    trace.op(NODE, 200, 150, synth.BACKWARD)
    trace.kernel(synth.GEMM, 700, 80, called=210, tid=synth.BACKWARD)
    step = run(tmp_path, trace)
    assert step.parts_s["recompute"] == pytest.approx(45e-6)
    assert step.useful_s == pytest.approx(120e-6)


@pytest.mark.parametrize(
    ("cat", "name"),
    [
        ("python_function", "torch/utils/checkpoint.py(1100): recompute_fn"),
        ("python_function", "torch/utils/checkpoint.py(1000): unpack_hook"),
        ("user_annotation", "## recompute layers.3 ##"),
    ],
)
def test_frames_and_annotations_mark_recompute(tmp_path: Path, cat: str, name: str) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 2000)
    trace.op(NODE, 100, 300, synth.BACKWARD)
    trace.add(cat, name, 105, 50, 0)
    trace.kernel(synth.GEMM, 600, 45, called=110, tid=synth.BACKWARD)
    trace.kernel("void at::native::vectorized_elementwise_kernel<4>()", 645, 5, called=120, tid=synth.BACKWARD)
    trace.kernel(synth.GEMM, 700, 80, called=210, tid=synth.BACKWARD)
    assert run(tmp_path, trace).parts_s["recompute"] == pytest.approx(50e-6)


@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize(("backward", "expected"), [(300, 100), (250, 50), (220, 0), (200, 0), (100, 0)])
def test_the_ratio_of_gemm_times_where_nothing_else_tells(
    tmp_path: Path, linked: bool, backward: int, expected: int
) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 2000)
    trace.kernel(synth.GEMM, 500, 100, called=10 if linked else None)
    trace.op(NODE, 600, 500, synth.BACKWARD)
    trace.kernel(synth.GEMM, 700, backward, called=610 if linked else None, tid=synth.BACKWARD)
    trace.add("user_annotation", "Optimizer.step#AdamW.step", 1200, 100, synth.MAIN)
    trace.kernel("multi_tensor_apply_kernel<Adam>", 1300, 100, called=1210 if linked else None)
    step = run(tmp_path, trace)
    assert step.parts_s["recompute"] == pytest.approx(expected * 1e-6)


def test_forward_attention_inside_backward_is_recompute(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 2000)
    trace.kernel("void flash_fwd_kernel<T>()", 100, 30, called=10)
    trace.op(NODE, 200, 300, synth.BACKWARD)
    trace.kernel("void flash_fwd_kernel<T>()", 600, 35, called=210, tid=synth.BACKWARD)
    trace.kernel("void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<T>()", 700, 90, called=250, tid=synth.BACKWARD)
    assert run(tmp_path, trace).parts_s["recompute"] == pytest.approx(35e-6)


def test_eager_backward_without_marks_has_no_recompute(tmp_path: Path) -> None:
    """Square products look alike in forward and backward; autograd's numbers say that none ran forward again."""
    trace = synth.Trace()
    trace.step(0, 0, 2000)
    trace.op("aten::mm", 10, 8, **{"Sequence number": 4, "Fwd thread id": 0, "Input Dims": [[64, 64], [64, 64]]})
    trace.kernel(synth.GEMM, 500, 20, called=12)
    trace.op(NODE, 100, 200, synth.BACKWARD, **{"Sequence number": 4, "Fwd thread id": 1})
    for index in range(4):
        product(trace, 64, 64, 64, 110 + 20 * index, 20, synth.BACKWARD)
    assert run(tmp_path, trace).parts_s["recompute"] == 0


def test_an_ideal_time_beside_recompute_cuts_recompute(tmp_path: Path) -> None:
    trace = compiled(again=True)
    path = trace.write(tmp_path / "rank0.json")
    result = break_down([path], ideal_s=170e-6)
    assert result.steps[0].parts_s["recompute"] == pytest.approx(30e-6)
    assert any("recompute is cut" in warning for warning in result.warnings)


def test_an_empty_step_does_not_spoil_the_others(tmp_path: Path) -> None:
    trace = synth.Trace()
    trace.step(0, 0, 1000)
    trace.step(1, 1000, 50)
    trace.kernel(synth.GEMM, 0, 500)
    result = break_down([trace.write(tmp_path / "rank0.json")], ideal_s=1e-4)
    assert [step.step for step in result.steps] == [0]
    assert any(warning.startswith("error:") and "step 1" in warning for warning in result.warnings)
