"""Clock samples: what NVML and the CPU say, written and read back, and the split of the kernel part."""

from __future__ import annotations

from pathlib import Path
import time
from types import SimpleNamespace
from typing import Any

import pytest

from search_space.errors import UserError
from tests.trial_runner.breakdown import synth
from trial_runner import clocks
from trial_runner.breakdown import break_down
from trial_runner.clocks import clock_share
from trial_runner.clocks import ClockSample
from trial_runner.clocks import ClockSampler
from trial_runner.clocks import read_clocks
from trial_runner.clocks import take


def nvml(**missing: object) -> Any:
    """A driver with two devices; the second has no power sensor and an older driver's call for reasons."""

    def power(handle: int) -> int:
        if handle:
            raise RuntimeError("not supported")
        return 350_500

    def events(handle: int) -> int:
        if handle:
            raise RuntimeError("no such call")
        return 0x4 | 0x20 | 0x1

    return SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetPowerUsage=power,
        nvmlDeviceGetCurrentClocksEventReasons=events,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x40,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1410 if handle == 0 else 1980,
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: 1980,
        nvmlDeviceGetTemperature=lambda handle, kind: 71,
    )


def test_devices_by_nvml() -> None:
    first, second = take(nvml())
    assert (first.clock_mhz, first.peak_clock_mhz, first.power_w, first.temperature_c) == (1410, 1980, 350.5, 71)
    assert first.throttle == ("software power cap", "software thermal slowdown")
    assert second.power_w is None
    assert second.throttle == ("hardware thermal slowdown",)
    assert clock_share([first, second]) == pytest.approx((1410 / 1980 + 1) / 2)
    assert clock_share([first, second], device=1) == 1.0


def test_the_cpu_without_a_driver() -> None:
    (sample,) = take(None)
    assert sample.device == -1
    assert abs(sample.unix_s - time.time()) < 5


def test_samples_are_written_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "load_nvml", nvml)
    path = tmp_path / "clocks.jsonl"
    with ClockSampler(path, interval_s=0.01):
        time.sleep(0.1)
    with path.open("a") as file:
        file.write('{"unix_s": 1, "dev')
    samples = read_clocks(path)
    assert len(samples) >= 4 and {sample.device for sample in samples} == {0, 1}
    path.write_text("nothing\n")
    with pytest.raises(UserError, match="no sample"):
        read_clocks(path)


def test_the_window_decides_and_everything_counts_when_it_is_empty() -> None:
    samples = [
        ClockSample(unix_s=float(second), device=0, clock_mhz=1000 + 100 * second, peak_clock_mhz=2000)
        for second in range(10)
    ]
    assert clock_share(samples, 2, 3) == pytest.approx(0.625)
    assert clock_share(samples, 100, 101) == pytest.approx(0.725)
    assert clock_share([ClockSample(unix_s=1, device=-1)]) is None


def test_the_kernel_part_is_split_by_the_clock(tmp_path: Path) -> None:
    trace = synth.Trace(base_ns=10**18)
    trace.step(0, 0, 1_000_000)
    trace.kernel(synth.GEMM, 0, 800_000)
    path = trace.write(tmp_path / "t.json")
    slow = [ClockSample(unix_s=1e9 + 0.5, device=0, clock_mhz=1500, peak_clock_mhz=2000)]
    step = break_down([path], ideal_s=0.4, clocks=slow).steps[0]
    assert step.parts_s["kernel_efficiency"] == pytest.approx(0.4)
    assert step.clock_deficit_s == pytest.approx(0.2)
    step = break_down([path], ideal_s=0.79, clocks=slow).steps[0]
    assert step.clock_deficit_s == pytest.approx(0.01)
    advice = break_down([path], ideal_s=0.4, clocks=slow, expected={"kernel_efficiency": (0, 0.1)}).findings
    assert any(finding.group == "hardware" and "clock" in finding.cause for finding in advice)
