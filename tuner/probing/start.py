"""The probe at the start of a study: once per node, short, charged to the budget, and the ledger learns from it."""

from __future__ import annotations

import time
from typing import Any

from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from pruning.probed import with_probe
from search_space.errors import UserError
from trial_runner.gang import KILL_GRACE_S
from trial_runner.probe import probe_node
from tuner.cluster.session import ClusterSession
from tuner.probing.cluster import able_nodes
from tuner.probing.cluster import ClusterProbe
from tuner.probing.cluster import probe_cluster
from tuner.probing.cluster import START_S
from tuner.probing.node import order_for
from tuner.probing.node import probed_of
from tuner.probing.node import suspect_text
from tuner.records.journal import read_journal
from tuner.study.state import StudyState
from tuner.study.transfer import read_transfer


SECONDS = {"cpu": 2.0, "gpu": 20.0}
"""How long a study's probe measures, seconds."""

ALLOWANCE_S = START_S + 2 * KILL_GRACE_S
"""Wall time that must be left in the budget beside it: its start-up, and the end of one that hangs."""

SHARE = 0.05
"""Of the budget that is left, the most that a probe is worth."""

BUSY = 0.1
"""Share of a CPU node's cores in other hands from which its lag is not held against it."""

PLACE_S = 60.0
"""Longest wait for the nodes to be free, seconds."""


def probe_at_start(state: StudyState, session: ClusterSession) -> None:
    """Probe the study's nodes, unless an earlier session did, the job does not want it, or the budget is too small.

    All nodes of a joined cluster that can take a node-share are probed as one gang; where that is too dear, as many as
    one trial needs. A probe that fails is a warning, not the end of a study.
    """
    if state.plan.rehearsal:
        return
    earlier = [event for event in read_journal(state.folder.journal) if event["event"] == "probe"]
    if earlier:
        state.knowledge.start_from(Coefficients.from_json(earlier[-1]["coefficients"]))
        _leave_out(state, session, earlier[-1]["suspects"])
        return
    plan = state.plan
    setting, seconds = plan.setting, SECONDS[plan.device]
    width = setting.devices_per_node
    every = 1 if session.local else able_nodes(session, width)
    nodes = next(
        (n for n in (every, min(every, setting.nodes)) if n and n * width * seconds <= SHARE * state.meter.left), 0
    )
    if not plan.job.measure.probe or not nodes:
        return
    worst = nodes * width * (seconds + ALLOWANCE_S)
    if not state.meter.fits(worst):
        return
    state.meter.reserve("probe", worst)
    probed = _probe(state, session, nodes, seconds)
    state.meter.settle("probe", probed.device_s)
    charged = round(probed.device_s, 3)
    if not probed.nodes:
        # In the journal like one that worked: it held the devices, so a resumed study must know what it cost.
        state.emit("probe_failed", device_s=charged, text=probed.failed)
        return
    carried, _, _ = read_transfer(state.folder, setting)
    coefficients = with_probe(carried or prior(setting), setting, probed_of(probed.nodes))
    node_ids: list[str | None] = [*probed.node_ids] or [None] * len(probed.nodes)
    suspects = [
        {"node": node.node, "node_id": node_id, "others_share": node.others_share, **suspect}
        for node, node_id in zip(probed.nodes, node_ids)
        for suspect in node.suspects
    ]
    figures = [node.to_json() for node in probed.nodes]
    state.emit("probe", device_s=charged, suspects=suspects, nodes=figures, coefficients=coefficients.to_json())
    state.knowledge.start_from(coefficients)
    for suspect in suspects:
        state.emit("warning", text=suspect_text(suspect["node"], suspect))
    _leave_out(state, session, suspects)


def _leave_out(state: StudyState, session: ClusterSession, suspects: list[dict[str, Any]]) -> None:
    """Put nodes that lag out of use, the slowest first, as long as enough others are there for a trial.

    A CPU node is spared when other work had its cores: what was slow then may be fast the next minute.
    """
    width = state.plan.setting.devices_per_node
    for suspect in sorted(suspects, key=lambda suspect: suspect["value"] / suspect["median"]):
        busy = state.plan.device == "cpu" and suspect.get("others_share", 0.0) > BUSY
        if suspect.get("node_id") is None or busy or able_nodes(session, width) <= state.plan.setting.nodes:
            continue
        node = session.quarantine(suspect["node_id"])
        if node is not None:
            state.emit(
                "quarantine",
                node=node.address,
                node_id=node.node_id,
                text=suspect_text(suspect["node"], suspect),
            )


def _probe(state: StudyState, session: ClusterSession, nodes: int, seconds: float) -> ClusterProbe:
    order = order_for(state.plan.setting, state.plan.device, seconds)
    if not session.local:
        folder = state.folder.root / "probe"
        return probe_cluster(session, order, nodes, folder, PLACE_S, lambda: state.stop_asked)
    began = time.perf_counter()
    try:
        found, failed = [probe_node(order, timeout_s=START_S)], ""
    except UserError as error:
        found, failed = [], str(error)
    return ClusterProbe(nodes=found, device_s=order.ranks_per_node * (time.perf_counter() - began), failed=failed)
