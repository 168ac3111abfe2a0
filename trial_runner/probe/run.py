"""Probes one node from outside Ray: starts a rank on every device of this machine and reads what they found."""

from __future__ import annotations

from collections.abc import Callable
import os
import subprocess
import sys
import tempfile
import time

from search_space.errors import UserError
from trial_runner.gang import free_port
from trial_runner.probe.figures import NodeFigures
from trial_runner.probe.figures import read_figures
from trial_runner.probe.order import ProbeOrder
from trial_runner.probe.suspects import node_figures


PROGRAM = "trial_runner.probe.rank"
"""Module that a rank of a probe runs."""


def probe_node(
    order: ProbeOrder,
    node: str = "this machine",
    started: Callable[[list[int]], None] | None = None,
    timeout_s: float = 180,
) -> NodeFigures:
    """Measure every device of this machine at once.

    Args:
        order: what to measure; its ``ranks_per_node`` devices.
        node: name for the figures.
        started: called with the ranks' process ids once all run.
        timeout_s: longest wall time beside the measuring, seconds.

    Raises:
        UserError: a rank failed or did not answer in time.
    """
    began = time.perf_counter()
    ranks, patience = order.ranks_per_node, timeout_s + order.seconds
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    if order.device == "cpu":
        common |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", "-m", PROGRAM]
    children = []
    try:
        for rank in range(ranks):
            env = os.environ | common | order.environment() | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            children.append(subprocess.Popen(command, env=env, cwd=tempfile.gettempdir(), **pipes))  # type: ignore[call-overload]
        if started is not None:
            started([child.pid for child in children])
        answers = []
        for rank, child in enumerate(children):
            left = max(1.0, patience - (time.perf_counter() - began))
            try:
                out, err = child.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                raise UserError(f"probe: rank {rank} did not answer in {patience:.0f} s") from None
            if child.returncode:
                raise UserError(f"probe: rank {rank} failed: {err.strip()[-600:]}")
            answers.append(out)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    found = read_figures(answers[0].splitlines())
    return node_figures(found, [node], time.perf_counter() - began)[0]
