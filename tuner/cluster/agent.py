"""The agent: a Ray actor on each node of a gang that holds the node's ranks."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from trial_runner.clocks import ClockSampler
from trial_runner.devices import dirty_devices
from trial_runner.gang import free_port
from trial_runner.gang import NodeShare
from trial_runner.spec import node_clocks
from trial_runner.spec import TrialSpec


class Agent:
    """Starts, watches and stops one node-share. Its death closes the warden's pipe, which kills the ranks."""

    def __init__(self) -> None:
        self._share: NodeShare | None = None
        self._clocks: ClockSampler | None = None
        self._refused: str | None = None

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
            dirty = dirty_devices(devices)
            if dirty:
                self._refused = dirty_device_text(ray.util.get_node_ip_address(), dirty)
                return
        self._clocks = ClockSampler(node_clocks(Path(spec["folder"]), node))
        self._clocks.__enter__()
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
        if self._refused is not None:
            return {"ended": "dirty_device", "text": self._refused}
        assert self._share is not None
        state = self._share.poll()
        if state.ended is not None:
            self._stop_clocks()
        return asdict(state)

    def stop(self) -> dict[str, Any]:
        """Stop the ranks and wait until they are gone."""
        if self._refused is not None:
            return {"ended": "dirty_device"}
        assert self._share is not None
        self._stop_clocks()
        return asdict(self._share.stop())

    def _stop_clocks(self) -> None:
        clocks, self._clocks = self._clocks, None
        if clocks is not None:
            clocks.__exit__()


def dirty_device_text(address: str, dirty: dict[str, float]) -> str:
    """What is said of devices that somebody else's memory sits on."""
    held = ", ".join(f"device {device}: {used / 2**30:.1f} GiB" for device, used in dirty.items())
    return f"node {address}: memory is in use before the trial starts ({held}); free it of other processes"
