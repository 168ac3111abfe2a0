"""The Ray session of a study: a local Ray when none is named, otherwise the named cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
from dataclasses import dataclass
import os
from pathlib import Path
import socket
import tempfile
import time
from typing import Any

from search_space.errors import UserError
from trial_runner.gang import free_port
from tuner.cluster.head import HeadWatch
from tuner.cluster.slurm import allocation
from tuner.cluster.slurm import prepare_token
from tuner.cluster.slurm import ray_over
from tuner.cluster.slurm import wait_for_nodes


SLOT = "tune_slot"
"""Custom Ray resource that stands for one CPU slot on a machine without a GPU."""


ANSWER_S = 10.0
"""Longest wait for a cluster's port to take a connection, seconds."""


@dataclass(frozen=True, kw_only=True)
class RayNode:
    """One live node."""

    node_id: str
    """Ray's id."""

    address: str
    """IP address."""

    devices: int
    """Devices it has in all."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a job waits for in a running cluster."""

    nodes: int
    """Nodes (count)."""

    devices: int
    """Devices on each (count)."""

    wait_s: float
    """Longest wait, seconds."""


class ClusterSession:
    """A joined Ray cluster, seen as nodes with devices."""

    def __init__(self, resource: str, dashboard_url: str | None, local: bool, head: HeadWatch | None = None) -> None:
        self.resource = resource
        self.dashboard_url = dashboard_url
        self.local = local
        self._head = head
        self.direct = False
        """Whether gangs are placed without placement groups, see :class:`tuner.cluster.placed_gang.PlacedGang`."""
        self.taken: Counter[str] = Counter()
        """Devices of each node that gangs so placed hold; Ray's own count follows a moment later."""
        self._quarantined: dict[str, Any] = {}

    def steady(self) -> bool:
        """Wait while the cluster's head is away; whether it is there in the end."""
        return self._head is None or self._head.steady()

    def on_lost(self, tell: Callable[[], None]) -> None:
        """Have something called, in another thread, once the head has gone."""
        if self._head is not None:
            self._head.on_lost(tell)

    def check(self) -> None:
        """Raise if the cluster's head has gone.

        Raises:
            UserError: it has.
        """
        if self._head is not None and self._head.lost:
            raise UserError(self._head.text)

    def quarantine(self, node_id: str) -> RayNode | None:
        """Take a node's devices out of use for the rest of the session; None when it is gone or out already.

        An actor of ours holds them, so that no placement group can lie there.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = next((node for node in self.nodes() if node.node_id == node_id), None)
        if node is None:
            return None

        class Quarantine:
            """Holds devices and does nothing."""

        options: dict[str, Any] = {
            "num_cpus": node.devices if self.resource == "CPU" else 0,
            "num_gpus": node.devices if self.resource == "GPU" else 0,
            "name": f"quarantine of node {node.address} ({node_id[:8]})",
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        }
        if self.resource not in ("CPU", "GPU"):
            options["resources"] = {self.resource: node.devices}
        self._quarantined[node_id] = ray.remote(Quarantine).options(**options).remote()
        return node

    def nodes(self) -> list[RayNode]:
        """Live nodes that have devices and are not quarantined."""
        import ray

        found = []
        for node in ray.nodes():
            devices = int(node["Resources"].get(self.resource, 0))
            if node["Alive"] and devices and node["NodeID"] not in self._quarantined:
                found.append(RayNode(node_id=node["NodeID"], address=node["NodeManagerAddress"], devices=devices))
        return found

    def free_nodes(self, devices: int) -> list[str]:
        """Ray's ids of the live nodes with so many free devices, as far as Ray knows now."""
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [
            node.node_id
            for node in self.nodes()
            if min(free.get(node.node_id, {}).get(self.resource, 0), node.devices - self.taken[node.node_id]) >= devices
        ]

    def await_nodes(self, needs: Needs) -> None:
        """Wait until enough nodes have joined; nothing is charged meanwhile.

        Raises:
            UserError: they did not come in time.
        """
        until = time.monotonic() + needs.wait_s
        while True:
            nodes = self.nodes()
            able = [node for node in nodes if node.devices >= needs.devices]
            if len(able) >= needs.nodes:
                return
            if time.monotonic() >= until:
                have = ", ".join(f"{node.address}: {node.devices}" for node in nodes) or "none"
                raise UserError(
                    f"the job needs {needs.nodes} node(s) with {needs.devices} devices ({self.resource}) each; after "
                    f"{needs.wait_s:g} s Ray has {len(able)} (found: {have}). Nothing was spent. See why the nodes do "
                    "not join (`ray status`; on Kubernetes `tune k8s status`), wait longer by cluster.wait_s, or set "
                    "cluster.nodes and cluster.gpus_per_node to what there is"
                )
            time.sleep(min(0.5, max(0.0, until - time.monotonic())))


@contextlib.contextmanager
def join(
    device: str,
    slots: int,
    address: str | None = None,
    folder: Path | None = None,
    needs: Needs | None = None,
) -> Iterator[ClusterSession]:
    """Start a local Ray, or join the one at ``address``; leave it at the end.

    Inside a Slurm allocation of several nodes, and without an address, Ray is started over them.

    Args:
        device: ``cpu`` or ``gpu``.
        slots: CPU slots that a local Ray offers.
        address: address of a running cluster, ``auto`` for the one on this machine.
        folder: working folder of the driver while it is joined. Ray puts the driver's working folder on its
            workers' import path, and a user's repository may hold packages of the same names as ours.
        needs: nodes to wait for in a running cluster; None: whatever is there.

    Raises:
        UserError: the cluster does not answer, has no devices, its nodes did not come, or its head has gone.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    found = allocation() if address is None else None
    several = found if found is not None and len(found.nodes) > 1 else None
    if several is not None:
        check_token(os.environ)
        prepare_token()
    import ray

    before = Path.cwd()
    os.chdir(folder or tempfile.gettempdir())
    with contextlib.ExitStack() as stack:
        stack.callback(os.chdir, before)
        if several is not None:
            log_folder = (folder or Path(tempfile.gettempdir())) / "ray"
            resources = {} if device == "gpu" else {SLOT: slots}
            address = stack.enter_context(ray_over(several, resources, log_folder))
        context = _connect(ray, device, slots, address)
        head = stack.enter_context(HeadWatch(ray.get_runtime_context().gcs_address))
        try:
            if several is not None:
                wait_for_nodes(len(several.nodes), log_folder / "ray-workers.log")
            resource = _resource(ray, device)
            url = getattr(context, "dashboard_url", None)
            session = ClusterSession(resource, f"http://{url}" if url else None, address is None, head)
            if address is not None and needs is not None:
                session.await_nodes(needs)
                session.resource = _resource(ray, device)
            if not session.nodes():
                raise UserError(
                    f"the Ray cluster at {address or 'this machine'} has no {resource!r} devices; "
                    f"start its nodes with GPUs, or with --resources='{{\"{SLOT}\": 2}}' for CPU slots"
                )
            yield session
        except UserError:
            raise
        except Exception as error:
            # What a call to a head that is going says is Ray's own; that it has gone is what helps.
            if head.answers():
                raise
            raise UserError(head.text) from error
        finally:
            ray.shutdown()


def _connect(ray: Any, device: str, slots: int, address: str | None) -> Any:
    common = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "ledgertune"}
    if address is not None:
        check_answers(address)
        try:
            return ray.init(address=address, **common)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(f"Ray at {address!r} does not answer: {error}") from None
    resources = {} if device == "gpu" else {SLOT: slots}
    check_token(os.environ)
    # "local": a Ray that somebody else runs on this machine is not joined by accident.
    return ray.init(
        address="local",
        num_cpus=max(2, slots),
        resources=resources,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=free_port(prefer=8265),
        object_store_memory=100 * 1024 * 1024,
        _node_ip_address="127.0.0.1",
        **common,
    )


def check_answers(address: str) -> None:
    """Ask the port before Ray does, which tries for more than a minute and says little.

    Raises:
        UserError: nothing takes connections there.
    """
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"Ray at {address!r} does not answer ({error}); name the host and port that `ray start --head` printed "
            "(usually 6379), or auto for the cluster of this machine"
        ) from None


def check_token(environment: Mapping[str, str]) -> None:
    """Ray binds all interfaces, so its ports answer only who holds its token, which only its owner may read.

    Raises:
        UserError: token authentication is off, or others can read the token and it cannot be mended.
    """
    if environment.get("RAY_AUTH_MODE", "token").lower() != "token":
        raise UserError(
            f"RAY_AUTH_MODE={environment['RAY_AUTH_MODE']}: Ray's ports would run anybody's code; unset it, or start a "
            "cluster behind a network policy and join it with --address"
        )
    path = Path(environment.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        if path.exists() and path.stat().st_mode & 0o077:
            path.chmod(0o600)
    except OSError as error:
        raise UserError(f"{path}: others can read Ray's token and it cannot be mended ({error.strerror})") from None


def _resource(ray: Any, device: str) -> str:
    if device == "gpu":
        return "GPU"
    return SLOT if ray.cluster_resources().get(SLOT) else "CPU"
