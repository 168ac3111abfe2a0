"""The probe at the start of a study: once per node, short, charged to the budget, and the ledger learns from it."""

from __future__ import annotations

import time
from typing import Any

from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from pruning.probed import with_probe
from search_space.errors import UserError
from tuner.cluster.session import ClusterSession
from tuner.probing.node import probe
from tuner.probing.node import probed_of
from tuner.records.journal import read_journal
from tuner.study.state import StudyState
from tuner.study.transfer import read_transfer


SECONDS = {"cpu": 2.0, "gpu": 20.0}
"""How long a study's probe measures, seconds."""

ALLOWANCE_S = 60.0
"""Wall time that must be left in the budget beside it, for its start-up."""


def probe_at_start(state: StudyState, session: ClusterSession) -> None:
    """Probe this machine, unless an earlier session did, the job does not want it, or the budget is too small.

    Only a node that the tuner itself stands on is measured: nodes of a cluster that it joined are probed there, with
    ``tune probe``. A probe that fails is a warning, not the end of a study.
    """
    if state.plan.rehearsal:
        return
    earlier = [event for event in read_journal(state.folder.journal) if event["event"] == "probe"]
    if earlier:
        state.knowledge.start_from(Coefficients.from_json(earlier[-1]["coefficients"]))
        return
    plan = state.plan
    devices, seconds = plan.setting.devices_per_node, SECONDS[plan.device]
    worst = devices * (seconds + ALLOWANCE_S)
    # A probe is worth a twentieth of what is left, not more.
    if not plan.job.measure.probe or not session.local or devices * seconds > 0.05 * state.meter.left:
        return
    if not state.meter.fits(worst):
        return
    state.meter.reserve("probe", worst)
    began = time.perf_counter()
    facts: dict[str, Any] = {}
    failed = ""
    try:
        figures = probe(plan.setting, plan.device, devices, seconds)
        carried, _, _ = read_transfer(state.folder, plan.setting)
        coefficients = with_probe(carried or prior(plan.setting), plan.setting, probed_of(figures))
        facts = {"figures": figures.to_json(), "coefficients": coefficients.to_json()}
    except UserError as error:
        failed = str(error)
    charged = devices * (time.perf_counter() - began)
    state.meter.settle("probe", charged)
    if not facts:
        # In the journal like one that worked: it held the devices, so a resumed study must know what it cost.
        state.emit("probe_failed", device_s=round(charged, 3), text=failed)
        return
    state.emit("probe", device_s=round(charged, 3), suspects=figures.suspects, **facts)
    state.knowledge.start_from(coefficients)
    for suspect in figures.suspects:
        state.emit(
            "warning",
            text=f"device {suspect['rank']} lags in {suspect['what']}: {suspect['value']:.3g}, the node's median is "
            f"{suspect['median']:.3g}",
        )
