"""Probes the nodes of a joined Ray cluster: one placed gang over all of them, so links between nodes are measured."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
import time

from search_space.errors import UserError
from trial_runner.failure import log_tail
from trial_runner.probe import node_figures
from trial_runner.probe import NodeFigures
from trial_runner.probe import ProbeOrder
from trial_runner.probe import PROGRAM
from trial_runner.probe import read_figures
from trial_runner.spec import rank_log
from trial_runner.spec import TrialSpec
from tuner.cluster.placed_gang import GangShape
from tuner.cluster.placed_gang import PlacedGang
from tuner.cluster.session import ClusterSession


START_S = 60.0
"""Wall time for the ranks to start, beside the measuring, seconds."""


@dataclass(frozen=True, kw_only=True)
class ClusterProbe:
    """What a probe of a cluster found and took."""

    nodes: list[NodeFigures]
    """Figures by node; empty when it failed."""

    device_s: float
    """Devices held × wall time."""

    node_ids: list[str] = field(default_factory=list)
    """Ray's ids of those nodes, in their order; empty outside a cluster."""

    failed: str = ""
    """Why there are no figures."""


def able_nodes(session: ClusterSession, devices: int) -> int:
    """Live nodes with so many devices (count)."""
    return sum(node.devices >= devices for node in session.nodes())


def probe_cluster(
    session: ClusterSession,
    order: ProbeOrder,
    nodes: int,
    folder: Path,
    wait_s: float,
    interrupted: Callable[[], bool] = lambda: False,
) -> ClusterProbe:
    """Measure so many nodes of the cluster at once, each with all its devices.

    Args:
        session: the joined cluster.
        order: what to measure.
        nodes: how many nodes (count).
        folder: where its ranks' logs go; every node sees it under this path.
        wait_s: longest wait for the nodes to be free, seconds; nothing is charged meanwhile.
        interrupted: asked all the while; a probe that was interrupted has no figures.
    """
    import ray

    folder.mkdir(parents=True, exist_ok=True)
    width = order.ranks_per_node
    shape = GangShape(nodes=nodes, ranks_per_node=width, held_per_node=width)
    spec = TrialSpec(
        study=folder.parent.name,
        trial=0,
        folder=str(folder),
        config_file="",
        config_function="",
        world_size=shape.world_size,
        device=order.device,
        warmup_steps=0,
        steps=0,
        program=PROGRAM,
        env=order.environment(),
    )
    addresses = {node.node_id: node.address for node in session.nodes()}
    gang = PlacedGang(session, shape, spec, f"{folder.parent.name} probe")
    found: list[NodeFigures] = []
    failed = ""
    with _released(gang):
        try:
            if not gang.wait_placed(wait_s, interrupted):
                if interrupted():
                    raise UserError("interrupted while waiting for devices")
                raise UserError(f"{nodes} nodes with {width} devices were not free within {wait_s:g} s")
            devices = read_figures(_run(gang, folder, START_S + order.seconds, interrupted).splitlines())
            names = [addresses.get(node_id, f"node {i}") for i, node_id in enumerate(gang.node_ids)]
            if len(set(names)) != nodes:
                # Nodes of one address (several on one machine) are told apart by their place.
                names = [f"{name} ({i})" for i, name in enumerate(names or ["node"] * nodes)]
            found = node_figures(devices, names, gang.wall_s)
        except UserError as error:
            failed = str(error)
        except ray.exceptions.RayError as error:
            # A node that went away while its ranks were being started.
            failed = f"{type(error).__name__}: {error}"
    return ClusterProbe(nodes=found, device_s=gang.device_s, node_ids=gang.node_ids, failed=failed)


@contextlib.contextmanager
def _released(gang: PlacedGang) -> Iterator[None]:
    try:
        yield
    finally:
        gang.release()


def _run(gang: PlacedGang, folder: Path, patience_s: float, interrupted: Callable[[], bool]) -> str:
    """What rank 0 printed.

    Raises:
        UserError: a rank failed, they did not end in time, or they were interrupted.
    """
    gang.start(patience_s)
    while (end := gang.poll()) is None:
        if interrupted():
            raise UserError("interrupted")
        time.sleep(0.2)
    if end.ended != "done":
        first = min((rank for rank, code in end.exit_codes.items() if code), default=0)
        said = end.text or log_tail(folder, first).strip()[-400:]
        raise UserError(f"rank {first} ({end.ended}): {said or 'no word'}")
    return rank_log(folder, 0).read_text(errors="replace")
