"""A placed gang: devices held on its nodes, an agent on each."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
import time
from typing import Any

from trial_runner.gang import KILL_GRACE_S
from trial_runner.spec import TrialSpec
from tuner.cluster.session import ClusterSession


AGENT_TIMEOUT_S = 60.0
"""Longest wait for an agent's answer, seconds; after it the node counts as lost."""


STUCK_S = 75.0
"""Wait after which free devices that are not given count as Ray's fault: it gives a silent node up after 65 s."""


@dataclass(frozen=True, kw_only=True)
class GangShape:
    """How a gang lies on nodes."""

    nodes: int
    """Nodes (node-shares)."""

    ranks_per_node: int
    """Ranks, and devices used, on each."""

    held_per_node: int
    """Devices held on each: all of the node's unless nodes are shared."""

    @property
    def world_size(self) -> int:
        """Ranks of the gang."""
        return self.nodes * self.ranks_per_node

    @property
    def devices(self) -> int:
        """Devices held, and charged."""
        return self.nodes * self.held_per_node


@dataclass
class GangEnd:
    """How a gang ended."""

    ended: str
    """``done``, ``failed``, ``timeout``, ``stopped``, ``killed``, ``node_lost`` or ``dirty_device``."""

    exit_codes: dict[int, int | None] = field(default_factory=dict)
    """Exit code by rank."""

    exit_unix_s: dict[int, float] = field(default_factory=dict)
    """When each rank ended."""

    host_oom_kills: int = 0
    """Processes that the kernels of its nodes killed for memory meanwhile."""

    text: str = ""
    """What an agent said, where there was nothing to watch."""

    node_id: str | None = None
    """Ray's id of the node whose share ended first or refused."""


class PlacedGang:
    """One trial's gang on the cluster, from the asking for devices to their release.

    Its devices are asked for as a placement group, one bundle per node-share. Ray serves these requests one after the
    other, and one whose node fell silent in the middle holds up all others for as long as that node neither answers nor
    closes its connections. So a gang that waits although enough nodes are free is placed without a group, node by node;
    and so are the session's later ones.

    Args:
        session: the joined cluster.
        shape: nodes and ranks.
        spec: the trial's order.
        name: shown in the Ray dashboard.
    """

    def __init__(self, session: ClusterSession, shape: GangShape, spec: TrialSpec, name: str) -> None:
        import ray

        self._ray, self._session, self._shape, self._spec, self._name = ray, session, shape, spec, name
        self.placed_at: float | None = None
        self.released_at: float | None = None
        self.node_ids: list[str] = []
        """Ray's ids of its nodes, once it is placed."""
        self._agents: list[Any] = []
        self._known: dict[int, dict[str, Any]] = {}
        self._last_poll: dict[int, tuple[Any, float]] = {}
        bundle = {session.resource: float(shape.held_per_node)}
        self._resource = session.resource
        self._group: Any = None
        if not session.direct:
            self._group = ray.util.placement_group(
                [dict(bundle) for _ in range(shape.nodes)],
                strategy="STRICT_SPREAD" if shape.nodes > 1 else "STRICT_PACK",
                name=name,
            )

    def wait_placed(self, timeout_s: float, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Wait until every node-share has its devices; the meter runs from then on.

        Returns:
            Whether the gang was placed; when not, the request is withdrawn.
        """
        began = time.monotonic()
        while time.monotonic() - began < timeout_s and not interrupted():
            if self._group is None:
                time.sleep(0.2)
            elif self._group.wait(timeout_seconds=0.2):
                self.node_ids = self._find_nodes()
                self.placed_at = time.monotonic()
                return True
            if (self._group is None or time.monotonic() - began > STUCK_S) and self._take_nodes():
                self.placed_at = time.monotonic()
                return True
        self._give_back()
        return False

    def _take_nodes(self) -> bool:
        """Take as many free nodes as the gang needs, without a placement group; whether there are so many."""
        session, shape = self._session, self._shape
        free = session.free_nodes(shape.held_per_node)
        if len(free) < shape.nodes:
            return False
        self._give_back()
        self._group, session.direct = None, True
        self.node_ids = free[: shape.nodes]
        session.taken.update({node: shape.held_per_node for node in self.node_ids})
        return True

    def _find_nodes(self) -> list[str]:
        """Ray's ids of the nodes that the bundles lie on, in their order."""
        with contextlib.suppress(Exception):
            table = self._ray.util.placement_group_table(self._group)
            lies = {int(bundle): str(node) for bundle, node in table["bundles_to_node_id"].items()}
            return [lies[bundle] for bundle in sorted(lies)]
        return []

    @property
    def wall_s(self) -> float:
        """Wall time from placement to release (to now while it runs), seconds."""
        if self.placed_at is None:
            return 0.0
        return (self.released_at or time.monotonic()) - self.placed_at

    @property
    def device_s(self) -> float:
        """Devices held × wall time from placement to release."""
        return self._shape.devices * self.wall_s

    def start(self, deadline_s: float) -> None:
        """Start an agent in each bundle and the ranks in each agent.

        Args:
            deadline_s: seconds from placement after which the ranks are killed.
        """
        ray = self._ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from tuner.cluster.agent import Agent

        held = self._shape.held_per_node
        for node in range(self._shape.nodes):
            options: dict[str, Any] = {
                "num_cpus": held if self._resource == "CPU" else 0,
                "num_gpus": held if self._resource == "GPU" else 0,
                "name": f"{self._name} node {node}",
                "max_concurrency": 4,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=node
                )
                if self._group is not None
                else NodeAffinitySchedulingStrategy(self.node_ids[node], soft=False),
            }
            if self._resource not in ("CPU", "GPU"):
                options["resources"] = {self._resource: held}
            self._agents.append(ray.remote(Agent).options(**options).remote())
        patience = min(AGENT_TIMEOUT_S, max(1.0, deadline_s - self.wall_s))
        master = ray.get(self._agents[0].rendezvous.remote(), timeout=patience)
        assert self.placed_at is not None
        left = max(1.0, deadline_s - (time.monotonic() - self.placed_at))
        spec, width = asdict(self._spec), self._shape.ranks_per_node
        ray.get(
            [
                agent.start.remote(spec, list(range(node * width, (node + 1) * width)), node, master, left)
                for node, agent in enumerate(self._agents)
            ],
            timeout=min(AGENT_TIMEOUT_S, left),
        )

    def poll(self) -> GangEnd | None:
        """The gang's end, or None while it runs. One failed node-share ends the gang."""
        states = [self._ask(node, agent) for node, agent in enumerate(self._agents)]
        ends = [state["ended"] for state in states]
        if all(end == "done" for end in ends):
            return self._end("done", states)
        at = next((i for i, end in enumerate(ends) if end not in (None, "done")), None)
        if at is None:
            return None
        end = self._end(ends[at], states)
        end.node_id = self.node_ids[at] if at < len(self.node_ids) else None
        return end

    def _ask(self, node: int, agent: Any) -> dict[str, Any]:
        """One agent's state; an agent that died or is silent counts as a lost node."""
        ray = self._ray
        reference, since = self._last_poll.get(node, (None, 0.0))
        if reference is None:
            reference, since = agent.poll.remote(), time.monotonic()
        ready, _ = ray.wait([reference], timeout=0.05)
        if not ready:
            self._last_poll[node] = (reference, since)
            silent = time.monotonic() - since > AGENT_TIMEOUT_S
            return {"ended": "node_lost"} if silent else self._known.get(node, {"ended": None})
        self._last_poll.pop(node, None)
        try:
            self._known[node] = ray.get(reference)
        except ray.exceptions.RayError as error:
            self._known[node] = {"ended": "killed", "text": f"{type(error).__name__}: {error}"}
        return self._known[node]

    def _end(self, why: str, states: list[dict[str, Any]]) -> GangEnd:
        end = GangEnd(why)
        for state in states:
            end.exit_codes |= state.get("exit_codes", {})
            end.exit_unix_s |= state.get("exit_unix_s", {})
            end.host_oom_kills += state.get("host_oom_kills", 0)
            end.text = end.text or state.get("text", "")
        return end

    def release(self) -> None:
        """Stop what still runs, kill the agents and give the devices back; safe to call twice."""
        if self.released_at is not None:
            return
        ray = self._ray
        with contextlib.suppress(Exception):
            running = [agent.stop.remote() for node, agent in enumerate(self._agents) if self._runs(node)]
            if running:
                ray.get(running, timeout=KILL_GRACE_S)
        # Agents are asked to stop directly; what asks the head would hang once that has gone.
        if self._session.steady():
            for agent in self._agents:
                with contextlib.suppress(Exception):
                    ray.kill(agent)
            self._give_back()
        self.released_at = time.monotonic()

    def _runs(self, node: int) -> bool:
        return self._known.get(node, {"ended": None})["ended"] is None

    def _give_back(self) -> None:
        """Withdraw the placement group, or give back the nodes that were taken without one."""
        if self._group is None:
            self._session.taken.subtract({node: self._shape.held_per_node for node in self.node_ids})
            return
        with contextlib.suppress(Exception):
            self._ray.util.remove_placement_group(self._group)
