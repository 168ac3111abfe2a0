"""A study from its folder to its end: open or resume, search, confirm, choose, commit."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
from dataclasses import dataclass
import json
import os
from pathlib import Path
import signal
from typing import Any

from pruning.shortage import shortage
from search_space.errors import UserError
from trial_runner import devices
from tuner.budget import Meter
from tuner.cluster.session import join
from tuner.cluster.session import Needs
from tuner.evidence.commit import check_commit_target
from tuner.evidence.commit import commit_claim
from tuner.probing.start import probe_at_start
from tuner.records.journal import Journal
from tuner.records.layout import StudyFolder
from tuner.records.summary import summarise
from tuner.records.summary import Summary
from tuner.study.ablate import ablate
from tuner.study.asking import Asker
from tuner.study.choosing import choose
from tuner.study.claiming import make_claim
from tuner.study.confirm import confirm
from tuner.study.confirm import remove_weights
from tuner.study.costs import CostModel
from tuner.study.deciding import observation_of
from tuner.study.judging import noise_facts
from tuner.study.knowledge import Knowledge
from tuner.study.lessons import Lessons
from tuner.study.loop import Loop
from tuner.study.plan import StudyPlan
from tuner.study.state import Listener
from tuner.study.state import StudyState
from tuner.study.storage import storage_address
from tuner.study.transfer import read_transfer


DONE, UNSERVABLE, NOTHING_MEASURED, INTERRUPTED = 0, 2, 3, 130
"""Exit codes of the command-line contract."""

MAX_REJECTED = 2000
"""Refused candidates that are written with all their reasons; counts cover every one."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a session of a study runs."""

    budget_device_s: float
    """Device-seconds that the study may spend in all, earlier sessions included."""

    address: str | None = None
    """Address of a running Ray cluster; None starts a local one."""

    share_nodes: bool = False
    """Let gangs share a node."""

    commit_to: str | None = None
    """Repository for the winner's branch; None: one in the study folder."""


def run_study(
    folder: StudyFolder, plan: StudyPlan, options: RunOptions, listeners: Sequence[Listener]
) -> tuple[int, dict[str, Any]]:
    """Run a study until its end; the caller holds the :func:`lease`.

    Args:
        folder: the study's folder.
        plan: from :func:`create` or :func:`reopen`.
        options: this session's options.
        listeners: called with every event.

    Returns:
        Exit code and the last event, ``study_end``.

    Raises:
        UserError: the cluster cannot be joined or does not fit the job, or the winner cannot be committed.
    """
    check_commit_target(options.commit_to)
    before = summarise(folder)
    journal = Journal(folder.journal)
    state = open_state(folder, plan, options, journal, list(listeners), before)
    try:
        state.emit(
            "session",
            study=folder.name,
            folder=str(folder.root),
            budget_device_s=options.budget_device_s,
            spent_device_s=round(before.spent_device_s, 3),
            pid=os.getpid(),
            notes=[*plan.notes, *([REHEARSAL] if plan.rehearsal else []), *_carried_notes(folder, plan)],
        )
        assessment = state.knowledge.assessment
        counts = {
            "enumerated": len(plan.pool),
            "feasible": int(assessment.feasible.sum()),
            "rejected": assessment.rejected(),
        }
        state.emit("pool", **counts)
        if not folder.rejected.exists():
            _write_rejected(folder, state)
        if not counts["feasible"]:
            short = shortage(assessment)
            hint = f"; what would help: {'; '.join(short['help'])}" if short else ""
            return UNSERVABLE, _end(
                state, f"no candidate is feasible{hint}", near_misses=near_misses(state), shortage=short
            )
        with (
            join(
                plan.device, local_slots(plan, options.share_nodes), options.address, folder.root, needs(plan)
            ) as session,
            interruptible(state),
        ):
            state.emit("ray", dashboard=session.dashboard_url, local=session.local)
            probe_at_start(state, session)
            loop = Loop(state, session, options.share_nodes)
            share = plan.job.budget.confirm_share
            reason = loop.search(options.budget_device_s * (1 - share))
            if reason != "interrupted":
                confirm(loop)
                if plan.job.budget.ablate and share:
                    ablate(loop)
            loop.check_head()
        if state.stop_asked:
            return INTERRUPTED, _end(state, "interrupted", ended="interrupted")
        return _conclude(state, options, reason)
    except Exception as error:
        # A run that ends by an error must not look finished, or still running, to anybody who reads the records.
        state.emit("session_failed", **{"class": type(error).__name__, "text": str(error)[:1000]})
        raise
    finally:
        journal.close()


def needs(plan: StudyPlan) -> Needs:
    """Nodes that a study waits for in a running cluster."""
    setting = plan.setting
    return Needs(nodes=setting.nodes, devices=setting.devices_per_node, wait_s=plan.job.cluster.wait_s)


def local_slots(plan: StudyPlan, share_nodes: bool) -> int:
    """Slots that a local Ray offers: one gang's, or every core's where gangs may share the node."""
    per_node = plan.setting.devices_per_node
    return max(per_node, devices.num_cpu_slots()) if share_nodes else per_node


REHEARSAL = "a rehearsal: nothing is trained, every figure is the ledger's own prediction"
"""What a study says of itself whose ranks only pretend."""


def _carried_notes(folder: StudyFolder, plan: StudyPlan) -> list[str]:
    coefficients, carried, names = read_transfer(folder, plan.setting)
    if coefficients is None:
        return []
    points = len(carried.residual) if carried is not None else 0
    return [
        f"started from {', '.join(names)}: calibrated coefficients and {points} residuals; no trial counts as measured"
    ]


def open_state(
    folder: StudyFolder,
    plan: StudyPlan,
    options: RunOptions,
    journal: Journal,
    listeners: list[Listener],
    before: Summary,
) -> StudyState:
    """The moving parts of a study, with what earlier sessions learned in them.

    Args:
        folder: the study's folder.
        plan: its plan.
        options: this session's options.
        journal: its open journal.
        listeners: called with every event.
        before: what earlier sessions did.
    """
    costs = CostModel(plan.device, plan.job.measure)
    coefficients, carried, _ = read_transfer(folder, plan.setting)
    knowledge = Knowledge(plan.pool, plan.setting, costs, coefficients=coefficients, carried=carried)
    search = plan.job.search
    address = storage_address(plan.job.records.storage)
    seed = plan.job.recipe.seed
    asker = Asker(folder.optuna, folder.name, plan.pool, knowledge.prior, search.sampler, seed, address)
    meter = Meter(options.budget_device_s, before.spent_device_s)
    numbers = [trial["number"] for trial in before.trials] + list(before.running)
    lessons = Lessons(plan.pool, plan.setting)
    state = StudyState(plan, folder, journal, meter, asker, knowledge, lessons, listeners, list(before.trials))
    state.next_number = state.first_number = max(numbers, default=-1) + 1
    for record in before.trials:
        if record["state"] == "measured" and not record.get("saved_device_s"):
            candidate_steps = costs.steps * record["step_time_s"]
            costs.learn(record["candidate"]["compile"], max(0.0, record["wall_s"] - candidate_steps))
    for observation in filter(None, map(observation_of, before.trials)):
        knowledge.observe(observation)
    asker.free_running()
    asker.adopt(before.trials)
    blocked, held = lessons.blocked_by(before.trials)
    knowledge.hold(held)
    for candidate in blocked:
        if plan.pool.position(candidate) is not None:
            knowledge.block(candidate)
    return state


def _conclude(state: StudyState, options: RunOptions, reason: str) -> tuple[int, dict[str, Any]]:
    """Choose and commit the winner; say what came of it."""
    if not state.measured:
        return NOTHING_MEASURED if reason.startswith("budget") else UNSERVABLE, _end(state, reason)
    chosen = choose(state)
    if chosen is None:
        return UNSERVABLE, _end(state, reason)
    winner, comparison = chosen.winner, chosen.comparison
    state.emit("noise", **noise_facts(state))
    state.emit(
        "winner",
        number=winner["number"],
        label=winner["label"],
        comparison=comparison.to_json(),
        parity=chosen.parity.to_json(),
        changes=list(chosen.changes),
        why=chosen.why,
    )
    if state.plan.rehearsal:
        state.emit("warning", text="a rehearsal measures nothing, so its winner is not committed")
        return DONE, _end(state, reason)
    target = Path(options.commit_to).expanduser() if options.commit_to else state.folder.repository
    try:
        claim = make_claim(state, chosen)
        state.folder.claim.write_text(claim.to_json())
        done = commit_claim(claim, target, create=options.commit_to is None)
    except UserError as error:
        # What was measured must not be lost to a repository; `tune resume` commits once it is mended.
        state.emit("warning", text=f"the winner was not committed: {error}")
        return UNSERVABLE, _end(state, reason)
    state.emit("commit", **done)
    remove_weights(state)
    return DONE, _end(state, reason)


def _end(state: StudyState, reason: str, ended: str = "done", **more: Any) -> dict[str, Any]:
    state.emit("study_end", state=ended, reason=reason, **more)
    summary = summarise(state.folder).to_json()
    last = {"event": "study_end", **summary, "reason": reason}
    state.tell(last)
    return last


def near_misses(state: StudyState, count: int = 3) -> list[dict[str, Any]]:
    """The refused candidates nearest to feasible, with their reasons."""
    assessment = state.knowledge.assessment
    return [
        {
            "candidate": state.plan.pool.candidate(i).to_json(),
            "label": state.plan.pool.candidate(i).label(),
            "reasons": [reason.to_json() for reason in assessment.reasons(i)],
        }
        for i in assessment.nearest(count)
    ]


def _write_rejected(folder: StudyFolder, state: StudyState) -> None:
    assessment, pool = state.knowledge.assessment, state.plan.pool
    refused = [i for i in range(len(pool)) if not assessment.feasible[i]][:MAX_REJECTED]
    lines = [
        json.dumps(
            {
                "candidate": pool.candidate(i).to_json(),
                "label": pool.candidate(i).label(),
                "reasons": [reason.to_json() for reason in assessment.reasons(i)],
                "predicted": {k: state.knowledge.predicted(pool.candidate(i))[k] for k in ("mfu_pct", "memory_gib")},
            }
        )
        for i in refused
    ]
    folder.rejected.write_text("".join(line + "\n" for line in lines))


@contextlib.contextmanager
def interruptible(state: StudyState) -> Iterator[None]:
    """Ctrl-C or SIGTERM once: stop in order. A second one raises where it is."""

    def ask(signum: int, frame: object) -> None:
        if state.stop_asked:
            raise KeyboardInterrupt
        state.stop_asked = True
        state.tell({"event": "stopping"})

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
