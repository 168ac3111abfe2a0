"""One rank of a probe: matrix products by shape, memory, links inside the node and across nodes; rank 0 prints all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
import itertools
import json
import os
import sys
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from trial_runner.probe.figures import DeviceFigures
from trial_runner.probe.figures import MARK
from trial_runner.probe.order import ORDER


@dataclass
class Part:
    """One thing that is measured, a little in every round."""

    run: Callable[[], Any]
    """Does it once, the device's work done when it returns."""

    together: bool
    """Whether other ranks take part, so that all must do it equally often."""

    idle: bool = False
    """Whether this rank has no part in it and only waits for the others."""

    times: list[float] = field(default_factory=list)
    """Seconds of every run."""

    count: int = 0
    """Runs in a round, where ranks take part together."""

    @property
    def best(self) -> float:
        """Seconds of the best run: what can be had, which repeats where other work comes and goes."""
        return min(self.times)

    @property
    def mean(self) -> float:
        """Seconds of a run in the mean: what was had, which betrays a device that is held up."""
        return sum(self.times) / len(self.times)


class Probe:
    """This rank's parts, by the order.

    Args:
        order: :class:`trial_runner.probe.order.ProbeOrder` as data.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self._order = order
        gpu = order["device"] == "gpu"
        self._device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        self._wait: Callable[[], None] = torch.cuda.synchronize if gpu else (lambda: None)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._inside, self._across = self._groups(order["ranks_per_node"])

    def _groups(self, width: int) -> tuple[Any, Any]:
        """The group of this node's ranks and that of the ranks at this place of every node; None: of one rank."""
        nodes = self._size // width
        mesh = init_device_mesh(self._device.type, (nodes, width), mesh_dim_names=("node", "place"))
        return mesh.get_group("place") if width > 1 else None, mesh.get_group("node") if nodes > 1 else None

    def _bytes(self, count: int) -> torch.Tensor:
        return torch.ones(count, dtype=torch.uint8, device=self._device)

    def _timed(self, run: Callable[[], Any]) -> Callable[[], Any]:
        def done() -> None:
            run()
            self._wait()

        return done

    def _product(self, rows: int, depth: int, width: int) -> Part:
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[self._order["precision"]]
        left = torch.randn((rows, depth), device=self._device).to(dtype)
        right = torch.randn((depth, width), device=self._device).to(dtype)
        return Part(self._timed(lambda: left @ right), together=False)

    def _copy(self) -> Part:
        """Copies of a large buffer piece by piece: each piece has left the caches when its turn comes again."""
        size, pieces = self._order["copy_bytes"], self._order["copy_pieces"]
        source = self._bytes(size).view(pieces, -1)
        target = torch.empty_like(source)
        turn = itertools.cycle(range(pieces))

        def copy() -> None:
            i = next(turn)
            target[i].copy_(source[i])

        return Part(self._timed(copy), together=False)

    def _gather(self, message: int, group: Any) -> tuple[int, Part]:
        """An all-gather of ``message`` bytes in all, of which (size - 1)/size come in over each rank's link."""
        size = dist.get_world_size(group)
        mine = self._bytes(max(1, message // size))
        out = self._bytes(mine.numel() * size)
        part = Part(self._timed(lambda: dist.all_gather_single(out, mine, group=group)), together=True)
        return mine.numel() * size, part

    def _exchange(self, message: int, offset: int) -> Part:
        """Send and receive between neighbouring nodes, pair by pair: nodes 2i + offset and 2i + 1 + offset.

        A pair is as fast as its slower node, and every node is in two pairs, so the better of the two is its own.
        """
        width = self._order["ranks_per_node"]
        nodes = self._size // width
        at = (self._rank // width - offset) % nodes
        if nodes % 2 == 1 and at == nodes - 1:
            return Part(lambda: None, together=True, idle=True)
        other = (at ^ 1) + offset
        peer = other % nodes * width + self._rank % width
        out, into = self._bytes(message), self._bytes(message)

        def swap() -> None:
            pair = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

        return Part(self._timed(swap), together=True)

    def measure(self) -> DeviceFigures:
        """Every figure. Rounds go over all parts, so that what disturbs a machine for seconds spoils none of them."""
        order = self._order
        products = [(shape, self._product(*shape)) for shape in order["shapes"]]
        copy = self._copy()
        links = [self._gather(message, self._inside) for message in order["messages"] if self._inside]
        network = [self._gather(message, self._across) for message in order["messages"] if self._across]
        pairs = [self._exchange(order["messages"][-1], offset) for offset in (0, 1)] if self._across else []
        parts = [part for _, part in products] + [copy, *[part for _, part in links + network], *pairs]
        share = order["seconds"] / len(parts) / order["rounds"]
        for part in parts:
            self._prepare(part, share)
        before = cpu_seconds()
        for _ in range(order["rounds"]):
            for part in parts:
                self._round(part, share)
        own, busy, all_cores = (after - sooner for after, sooner in zip(cpu_seconds(), before))
        copied = 2 * order["copy_bytes"] / order["copy_pieces"] / 1e9
        rates = [order["messages"][-1] / part.best / 1e9 for part in pairs if not part.idle]
        return DeviceFigures(
            rank=self._rank % order["ranks_per_node"],
            products=[product_row(shape, part) for shape, part in products],
            memory_gb_s=copied / copy.best,
            memory_mean_gb_s=copied / copy.mean,
            links=[link_row(total, part, self._inside) for total, part in links],
            network=[link_row(total, part, self._across) for total, part in network],
            exchange_gb_s=max(rates, default=None),
            own_cpu_s=own,
            host_busy_s=busy,
            host_cores_s=all_cores,
        )

    def _prepare(self, part: Part, seconds: float) -> None:
        """Run it to warm up; where ranks take part together, agree how often a round runs it."""
        part.run()
        if not part.together:
            return
        began = time.perf_counter()
        for _ in range(3):
            part.run()
        taken = max(1e-6, (time.perf_counter() - began) / 3)
        count = torch.tensor([min(10_000.0, max(2.0, seconds / taken))], device=self._device)
        dist.all_reduce(count, op=dist.ReduceOp.MIN)
        part.count = int(count.item())

    def _round(self, part: Part, seconds: float) -> None:
        dist.barrier()
        began = time.perf_counter()
        runs = 0
        while runs < part.count if part.together else runs < 2 or time.perf_counter() - began < seconds:
            start = time.perf_counter()
            part.run()
            part.times.append(time.perf_counter() - start)
            runs += 1


def cpu_seconds() -> tuple[float, float, float]:
    """CPU seconds that this process used, that the host's cores were busy, and that they have had in all."""
    process, host = os.times(), psutil.cpu_times()
    idle = host.idle + getattr(host, "iowait", 0.0)
    # Guests count twice in what Linux reports: in their own column and as user time.
    total = sum(host) - getattr(host, "guest", 0.0) - getattr(host, "guest_nice", 0.0)
    return process.user + process.system, total - idle, total


def product_row(shape: list[int], part: Part) -> dict[str, Any]:
    """Shape, best and mean TFLOP/s."""
    tflop = 2.0 * shape[0] * shape[1] * shape[2] / 1e12
    return {"shape": shape, "tflops": tflop / part.best, "mean_tflops": tflop / part.mean}


def link_row(total: int, part: Part, group: Any) -> dict[str, Any]:
    """Bytes of the message, best seconds, best and mean GB/s over a rank's link."""
    wire = total * (1 - 1 / dist.get_world_size(group)) / 1e9
    return {"bytes": total, "seconds": part.best, "gb_s": wire / part.best, "mean_gb_s": wire / part.mean}


def main() -> int:
    """Join the others, measure, gather."""
    order = json.loads(os.environ[ORDER])
    if order["device"] == "gpu":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if order["device"] == "gpu" else "gloo")
    mine = Probe(order).measure()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, asdict(mine))
    if dist.get_rank() == 0:
        print(MARK + json.dumps(everyone), flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
