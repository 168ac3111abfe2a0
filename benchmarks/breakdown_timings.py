"""The parts of the breakdown against a clock: a small transformer, eager, with full checkpointing, and compiled.

Steps of the modes alternate, so that a busy machine slows all alike. On a GPU the steps are timed by CUDA events around
their work, on a CPU by its clock. Prints one JSON line: for each mode the timed step, the traced step and its parts;
and for checkpointing the extra time against eager beside the recompute part.

    python benchmarks/breakdown_timings.py [--device cuda|cpu] [--compile] [--layers 4] [--hidden 1024] [--batch 4]
"""

from __future__ import annotations

import argparse
from collections import defaultdict
import json
from pathlib import Path
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trial_runner.breakdown import break_down


class Model(nn.Module):
    """A stack of pre-norm blocks with a linear head; ``again`` runs each block's forward again in backward."""

    def __init__(self, layers: int, hidden: int, compiled: bool) -> None:
        super().__init__()
        heads = max(1, hidden // 64)
        blocks = [
            nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        ]
        self.blocks = nn.ModuleList(torch.compile(block) if compiled else block for block in blocks)
        self.head = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, again: bool) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if again else block(x)
        return self.head(x).float().square().mean()


class Clock:
    """Seconds of one step, by CUDA events on a GPU."""

    def __init__(self, device: str) -> None:
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else None

    def __enter__(self) -> Clock:
        self._start = time.perf_counter()
        if self._events:
            self._events[0].record()
        return self

    def __exit__(self, *_: object) -> None:
        if self._events:
            self._events[1].record()
            torch.cuda.synchronize()
            self.seconds = self._events[0].elapsed_time(self._events[1]) / 1e3
        else:
            self.seconds = time.perf_counter() - self._start


def main() -> int:
    """Train, trace, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="a compiled mode as well")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    device, dtype = args.device, torch.bfloat16 if args.device == "cuda" else torch.float32
    if device == "cpu":
        torch.set_num_threads(1)
    modes = {"eager": (False, False), "full_checkpoint": (False, True)}
    if args.compile:
        modes["compiled"] = (True, False)
    models = {flag: Model(args.layers, args.hidden, flag).to(device, dtype) for flag in {m[0] for m in modes.values()}}
    optimizers = {flag: torch.optim.AdamW(model.parameters(), fused=True) for flag, model in models.items()}
    x = torch.randn(args.batch, args.seq_len, args.hidden, device=device, dtype=dtype)

    def step(mode: str) -> float:
        compiled, again = modes[mode]
        with Clock(device) as clock:
            models[compiled](x, again).backward()
            optimizers[compiled].step()
            optimizers[compiled].zero_grad(set_to_none=True)
        return clock.seconds

    for _ in range(3):
        for mode in modes:
            step(mode)
    timed = defaultdict(list)
    for _ in range(args.rounds):
        for mode in modes:
            timed[mode].append(step(mode))
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    traced = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank0_trace.json"
        count = args.rounds * len(modes)
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=count, repeat=1)
        with torch.profiler.profile(
            activities=activities,
            schedule=schedule,
            record_shapes=True,
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        ) as profiler:
            step("eager")
            profiler.step()
            for _ in range(args.rounds):
                for mode in modes:
                    traced[mode].append(step(mode))
                    profiler.step()
        found = break_down([path])
    print(json.dumps(report(list(modes), timed, traced, found.steps, device)))
    return 0


def report(
    modes: list[str], timed: dict[str, list[float]], traced: dict[str, list[float]], steps: list[Any], device: str
) -> dict[str, Any]:
    """Medians by mode, and recompute beside the extra time of checkpointing."""
    result: dict[str, Any] = {"device": device, "modes": {}}
    for index, mode in enumerate(modes):
        mine = steps[index :: len(modes)]
        result["modes"][mode] = {
            "timed_s": statistics.median(timed[mode]),
            "timed_under_profiler_s": statistics.median(traced[mode]),
            "step_s": statistics.median(one.step_s for one in mine),
            "compute_s": statistics.median(one.compute_s for one in mine),
            "parts_s": {part: statistics.median(one.parts_s[part] for one in mine) for part in mine[0].parts_s},
            "coverage_pct": min(one.coverage_pct for one in mine),
        }
    extra = [again - eager for again, eager in zip(traced["full_checkpoint"], traced["eager"])]
    found = result["modes"]["full_checkpoint"]["parts_s"]["recompute"]
    result["extra_s"] = statistics.median(extra)
    result["recompute_over_extra"] = found / result["extra_s"]
    return result


if __name__ == "__main__":
    raise SystemExit(main())
