"""Time and peak memory of `tune breakdown`'s code against HolisticTraceAnalysis (load + temporal breakdown).

Both read the same traces, each in a process of its own: two generated ones of 50 MB (device kernels mostly; CPU
operators and Python frames mostly) and any given on the command line. Prints one JSON line. Times are best of
``--repeats``, with and without the imports; memory is the peak resident set of the whole process.

    python benchmarks/breakdown_vs_hta.py [--hta-python PYTHON] [--megabytes 50] [TRACE…]

``--hta-python`` is an interpreter with HolisticTraceAnalysis installed (default: this one).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import json
import os
from pathlib import Path
import random
import subprocess
import sys
import tempfile
from typing import Any
from typing import TextIO


ROOT = Path(__file__).resolve().parents[1]

OURS = """
import json, resource, sys, time
begin = time.perf_counter()
from pathlib import Path
from trial_runner.breakdown import break_down
ready = time.perf_counter()
steps = break_down([Path(sys.argv[1])]).steps
end = time.perf_counter()
busy = sum(step.compute_s for step in steps)
"""

HTA = """
import json, logging, os, resource, sys, time
logging.disable(logging.CRITICAL)
begin = time.perf_counter()
from hta.trace_analysis import TraceAnalysis
ready = time.perf_counter()
analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir=os.path.dirname(sys.argv[1]))
frame = analysis.get_temporal_breakdown(visualize=False)
end = time.perf_counter()
busy = float(frame["compute_time(us)"].sum()) / 1e6
"""

REPORT = """
print(json.dumps({"run_s": end - ready, "with_imports_s": end - begin, "compute_s": busy,
                  "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""

KERNELS = [
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array>",
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4, false, false>>",
    "triton_red_fused_native_layer_norm_12",
]
COLLECTIVE = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
OPERATORS = ["aten::mm", "aten::add", "aten::view", "aten::empty_strided", "aten::copy_", "aten::native_layer_norm"]


def kernel_events(number: int, at: float) -> Iterator[dict[str, Any]]:
    """A launch, its kernel and the arrow between them, as kineto writes them."""
    collective = number % 40 == 30
    stream = 20 if collective else 7
    yield {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 900, "tid": 900, "ts": round(at, 3),
        "dur": 4.125, "args": {"External id": number, "cbid": 211, "correlation": number},
    }  # fmt: skip
    yield {"ph": "s", "id": number, "pid": 900, "tid": 900, "ts": round(at, 3), "cat": "ac2g", "name": "ac2g"}
    yield {
        "ph": "X", "cat": "kernel", "name": COLLECTIVE if collective else KERNELS[number % len(KERNELS)], "pid": 0,
        "tid": stream, "ts": round(at + 9, 3), "dur": round(7 + number % 13 + 0.5, 3),
        "args": {
            "External id": number, "queued": 0, "device": 0, "context": 1, "stream": stream, "correlation": number,
            "registers per thread": 90, "shared memory": 49152, "blocks per SM": 0.5925926, "warps per SM": 2.3703704,
            "grid": [64, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 4,
        },
    }  # fmt: skip
    yield {
        "ph": "f",
        "id": number,
        "pid": 0,
        "tid": stream,
        "ts": round(at + 9, 3),
        "cat": "ac2g",
        "name": "ac2g",
        "bp": "e",
    }


def cpu_events(number: int, at: float, rng: random.Random) -> Iterator[dict[str, Any]]:
    """A Python frame and two operators; a kernel for every tenth."""
    yield {
        "ph": "X", "cat": "python_function", "name": f"model/layers.py({number % 700}): forward", "pid": 900,
        "tid": 900, "ts": round(at, 3), "dur": 15.5,
        "args": {"Python parent id": number // 3, "Python id": number, "Ev Idx": number},
    }  # fmt: skip
    for step in range(2):
        yield {
            "ph": "X", "cat": "cpu_op", "name": rng.choice(OPERATORS), "pid": 900, "tid": 900,
            "ts": round(at + 1 + 6 * step, 3), "dur": 5.25,
            "args": {
                "External id": 2 * number + step, "Record function id": 0, "Sequence number": number,
                "Fwd thread id": 0, "Concrete Inputs": ["", ""], "Input type": ["c10::BFloat16", "c10::BFloat16"],
                "Input Strides": [[4096, 1], [1, 4096]], "Input Dims": [[8192, 4096], [4096, 4096]], "Ev Idx": number,
            },
        }  # fmt: skip
    if number % 10 == 0:
        yield from kernel_events(number, at + 8)


def generate(path: Path, mix: str, megabytes: float) -> None:
    """Write a trace of four steps in kineto's layout."""
    rng = random.Random(7)
    base = 5_114_763_470_113.148
    with path.open("w") as file:
        head = {
            "schemaVersion": 1,
            "record_shapes": 1,
            "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
        }
        file.write(json.dumps(head, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        number, at = 0, base
        while file.tell() < megabytes * 1e6:
            number += 1
            events = kernel_events(number, at) if mix == "kernels" else cpu_events(number, at, rng)
            _write(file, events)
            at += 20
        length = (at - base) / 4
        for step in range(4):
            mark = {
                "ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 900, "tid": 900,
                "ts": round(base + step * length, 3), "dur": round(length - 0.01, 3),
                "args": {"External id": 10**8 + step},
            }  # fmt: skip
            _write(file, [mark], last=step == 3)
        file.write('  ],\n  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": 1711964646000000000\n}\n')


def _write(file: TextIO, events: Iterator[dict[str, Any]] | list[dict[str, Any]], last: bool = False) -> None:
    for event in events:
        text = json.dumps({key: value for key, value in event.items() if key != "args"})[1:-1]
        args = event.get("args")
        rest = "" if args is None else ',\n    "args": {\n      ' + json.dumps(args)[1:-1] + "\n    }"
        file.write("  {\n    " + text + rest + "\n  }" + ("\n" if last else ",\n"))


def measure(python: str, code: str, trace: Path, repeats: int) -> dict[str, float]:
    """Run one tool on one trace, best of ``repeats``."""
    runs = []
    for _ in range(repeats):
        done = subprocess.run(
            [python, "-c", code + REPORT, str(trace)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
        if done.returncode:
            raise SystemExit(f"{trace.name}: {done.stderr.strip().splitlines()[-1]}")
        runs.append(json.loads(done.stdout.strip().splitlines()[-1]))
    return {key: min(run[key] for run in runs) for key in runs[0]}


def main() -> int:
    """Generate, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--hta-python", default=sys.executable)
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        traces = []
        for mix in ("kernels", "cpu"):
            traces.append(Path(folder) / f"{mix}_rank0.json")
            generate(traces[-1], mix, args.megabytes)
        for trace in [*traces, *(path.resolve() for path in args.traces)]:
            ours = measure(sys.executable, OURS, trace, args.repeats)
            hta = measure(args.hta_python, HTA, trace, args.repeats)
            result[trace.name] = {
                "megabytes": round(trace.stat().st_size / 1e6, 1),
                "ours": ours,
                "hta": hta,
                "faster": round(hta["run_s"] / ours["run_s"], 2),
                "faster_with_imports": round(hta["with_imports_s"] / ours["with_imports_s"], 2),
                "memory_share": round(ours["peak_mib"] / hta["peak_mib"], 3),
            }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
