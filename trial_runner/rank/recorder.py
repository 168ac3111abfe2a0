"""The step recorder: stands in the place of torchtitan's profiler and writes one JSON line per step."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import gc
import json
from pathlib import Path
import time
from typing import Any
from typing import TextIO

import psutil
import torch

from trial_runner.compile_cache import cache_counters
from trial_runner.spec import rank_steps
from trial_runner.spec import rank_trace
from trial_runner.spec import TrialSpec


class TrialComplete(BaseException):
    """Raised at the end of the last step on every rank: the trial has what it came for."""


class StepRecorder:
    """Times every step of torchtitan's own loop.

    It is entered where torchtitan enters its profiler and called after each step. The clock is read after the
    device has finished, so a step time is what the step really took on this rank.
    """

    def __init__(self, spec: TrialSpec, rank: int, started: float) -> None:
        self._spec, self._rank, self._started = spec, rank, started
        self._file: TextIO = rank_steps(Path(spec.folder), rank).open("w", buffering=1)
        self._step = 0
        self._last = 0.0
        self._loss: float | None = None
        self._tokens = 0
        self._memory: dict[str, float] = {}
        self._gc_s = 0.0
        self._gc_started = 0.0
        self._graphs = 0
        self._cache = (0, 0)
        self._profiler: Any = None
        gc.callbacks.append(self._on_gc)

    def event(self, name: str, **facts: Any) -> None:
        """Write a line that is no step: a point of the start-up, with seconds since the process began."""
        self._write({"event": name, "at_s": time.perf_counter() - self._started, "unix_s": time.time(), **facts})

    def attach(self, trainer: Any) -> None:
        """Hook into a built trainer: its metrics give the loss, its profiler slot calls :meth:`step`."""
        original = trainer.metrics_processor.log

        def log(step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
            # Under a pipeline only the last stage knows the loss; torchtitan prints -1 elsewhere.
            self._loss = float(global_avg_loss) if getattr(trainer, "pp_has_last_stage", True) else None
            self._memory = _device_memory(self._spec.device)
            original(step, global_avg_loss, *args, **kwargs)

        trainer.metrics_processor.log = log
        trainer.metrics_processor.should_log = lambda step: True
        trainer.config.profiler = self
        trainer.batch_generator = _marked(trainer.batch_generator)
        self._trainer = trainer

    def build(self, **_: Any) -> StepRecorder:
        """torchtitan builds its profiler from a config; this object is both."""
        return self

    def __enter__(self) -> StepRecorder:
        self.event("training")
        self._tokens = self._trainer.ntokens_seen
        self._last = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._profiler = None
        gc.callbacks.remove(self._on_gc)

    def step(self) -> None:
        """Record the step that has just ended and start or stop the trace.

        Raises:
            TrialComplete: that was the last step.
        """
        spec = self._spec
        if spec.device == "gpu":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._step += 1
        measured_end = spec.warmup_steps + spec.steps
        phase = (
            "warmup" if self._step <= spec.warmup_steps else "measured" if self._step <= measured_end else "trace"
        )  # fmt: skip
        graphs = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)
        hits, misses = cache_counters()
        self._write(
            {
                "step": self._step,
                "phase": phase,
                "step_time_s": now - self._last,
                "at_s": now - self._started,
                "loss": self._loss,
                "tokens": self._trainer.ntokens_seen - self._tokens,
                "gc_s": round(self._gc_s, 6),
                "compiles": graphs - self._graphs,
                "cache_hits": hits - self._cache[0],
                "cache_misses": misses - self._cache[1],
                **self._memory,
            }
        )
        self._graphs, self._gc_s, self._loss = graphs, 0.0, None
        self._cache = (hits, misses)
        self._tokens = self._trainer.ntokens_seen
        self._trace(measured_end)
        self._last = time.perf_counter()

    def _trace(self, measured_end: int) -> None:
        """Advance the profiler: one step to warm it up, one step traced."""
        if not self._spec.trace:
            if self._step >= measured_end:
                self._finish()
            return
        if self._step == measured_end:
            self._profiler = _profiler(rank_trace(Path(self._spec.folder), self._rank))
            self._profiler.__enter__()
        elif self._profiler is not None:
            self._profiler.step()
            if self._step >= measured_end + 2:
                self._profiler.__exit__(None, None, None)
                self._profiler = None
                self._finish()

    def _finish(self) -> None:
        self.event("finished")
        raise TrialComplete

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._gc_started = time.perf_counter()
        else:
            self._gc_s += time.perf_counter() - self._gc_started

    def _write(self, facts: dict[str, Any]) -> None:
        self._file.write(json.dumps(facts) + "\n")


def _marked(batches: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """A batch generator whose fetches show in traces under a name that the breakdown takes for data loading."""

    def generator(*args: Any) -> Iterator[Any]:
        source = batches(*args)
        while True:
            with torch.profiler.record_function("dataloader.__next__"):
                batch = next(source)
            yield batch

    return generator


def _profiler(path: Path) -> Any:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        record_shapes=True,
    )


def _device_memory(device: str) -> dict[str, float]:
    """Peak memory since the last reset, bytes; on a CPU the resident memory of the process."""
    if device == "gpu":
        stats = torch.cuda.memory_stats()
        return {
            "allocated_bytes": stats["allocated_bytes.all.peak"],
            "reserved_bytes": stats["reserved_bytes.all.peak"],
            "held_bytes": stats["allocated_bytes.all.current"],
            "alloc_retries": stats["num_alloc_retries"],
        }
    resident = psutil.Process().memory_info().rss
    # Resident memory of a CPU process wanders with libraries and buffers, so it says nothing about leaks.
    return {"allocated_bytes": resident, "reserved_bytes": resident, "alloc_retries": 0}
