"""Runs the control on one rank: see :mod:`trial_runner.control`."""

from __future__ import annotations

from datetime import timedelta
import os
from pathlib import Path
from statistics import median
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trial_runner.control import ControlWork
from trial_runner.control import HEAD
from trial_runner.control import WINDOW_S


WAIT = timedelta(seconds=30)
"""How long a rank waits for the others of its node: they load their libraries at the same time."""

WARM = 4
"""Rounds that do not count."""


def run_control(work: ControlWork, device: str, folder: Path) -> dict[str, Any]:
    """Do the control's rounds together with the node's other ranks.

    It uses a group of its own over loopback, so nothing of the default process group exists when the program begins.

    Args:
        work: the rounds.
        device: ``cpu`` or ``gpu``.
        folder: the trial's folder, where the node's ranks find each other.

    Returns:
        ``control``: the work's name; ``control_s``: time of a round, seconds, the median of ``windows_s``. Or
        ``control_failed``, in words: a trial does not fail by its control.
    """
    local, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    try:
        group = _group(folder / f"control-node{os.environ['GROUP_RANK']}", local, size) if size > 1 else None
        times = _windows(work, _device(device, local), group)
    except Exception as error:
        return {"control_failed": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        if device == "gpu":
            # The program must find the device as if nothing had been there.
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return {"control": work.name, "control_s": median(times), "windows_s": times}


def _device(device: str, local: int) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _group(path: Path, rank: int, size: int) -> Any:
    store = dist.FileStore(str(path), size)
    store.set_timeout(WAIT)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = WAIT
    return dist.ProcessGroupGloo(store, rank, size, options)


def _windows(work: ControlWork, device: torch.device, group: Any) -> list[float]:
    """Mean time of a round in each window, seconds; all ranks do as many rounds."""
    step = Step(work, device)
    for _ in range(WARM):
        usual = torch.tensor([_timed(step, group, 1)])
    _together(usual, group)
    rounds = max(1, round(WINDOW_S / float(usual)))
    return [_timed(step, group, rounds) for _ in range(work.windows)]


def _timed(step: Step, group: Any, rounds: int) -> float:
    began = time.perf_counter()
    for _ in range(rounds):
        step.run()
        _together(torch.zeros(1), group)
    return (time.perf_counter() - began) / rounds


def _together(value: torch.Tensor, group: Any) -> None:
    """Wait for the node's other ranks; ``value`` becomes the largest of theirs."""
    if group is not None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        group.allreduce([value], options).wait()


class Step:
    """The training step of one rank.

    Args:
        work: sizes.
        device: where.
    """

    def __init__(self, work: ControlWork, device: torch.device) -> None:
        self._work, self._device = work, device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        dice = torch.Generator().manual_seed(0)
        hidden, ffn = work.hidden, work.ffn
        shapes = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 2 * ffn), (ffn, hidden)]
        self._blocks = [
            [
                (torch.randn(shape, generator=dice) * shape[0] ** -0.5).to(device, dtype).requires_grad_()
                for shape in shapes
            ]
            for _ in range(work.blocks)
        ]
        self._moments = [
            (weight, torch.zeros_like(weight, requires_grad=False), torch.zeros_like(weight, requires_grad=False))
            for block in self._blocks
            for weight in block
        ]
        self._input = torch.randn((work.tokens, hidden), generator=dice).to(device, dtype)

    def run(self) -> None:
        """Forward, backward and update, until the device has finished."""
        stream = self._input
        for block in self._blocks:
            stream = self._forward(stream, block)
        stream.float().square().mean().backward()
        with torch.no_grad():
            for weight, first, second in self._moments:
                # Adam (Kingma & Ba, 2015, algorithm 1) without bias correction, with next to no learning.
                assert weight.grad is not None
                first.lerp_(weight.grad, 0.1)
                second.mul_(0.95).addcmul_(weight.grad, weight.grad, value=0.05)
                weight.addcdiv_(first, second.sqrt().add_(1e-8), value=-1e-9)
                weight.grad = None
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _forward(self, stream: torch.Tensor, block: list[torch.Tensor]) -> torch.Tensor:
        work, heads = self._work, self._work.hidden // HEAD
        qkv, out, up, down = block
        normed = F.rms_norm(stream, (work.hidden,))
        query, key, value = (
            part.view(1, work.tokens, heads, HEAD).transpose(1, 2) for part in (normed @ qkv).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        stream = stream + mixed.transpose(1, 2).reshape(work.tokens, work.hidden) @ out
        gate, value = (F.rms_norm(stream, (work.hidden,)) @ up).chunk(2, dim=-1)
        return stream + (F.silu(gate) * value) @ down
