"""Public reports about running trials, each as a test named after its case."""

from __future__ import annotations

import json
from pathlib import Path
import signal

import pytest

from search_space.hardware import detect_hardware
from search_space.hardware import TABLE
from trial_runner.failure import failure_class
from trial_runner.failure import find_failure
from trial_runner.failure import named
from trial_runner.failure.memory import read_out_of_memory
from trial_runner.gang import free_port
from trial_runner.gang import rank_environment
from trial_runner.host_memory import oom_kills
from trial_runner.measure import measure
from trial_runner.peak_check import implied_peak_flops
from trial_runner.peak_check import peaks_disagree
from trial_runner.spec import rank_log
from trial_runner.spec import rank_steps
from trial_runner.spec import TrialSpec


def test_RUN_02_more_free_than_asked_teaches_nothing_about_size() -> None:
    text = (
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 4.00 GiB of "
        "which 2.35 GiB is free. Of the allocated memory 0.81 GiB is allocated by PyTorch, and 10.00 MiB is reserved "
        "by PyTorch but unallocated."
    )
    assert read_out_of_memory(text).kind == "out_of_memory_inconsistent"
    assert failure_class("out_of_memory_inconsistent").teaches != "memory"


@pytest.mark.parametrize("text", ["RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "Failed to create curand"])
def test_RUN_04_the_memory_state_decides_what_a_library_error_means(text: str) -> None:
    assert named(text, "builtins", 0, used_share=0.97).kind == "out_of_memory"
    assert named(text, "builtins", 0, used_share=0.5).kind == "exception"
    assert named(text, "builtins", 0).kind == "exception"


def test_RUN_08_illegal_access_is_retried_once() -> None:
    text = "DistBackendError: NCCL watchdog: CUDA error: an illegal memory access was encountered"
    assert named(text, "torch.distributed", 1).kind == "illegal_access"
    assert failure_class("illegal_access").retries == 1


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (79, "hardware_fault"),
        (48, "hardware_fault"),
        (74, "hardware_fault"),
        (94, "hardware_fault"),
        (31, "illegal_access"),
        (13, "illegal_access"),
    ],
)
def test_RUN_10_driver_events_by_table(number: int, kind: str) -> None:
    tail = f"NVRM: Xid (PCI:0000:02:00): {number}, pid=1234\nsomething"
    failure = named("RuntimeError: CUDA error: unknown error", "builtins", 0, tail)
    assert failure.kind == kind and f"Xid {number}" in failure.text


def test_RUN_11_killed_by_the_kernel_or_by_somebody(tmp_path: Path) -> None:
    rank_log(tmp_path, 0).write_text("")
    failure = find_failure(tmp_path, 1, "failed", {0: -signal.SIGKILL}, host_oom_kills=1)
    assert failure.kind == "host_out_of_memory" and "data loader workers" in failure.advice
    assert find_failure(tmp_path, 1, "failed", {0: -signal.SIGKILL}).kind == "rank_killed"

    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/pod/box\n")
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 2\n")
    group = tmp_path / "groups" / "pod" / "box"
    group.mkdir(parents=True)
    (group / "memory.events").write_text("oom 4\noom_kill 3\n")
    assert oom_kills(tmp_path, tmp_path / "groups") == 3
    assert oom_kills(tmp_path / "absent", tmp_path / "absent") == 0


def test_RUN_14_and_RUN_15_rays_words() -> None:
    monitor = "OutOfMemoryError: Task was killed due to the node running low on memory. 21.91GB / 33.28GB (0.66)"
    assert named(monitor, "", None).kind == "host_out_of_memory"
    generic = "ActorDiedError: Worker exit type: SYSTEM_ERROR. connection error code 2. End of file"
    assert named(generic, "", None).kind == "exception"
    assert named(generic + " the session folder is over 95% full", "", None).kind == "disk_full"


def test_RUN_17_and_RUN_18_each_trial_has_its_own_port_and_place(tmp_path: Path) -> None:
    ports = {free_port() for _ in range(20)}
    assert len(ports) > 10
    assert named("DistNetworkError: EADDRINUSE, errno: 98 - Address already in use", "torch", 0).kind == "rendezvous"
    assert failure_class("rendezvous").retries >= 1
    spec = TrialSpec(
        study="s", trial=1, folder=str(tmp_path), config_file="c", config_function="f", world_size=2, device="cpu",
        warmup_steps=1, steps=1,
    )  # fmt: skip
    env = rank_environment(spec, 1, 1, 2, 0, ("127.0.0.1", 4242), None)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "4242")


def test_RUN_19_a_failed_rendezvous_is_infrastructure() -> None:
    failure = named("DistStoreError: connection to the C10d store has failed", "torch.distributed", 3)
    assert failure.kind == "rendezvous" and failure_class(failure.kind).teaches == "nothing"


@pytest.mark.parametrize(
    "text",
    [
        "FileNotFoundError: [Errno 2] No such file: 'torchinductor_u/triton/0/x.cubin.tmp.pid_1'",
        "_pickle.UnpicklingError: pickle data was truncated",
    ],
)
def test_RUN_20_and_RUN_22_a_raced_compile_cache_is_tried_again(text: str) -> None:
    assert named(text, "builtins", 60).kind == "compile_cache"
    assert failure_class("compile_cache").retries == 1 and failure_class("compile_cache").teaches == "nothing"


def steps_of(folder: Path, rank: int, loss: float | None, step_s: float = 0.5) -> None:
    lines = [
        {"step": i + 1, "phase": "measured", "step_time_s": step_s, "at_s": i, "loss": loss, "gc_s": 0, "compiles": 0}
        for i in range(8)
    ]
    rank_steps(folder, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("knows", [0, 1])
def test_RUN_24_the_loss_comes_from_the_rank_that_has_it(tmp_path: Path, knows: int) -> None:
    for rank in range(2):
        steps_of(tmp_path, rank, 7.5 if rank == knows else None)
    found = measure(tmp_path, world_size=2, tokens_per_step=100, ideal_s=0.1)
    assert found is not None and found.loss == (7.5,) * 8


def test_RUN_25_a_log_that_divides_by_another_peak_is_flagged() -> None:
    log = "step: 10  loss: 2.1  tps: 9,600  tflops: 119.27  mfu: 12.06%\n"
    assert implied_peak_flops(log) == pytest.approx(989e12, rel=0.001)
    assert not peaks_disagree(log, TABLE["H100-SXM"].peak("bf16"))
    assert peaks_disagree(log.replace("12.06", "38.2"), TABLE["H100-SXM"].peak("bf16"))
    assert 480e12 / TABLE["H100-SXM"].peak("bf16") == pytest.approx(0.485, abs=0.001)


def test_RUN_26_an_mfu_above_the_peak_is_no_measurement(tmp_path: Path) -> None:
    steps_of(tmp_path, 0, 7.5)
    found = measure(tmp_path, world_size=1, tokens_per_step=100, ideal_s=2.5)
    assert found is not None and "impossible_mfu" in found.flags
    assert detect_hardware("AMD Instinct MI999X") is None


def test_RUN_28_mfu_means_the_same_at_every_degree(tmp_path: Path) -> None:
    for rank in range(8):
        steps_of(tmp_path, rank, 7.5)
    found = [measure(tmp_path, world_size=w, tokens_per_step=1000 * w, ideal_s=0.2) for w in (1, 8)]
    assert found[0] is not None and found[1] is not None
    assert found[0].mfu_pct == found[1].mfu_pct == pytest.approx(40)
    assert found[0].tokens_per_s_per_device == found[1].tokens_per_s_per_device


@pytest.mark.parametrize(
    ("name", "tflops"),
    [("H100-SXM", 989), ("H100-NVL", 835), ("H100-PCIe", 756), ("H200", 989), ("A100-80GB", 312), ("A100-40GB", 312),
     ("B200", 2250), ("GB200", 2500), ("MI300X", 1307), ("MI325X", 1307), ("MI355X", 2500)],
)  # fmt: skip
def test_RUN_27_and_RUN_30_peaks_are_dense_with_their_source(name: str, tflops: float) -> None:
    entry = TABLE[name]
    assert entry.peak("bf16") == pytest.approx(tflops * 1e12, rel=0.002) and "dense" in entry.source
    if "fp8" in entry.peak_flops:
        assert entry.peak("fp8") / entry.peak("bf16") == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA B300", "B300"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA L40S", None),
    ],
)
def test_RUN_31_a_driver_name_is_its_own_row_or_none(driver: str, name: str | None) -> None:
    assert detect_hardware(driver) == name
