"""How gangs lie on the cluster's nodes, and how many fit at once, now."""

from __future__ import annotations

import time

from search_space.errors import UserError
from tuner.cluster.placed_gang import GangShape
from tuner.cluster.session import ClusterSession
from tuner.study.plan import StudyPlan


COUNT_S = 5.0
"""Between looks at which nodes are alive, seconds."""


class Capacity:
    """The room for a study's gangs on a cluster.

    Args:
        plan: the study's plan.
        session: the joined cluster.
        share_nodes: let gangs share a node (it disturbs timing).

    Raises:
        UserError: the cluster has too few nodes with enough devices.
    """

    def __init__(self, plan: StudyPlan, session: ClusterSession, share_nodes: bool) -> None:
        self._session, self._share = session, share_nodes
        self.shape = _shape(plan, session, share_nodes)
        self._fitting, self._counted = 1, float("-inf")
        asked = plan.job.search.parallel_trials
        fit = self._count()
        self.most = min(fit, asked) if asked else fit
        """Gangs at once while every node lives."""

    @property
    def now(self) -> int:
        """Gangs at once on the nodes that live, at least one: nodes die, are put out of use, come back."""
        if time.monotonic() - self._counted > COUNT_S and self._session.steady():
            self._counted, self._fitting = time.monotonic(), self._count()
        return max(1, min(self.most, self._fitting))

    def forget(self) -> None:
        """Look at the nodes again next time."""
        self._counted = float("-inf")

    def _count(self) -> int:
        held = self.shape.held_per_node
        devices = [node.devices for node in self._session.nodes() if node.devices >= held]
        return (sum(have // held for have in devices) if self._share else len(devices)) // self.shape.nodes


def _shape(plan: StudyPlan, session: ClusterSession, share_nodes: bool) -> GangShape:
    per_node, nodes = plan.setting.devices_per_node, plan.setting.nodes
    able = [node for node in session.nodes() if node.devices >= per_node]
    if len(able) < nodes:
        have = ", ".join(f"{node.address}: {node.devices}" for node in session.nodes()) or "none"
        raise UserError(
            f"the job needs {nodes} node(s) with {per_node} devices each, Ray has {len(able)} ({have}); "
            "set cluster.nodes and cluster.gpus_per_node to what there is"
        )
    held = per_node if share_nodes else min(node.devices for node in able)
    return GangShape(nodes=nodes, ranks_per_node=per_node, held_per_node=held)
