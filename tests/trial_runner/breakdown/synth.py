"""Builds profiler traces with known answers. Times are microseconds; the wall clock of zero is ``origin_us``."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
import gzip
import json
from pathlib import Path
from typing import Any


MAIN, BACKWARD, LOADER = 1, 2, 3
"""Threads of a synthetic process."""

COMPUTE_STREAM, COMM_STREAM, COPY_STREAM = 7, 20, 30
"""Streams of a synthetic device."""

GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_execute_kernel__5x_cublas"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
NEXT_BATCH = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


@dataclass
class Trace:
    """One rank's trace under construction."""

    rank: int | None = 0
    world_size: int | None = None
    origin_us: float = 0.0
    base_ns: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)
    correlations: int = 0

    def add(
        self, cat: str, name: str, start: float, length: float, tid: Any, args: dict[str, Any] | None = None
    ) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": tid, "ts": self.origin_us + start, "dur": length}
            | ({"args": args} if args is not None else {})
        )

    def step(self, number: int, start: float, length: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", start, length, MAIN)

    def op(self, name: str, start: float, length: float, tid: int = MAIN, **args: Any) -> None:
        self.add("cpu_op", name, start, length, tid, args)

    def kernel(
        self,
        name: str,
        start: float,
        length: float,
        *,
        stream: int = COMPUTE_STREAM,
        called: float | None = None,
        tid: int = MAIN,
        call: str = "cudaLaunchKernel",
        **args: Any,
    ) -> None:
        """A kernel and, when ``called`` is given, the launch that put it there."""
        self.correlations += 1
        number = self.correlations
        if called is not None:
            self.add("cuda_runtime", call, called, 2, tid, {"correlation": number})
        args = {"stream": stream, "device": 0, "correlation": number, **args}
        self.add("kernel", name, start, length, f"stream {stream}", args)

    def document(self) -> dict[str, Any]:
        head: dict[str, Any] = {"schemaVersion": 1, **self.header}
        if self.rank is not None or self.world_size is not None:
            info: dict[str, Any] = {"backend": "nccl"}
            if self.rank is not None:
                info["rank"] = self.rank
            if self.world_size is not None:
                info["world_size"] = self.world_size
            head["distributedInfo"] = info
        if self.base_ns is not None:
            head["baseTimeNanoseconds"] = self.base_ns
        return {**head, "traceEvents": self.events}

    def write(self, path: Path, *, bare: bool = False, indent: int | None = None) -> Path:
        value: Any = self.events if bare else self.document()
        data = json.dumps(value, indent=indent).encode()
        path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
        return path
