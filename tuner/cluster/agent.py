"""The agent: a Ray actor on each node of a gang that holds the node's ranks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trial_runner.gang import free_port
from trial_runner.gang import NodeShare
from trial_runner.spec import TrialSpec


class Agent:
    """Starts, watches and stops one node-share. Its death closes the warden's pipe, which kills the ranks."""

    def __init__(self) -> None:
        self._share: NodeShare | None = None

    def rendezvous(self) -> tuple[str, int]:
        """Address of this node and a free port on it."""
        import ray

        address = ray.util.get_node_ip_address()
        return address, free_port(address)

    def start(
        self, spec: dict[str, Any], ranks: list[int], node: int, master: tuple[str, int], deadline_s: float
    ) -> None:
        """Start the ranks of this node; see :class:`trial_runner.gang.NodeShare`."""
        import ray

        devices = None
        if spec["device"] == "gpu":
            devices = [str(i) for i in ray.get_gpu_ids()]
        self._share = NodeShare(
            TrialSpec(**spec),
            ranks=ranks,
            node=node,
            master=(master[0], master[1]),
            deadline_s=deadline_s,
            devices=devices,
        )

    def poll(self) -> dict[str, Any]:
        """The node-share's state, see :class:`trial_runner.gang.GangState`."""
        assert self._share is not None
        return asdict(self._share.poll())

    def stop(self) -> dict[str, Any]:
        """Stop the ranks and wait until they are gone."""
        assert self._share is not None
        return asdict(self._share.stop())
