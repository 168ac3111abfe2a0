"""Clocks, power, temperature and throttling of a node's devices while a window is measured.

One sampler a node writes JSON lines. NVIDIA devices are read through nvidia-ml-py where it is installed and a driver
answers; without, the CPU's frequency and the time stolen by the hypervisor are read through psutil.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import fields
import importlib
import json
from pathlib import Path
import sys
import threading
import time
from typing import Any

import psutil

from search_space.errors import UserError


INTERVAL_S = 0.5
"""Seconds between samples."""

THROTTLE_REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
    0x100: "display clock setting",
}
"""NVML's clock event reasons that mean less than full speed, by bit (idle and application clocks left out)."""


@dataclass(frozen=True, kw_only=True)
class ClockSample:
    """One device at one moment."""

    unix_s: float
    """When, seconds since 1970."""

    device: int
    """Index of the device on its node; -1 for the CPU."""

    clock_mhz: float | None = None
    """Clock of the multiprocessors, or of the CPU, MHz."""

    peak_clock_mhz: float | None = None
    """Highest clock it can have, MHz."""

    power_w: float | None = None
    """Power drawn, W."""

    temperature_c: float | None = None
    """Temperature, °C."""

    throttle: tuple[str, ...] = ()
    """Why the clock is below its peak."""

    steal_pct: float | None = None
    """CPU time that the hypervisor gave to others since the last sample, percent."""


class ClockSampler:
    """Samples all devices of this node into a file until stopped; use it as a context manager around the window."""

    def __init__(self, path: Path, interval_s: float = INTERVAL_S) -> None:
        self._path, self._interval = path, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clock-sampler", daemon=True)

    def __enter__(self) -> ClockSampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        nvml = load_nvml()
        with self._path.open("a", buffering=1) as file:
            while True:
                for sample in take(nvml):
                    file.write(json.dumps(asdict(sample)) + "\n")
                if self._stop.wait(self._interval):
                    break


def load_nvml() -> Any:
    """nvidia-ml-py, initialised; None where it is not installed or no driver answers."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # ImportError, or any of NVML's own errors
        return None
    return nvml


def take(nvml: Any = None) -> list[ClockSample]:
    """One sample of every device; of the CPU when there is no ``nvml``."""
    now = time.time()
    if nvml is None:
        return [_cpu(now)]
    return [_device(nvml, index, now) for index in range(nvml.nvmlDeviceGetCount())]


def _cpu(now: float) -> ClockSample:
    frequency = psutil.cpu_freq()
    steal = getattr(psutil.cpu_times_percent(), "steal", None)
    return ClockSample(
        unix_s=now,
        device=-1,
        clock_mhz=frequency.current if frequency else None,
        peak_clock_mhz=frequency.max if frequency and frequency.max else None,
        steal_pct=steal,
    )


def _device(nvml: Any, index: int, now: float) -> ClockSample:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(call: str, *args: Any) -> Any:
        try:
            return getattr(nvml, call)(handle, *args)
        except Exception:  # a figure that this device does not have
            return None

    power = ask("nvmlDeviceGetPowerUsage")
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:
        bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    return ClockSample(
        unix_s=now,
        device=index,
        clock_mhz=ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        peak_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM),
        power_w=None if power is None else power / 1000,
        temperature_c=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        throttle=tuple(text for bit, text in THROTTLE_REASONS.items() if (bits or 0) & bit),
    )


def read_clocks(path: Path) -> list[ClockSample]:
    """Samples from a file that :class:`ClockSampler` wrote; a half-written last line is left out.

    Raises:
        UserError: no such file, or no samples in it.
    """
    known = {item.name for item in fields(ClockSample)}
    samples = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"clock samples {path}: cannot be read ({error})") from None
    for line in lines:
        try:
            values = json.loads(line)
            values = {key: value for key, value in values.items() if key in known}
            samples.append(ClockSample(**{**values, "throttle": tuple(values.get("throttle", ()))}))
        except (ValueError, TypeError, AttributeError):
            continue
    if not samples:
        raise UserError(f"clock samples {path}: no sample in it; it needs the JSON lines of the clock sampler")
    return samples


def clock_share(
    samples: Sequence[ClockSample], start_s: float = 0.0, end_s: float = float("inf"), device: int | None = None
) -> float | None:
    """Mean clock over peak clock in a window; of all samples when none lies in it; None when no clock was read.

    Args:
        samples: of one node.
        start_s: begin of the window, seconds since 1970.
        end_s: its end.
        device: one device only.
    """
    told = [s for s in samples if s.clock_mhz and s.peak_clock_mhz and device in (None, s.device)]
    inside = [s for s in told if start_s <= s.unix_s <= end_s] or told
    if not inside:
        return None
    ratios = [min(1.0, (s.clock_mhz or 0.0) / (s.peak_clock_mhz or 1.0)) for s in inside]
    return sum(ratios) / len(ratios)


def main() -> int:
    """``python -m trial_runner.clocks FILE [INTERVAL_S]``: sample until interrupted."""
    interval = float(sys.argv[2]) if len(sys.argv) > 2 else INTERVAL_S
    with ClockSampler(Path(sys.argv[1]), interval):
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
