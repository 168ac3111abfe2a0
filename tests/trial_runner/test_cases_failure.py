"""Public reports about failures, each as a test named after its case."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
import stat

import pytest

from search_space.candidate import Candidate
from search_space.errors import JobError
from search_space.job_file import parse_job
from trial_runner.devices import dirty_devices
from trial_runner.effective import effective
from trial_runner.effective import inactive_features
from trial_runner.failure import failure_class
from trial_runner.failure.classes import CANDIDATE
from trial_runner.failure.classes import CLASSES
from trial_runner.failure.classes import MEMORY
from trial_runner.failure.classes import SIBLINGS
from trial_runner.failure.find import named
from trial_runner.failure.memory import read_out_of_memory
from trial_runner.failure.silence import hung
from trial_runner.gang import rank_environment
from trial_runner.measure import leak_bytes_per_step
from trial_runner.spec import rank_log
from trial_runner.spec import rank_steps
from trial_runner.spec import rank_trace
from trial_runner.spec import TrialSpec
from trial_runner.transport import degraded
from trial_runner.transport import transport_of
from trial_runner.transport import trial_transport


GIB = 2.0**30


def oom_text(capacity: float, free: float, own: float, allocated: float, unused: float, asked: float) -> str:
    return (
        f"OutOfMemoryError: CUDA out of memory. Tried to allocate {asked:.2f} GiB. GPU 0 has a total capacity of "
        f"{capacity:.2f} GiB of which {free:.2f} GiB is free. Including non-PyTorch memory, this process has "
        f"{own:.2f} GiB memory in use. Of the allocated memory {allocated:.2f} GiB is allocated by PyTorch, and "
        f"{unused:.2f} GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
        "setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def test_MEM_11_fragmentation_is_no_verdict_on_the_candidate() -> None:
    failure = named(oom_text(183, 5, 178, 140, 35, 16), "torch", 3)
    assert failure.kind == "out_of_memory_fragmentation"
    assert failure.memory is not None
    assert failure.memory["allocated_bytes"] == pytest.approx(140 * GIB)
    assert failure.memory["reserved_bytes"] == pytest.approx(175 * GIB)
    assert failure.memory["requested_bytes"] == pytest.approx(16 * GIB)
    assert failure_class(failure.kind).teaches == CANDIDATE and "expandable_segments" in failure.advice
    big = named(oom_text(79.15, 1, 78.1, 70, 1.5, 16), "torch", 3)
    assert big.kind == "out_of_memory" and failure_class(big.kind).teaches == MEMORY


def test_MEM_12_two_allocator_options_do_not_go_together(tmp_path: Path) -> None:
    pair = "max_split_size_mb:128,expandable_segments:True"
    text = '[model]\ntorchtitan = "llama3:llama3_debugmodel"\n[env.mine]\nPYTORCH_CUDA_ALLOC_CONF = "{}"\n'
    with pytest.raises(JobError, match="max_split_size_mb"):
        parse_job(text.format(pair))
    parse_job(text.format("max_split_size_mb:128"))
    spec = TrialSpec(
        study="s", trial=0, folder=str(tmp_path), config_file="c", config_function="f", world_size=1, device="gpu",
        warmup_steps=1, steps=2,
    )  # fmt: skip
    env = rank_environment(spec, 0, 0, 1, 0, ("127.0.0.1", 1), None)
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_MEM_14_a_library_that_ran_out_is_no_network_fault() -> None:
    text = (
        "DistBackendError: NCCL error, ncclUnhandledCudaError: Call to CUDA function failed. Last error: "
        "Failed to CUDA calloc 536870912 bytes"
    )
    assert named(text, "torch.distributed", 0).kind == "out_of_memory_outside"


def test_MEM_19_steady_growth_is_a_leak_and_no_winner() -> None:
    def steps(held: list[float]) -> list[dict[str, object]]:
        return [{"phase": "measured", "held_bytes": value * GIB} for value in held]

    assert leak_bytes_per_step(steps([61 + 0.4 * i for i in range(20)])) == pytest.approx(0.4 * GIB)
    assert leak_bytes_per_step(steps([61.0] * 20)) == 0
    assert leak_bytes_per_step(steps([61.0] + [69.0] * 19)) == 0
    assert leak_bytes_per_step(steps([61 + 2 * (i % 3) for i in range(20)])) == 0


def test_MEM_24_memory_of_others_is_seen_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "DistBackendError: NCCL error: out of memory; allocator at 8.9 of 11 GB"
    assert named(text, "torch.distributed", 0).kind == "out_of_memory_outside"
    foreign = oom_text(79.15, 0.5, 60.0, 50, 1, 2).replace(
        "Including", "Process 4711 has 15.00 GiB memory in use. Including"
    )
    numbers = read_out_of_memory(foreign)
    assert numbers.foreign_bytes == pytest.approx(15 * GIB) and numbers.kind == "dirty_device"
    assert named(foreign, "torch", 0).kind == "dirty_device"

    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 15360\necho 4\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert dirty_devices(["0", "1"], patience_s=0.0) == {"0": 15 * GIB}


IB = "node1:88:88 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\nnode1:88:88 [0] NCCL INFO Using network IB\n"
SOCKET = (
    "node1:88:88 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.3<0>\nnode1:88:88 [0] NCCL INFO Using network Socket\n"
)
NO_IB = "node1:88:88 [0] NCCL INFO NET/IB : No device found.\n"


def test_COM_01_and_COM_02_the_transport_is_read_and_not_mixed(tmp_path: Path) -> None:
    assert transport_of(IB) == "ib" and transport_of(SOCKET) == "socket"
    assert transport_of(NO_IB + SOCKET) == "socket_without_ib" and transport_of("loss 8.0") is None
    rank_log(tmp_path, 0).write_text(IB)
    rank_log(tmp_path, 1).write_text(NO_IB + SOCKET)
    assert trial_transport(tmp_path, 2) == "socket_without_ib"
    assert degraded("socket_without_ib", "ib") and not degraded("ib", "ib") and not degraded(None, "ib")
    assert failure_class("environment_degraded").retries == 1


def test_CON_01_the_frameworks_late_error_is_a_bad_configuration() -> None:
    failure = named("RuntimeError: shape '[1, 8192, -1, 128]' is invalid for input of size 524288", "builtins", 0)
    assert failure.kind == "framework_invalid" and failure_class(failure.kind).retries == 0


def test_CON_13_and_CON_14_compile_and_checkpointing_disagree() -> None:
    text = (
        "CheckpointError: torch.utils.checkpoint: trying to save more tensors during recomputation than during forward"
    )
    failure = named(text, "torch.utils.checkpoint", 0)
    assert failure.kind == "checkpoint_mismatch" and failure.fault == "checkpoint_around_compile"
    kind = failure_class(failure.kind)
    assert (kind.retries, kind.teaches) == (0, SIBLINGS)
    assert "inside" in failure.advice and "newer PyTorch" in failure.advice


def test_CON_17_lost_alignment_is_deterministic() -> None:
    text = "RuntimeError: expected strides of mat_a to be multiples of 16 bytes, got M = 16333"
    failure = named(text, "builtins", 0)
    assert failure.kind == "kernel_alignment" and failure_class(failure.kind).retries == 0


def test_CON_19_async_tp_that_did_not_run_is_said(tmp_path: Path) -> None:
    asked = Candidate(tensor_parallel=2, compile=True, async_tp=True)
    rank_log(tmp_path, 0).write_text("loss 8.0\n")
    with gzip.open(rank_trace(tmp_path, 0), "wb") as trace:
        trace.write(b'{"traceEvents":[{"name":"symm_mem::fused_all_gather_matmul"}]}')
    assert inactive_features(asked, tmp_path) == ()
    with gzip.open(rank_trace(tmp_path, 0), "wb") as trace:
        trace.write(b'{"traceEvents":[{"name":"nccl:_all_gather_base"}]}')
    assert inactive_features(asked, tmp_path) == ("async_tp",)
    assert effective(asked, ("async_tp",)) == Candidate(tensor_parallel=2, compile=True)
    rank_trace(tmp_path, 0).unlink()
    rank_log(tmp_path, 1).write_text("torch._dynamo hit config.recompile_limit (8)\n")
    assert inactive_features(asked, tmp_path) == ("compile", "async_tp")


def test_CON_25_and_CON_27_known_faults_hold_their_siblings() -> None:
    mesh = named("KeyError: \"Invalid mesh dim: mesh 'tp' is not available\"", "builtins", 0)
    assert (mesh.kind, mesh.fault) == ("framework_bug", "mesh_without_tensor_parallel")
    batches = named("ValueError: Expecting 2 arg_mbs but got 1", "builtins", 1)
    assert (batches.kind, batches.fault) == ("framework_bug", "micro_batches_of_the_schedule")


def write_steps(folder: Path, rank: int, steps: int, at: float, phase: str = "measured") -> None:
    lines = [{"event": "imported", "at_s": 1.0}]
    lines += [{"step": i + 1, "phase": phase, "step_time_s": 0.5} for i in range(steps)]
    rank_steps(folder, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.utime(rank_steps(folder, rank), (at, at))


def test_CON_29_a_hang_in_the_first_step_is_never_retried(tmp_path: Path) -> None:
    write_steps(tmp_path, 0, 0, 1000.0)
    write_steps(tmp_path, 1, 0, 1000.0)
    assert hung(tmp_path, 2, 1010.0, "cpu", first_step_left_s=5.0) is None
    assert hung(tmp_path, 2, 1010.0, "cpu", first_step_left_s=-1.0) == "hang_first_step"
    assert failure_class("hang_first_step").retries == 0
    write_steps(tmp_path, 0, 7, 1000.0)
    write_steps(tmp_path, 1, 6, 1000.0)
    assert hung(tmp_path, 2, 1030.0, "cpu", first_step_left_s=-1.0) is None
    assert hung(tmp_path, 2, 1061.0, "cpu", first_step_left_s=-1.0) == "hang"
    assert hung(tmp_path, 2, 1061.0, "gpu", first_step_left_s=-1.0) is None
    write_steps(tmp_path, 1, 7, 1000.0, phase="trace")
    assert hung(tmp_path, 2, 9999.0, "cpu", first_step_left_s=-1.0) is None


def test_every_class_has_reasons_and_one_name() -> None:
    names = [item.kind for item in CLASSES]
    assert len(names) == len(set(names))
    assert all(item.why and item.advice for item in CLASSES)
    assert failure_class("of a later version").kind == "unknown"
