"""One rank of a probe: matrix products by shape, memory bandwidth, links by message size; one JSON line from rank 0."""

from __future__ import annotations

from collections.abc import Callable
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist


MARK = "ledgertune-probe:"
"""Starts the line that carries the figures."""


def repeated(run: Callable[[], Any], synchronise: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Best and mean seconds of one run, over about ``seconds`` after one run to warm up.

    The best is what the device can do and repeats; the mean is what it gave, and betrays one that is held up.
    """
    run()
    synchronise()
    times: list[float] = []
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(times) < 3:
        start = time.perf_counter()
        run()
        synchronise()
        times.append(time.perf_counter() - start)
    return min(times), sum(times) / len(times)


def measure(order: dict[str, Any]) -> dict[str, Any]:
    """All figures of this rank."""
    gpu = order["device"] == "gpu"
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    synchronise: Callable[[], None] = torch.cuda.synchronize if gpu else (lambda: None)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[order["precision"]]
    parts = len(order["shapes"]) + 1 + (len(order["messages"]) + 1 if size > 1 else 0)
    share = order["seconds"] / parts
    products = []
    for rows, depth, width in order["shapes"]:
        left = torch.randn((rows, depth), device=device).to(dtype)
        right = torch.randn((depth, width), device=device).to(dtype)
        best, mean = repeated(lambda a=left, b=right: a @ b, synchronise, share)  # type: ignore[misc]
        flop = 2.0 * rows * depth * width
        products.append(
            {"shape": [rows, depth, width], "tflops": flop / best / 1e12, "mean_tflops": flop / mean / 1e12}
        )
    source = torch.ones(order["copy_bytes"], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best, mean = repeated(lambda: target.copy_(source), synchronise, share)
    figures: dict[str, Any] = {
        "rank": rank,
        "products": products,
        "memory_gb_s": 2 * order["copy_bytes"] / best / 1e9,
        "links": [],
    }
    if size == 1:
        return figures
    for message in order["messages"]:
        # All-gather of `message` bytes in all: (size - 1)/size of them come in over each rank's link.
        mine = torch.ones(max(1, message // size), dtype=torch.uint8, device=device)
        out = torch.empty(mine.numel() * size, dtype=torch.uint8, device=device)
        dist.barrier()
        times = []
        for _ in range(order["repeats"]):
            start = time.perf_counter()
            dist.all_gather_into_tensor(out, mine)
            synchronise()
            times.append(time.perf_counter() - start)
        best = min(times)
        wire = mine.numel() * (size - 1)
        figures["links"].append({"bytes": mine.numel() * size, "seconds": best, "gb_s": wire / best / 1e9})
    return figures


def main() -> int:
    """Join the others, measure, gather."""
    order = json.loads(sys.argv[1])
    if order["device"] == "gpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if order["device"] == "gpu" else "gloo")
    mine = measure(order)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        print(MARK + json.dumps(everyone), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
