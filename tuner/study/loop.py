"""The loop of a study: ask, reserve, place, watch, record, until budget or pool is at its end."""

from __future__ import annotations

from collections.abc import Callable
import json
import time
from typing import Any

import optuna

from search_space.candidate import Candidate
from search_space.errors import UserError
from trial_runner.failure import Failure
from trial_runner.measure import Measurement
from tuner.cluster.placed_gang import GangEnd
from tuner.cluster.session import ClusterSession
from tuner.evidence.sanity import unsound
from tuner.records import roles
from tuner.records.journal import read_journal
from tuner.study.canary import Canary
from tuner.study.capacity import Capacity
from tuner.study.deciding import Decider
from tuner.study.deciding import SLACK
from tuner.study.lessons import retried
from tuner.study.lessons import TRANSIENT
from tuner.study.moves import Diagnosis
from tuner.study.oracle import Oracle
from tuner.study.state import StudyState
from tuner.study.trial import TrialRun


POLL_S = 0.2
"""Between looks at running trials, seconds."""

HEARTBEAT_S = 2.0
"""Between heartbeats in the journal, seconds: what a crash may leave uncharged."""

PLACEMENT_TRIES = 3
"""Placements in a row that may time out before the study ends for lack of devices."""

BASELINE_TRIES = 2
"""Tries of the baseline in one session."""

HEAD_GONE = "stopped because Ray's head was gone"
"""What is said of trials that a lost head ended."""


class Loop:
    """Runs trials of a study on a cluster.

    Args:
        state: the study.
        session: the joined cluster.
        share_nodes: let gangs share a node (it disturbs timing).
    """

    def __init__(self, state: StudyState, session: ClusterSession, share_nodes: bool) -> None:
        self.state, self._session = state, session
        self._capacity = Capacity(state.plan, session, share_nodes)
        self.shape = self._capacity.shape
        self._unplaced = 0
        self._stopped_by = "stopped by the user"
        if share_nodes:
            state.knowledge.costs.crowd = max(1, -(-self._capacity.most // max(1, len(session.nodes()))))
        self._decider = Decider(state.asker, state.knowledge, state.meter, self.shape.devices, state.lessons)
        self._decider.remember(state.trials)
        self._running: dict[int, tuple[TrialRun, optuna.Trial | None]] = {}
        self._heartbeat = 0.0
        session.on_lost(self._lose)
        self.oracle = Oracle(state.plan)
        for event in read_journal(state.folder.journal):
            if event["event"] == "dry_run":
                self.oracle.remember(event)
        self._canary = Canary(state)
        self.reason = ""

    def search(self, limit: float) -> str:
        """Measure candidates until nothing more fits; returns why it ended.

        Args:
            limit: device-seconds that the search may have spent in all.
        """
        state = self.state
        self.reason = ""
        while True:
            self._reap()
            if self._canary.due and not (self._running or self.reason or state.stop_asked) and self._session.steady():
                self._start_canary(limit)
            while self._may_start() and self._start_next(limit):
                pass
            if state.stop_asked:
                self._stop_all()
                self.check_head()
                return "interrupted"
            if not self._running and self.reason:
                return self.reason
            time.sleep(POLL_S)

    def _may_start(self) -> bool:
        """Whether another trial of the search may start now; one that is due to see the machine alone comes first."""
        if self.state.stop_asked or self.reason or self._canary.due:
            return False
        return len(self._running) < self._allowed_parallel() and self._session.steady()

    def run_one(self, candidate: Candidate, role: str, weights: str | None = None) -> dict[str, Any] | None:
        """Run one trial outside the search, if its worst case fits; returns its record.

        Args:
            candidate: the knobs.
            role: one of :mod:`tuner.records.roles`.
            weights: folder of the weights it begins with; None: from scratch.
        """
        state = self.state
        worst = self.shape.devices * state.knowledge.worst_s(candidate)
        if state.stop_asked or not state.meter.fits(worst) or not self._session.steady():
            return None
        allowance = self._bounded(min(SLACK * worst, state.meter.left))
        number = self._launch(candidate, role, allowance, None, weights=weights)
        while number in self._running:
            if state.stop_asked:
                self._stop_all()
                self.check_head()
                return None
            self._reap()
            time.sleep(POLL_S)
        return state.trials[-1]

    def _allowed_parallel(self) -> int:
        """The baseline runs alone: all later bounds rest on it."""
        return self._capacity.now if self.state.baseline is not None else 1

    def _start_next(self, limit: float) -> bool:
        state = self.state
        job = state.plan.job
        searched = sum(map(_counts, state.trials)) + len(self._running)
        if job.search.max_trials and searched >= job.search.max_trials:
            self.reason = f"max_trials = {job.search.max_trials} reached"
            return False
        if state.baseline is None:
            return self._start_baseline()
        if self._start_contrast(limit):
            return True
        proposed = self._decider.propose(limit, idle=not self._running, incumbent_high_s=self._incumbent_high_s())
        if isinstance(proposed, str):
            self.reason = proposed
            return False
        if self._refused(proposed.trial, proposed.candidate):
            return True
        allowance = self._bounded(proposed.allowance_device_s)
        self._launch(proposed.candidate, "search", allowance, proposed.trial, proposed.move)
        return True

    def _refused(self, trial: optuna.Trial, candidate: Candidate) -> bool:
        """Whether the framework refuses a proposed candidate on fake tensors; then it is told and never placed."""
        state, knowledge = self.state, self.state.knowledge
        facts = self.oracle.ask(candidate)
        if facts is not None:
            state.emit("dry_run", **facts)
        if not self.oracle.refuses(candidate):
            return False
        step = float(knowledge.assessment.prices.step_time_s[knowledge.position(candidate)])
        state.asker.tell_failed(trial, step, "refused_by_framework")
        knowledge.block(candidate)
        return True

    def _start_contrast(self, limit: float) -> bool:
        """Start the next designed contrast, while the ratio arm has budget."""
        state = self.state
        share = state.plan.job.ratio_share
        if not share or state.baseline is None:
            return False
        paid = sum(trial["device_s"] for trial in state.trials if trial["role"] == "ratio")
        held = sum(
            state.meter.reserved.get(str(number), 0.0)
            for number, (run, _) in self._running.items()
            if run.role == "ratio"
        )
        centre = Candidate.from_json((state.best or state.baseline)["candidate"])
        proposed = self._decider.contrast(limit, share * limit - paid - held, centre)
        if proposed is None:
            return False
        self._launch(proposed.candidate, "ratio", self._bounded(proposed.allowance_device_s), proposed.trial)
        return True

    def _bounded(self, allowance: float) -> float:
        """An allowance in device-seconds, cut to the job's own time limit for a trial."""
        timeout = self.state.plan.job.measure.timeout_s
        return min(allowance, self.shape.devices * timeout) if timeout else allowance

    def _start_canary(self, limit: float) -> None:
        """Measure the baseline once more, alone, if it fits and there is anything left to compare with it."""
        state = self.state
        worst = self.shape.devices * state.knowledge.worst_s(state.plan.baseline)
        left = self._decider.left(limit)
        if worst > left or not state.asker.left:
            self._canary.skip()
            return
        self._launch(state.plan.baseline, roles.CANARY, self._bounded(min(SLACK * worst, left)), None)

    def _start_baseline(self) -> bool:
        state = self.state
        failed = [trial for trial in state.trials if trial["role"] == "baseline" and trial["state"] == "failed"]
        here = [trial for trial in failed if trial["number"] >= state.first_number]
        final = [trial for trial in failed if not retried(trial["failure"]["class"])]
        if final or len(here) >= BASELINE_TRIES:
            failure = (final or here)[-1]["failure"]
            self.reason = f"the baseline failed ({failure['class']}: {failure['text'][:300]})"
            return False
        baseline = state.plan.baseline
        worst = self.shape.devices * state.knowledge.worst_s(baseline)
        if not state.meter.fits(worst):
            again = " again after it was stopped" if here else ""
            self.reason = (
                f"budget: not even the baseline fits{again}: its worst case is {worst:.0f} device-seconds, "
                f"{state.meter.left:.0f} are left; raise --budget, or lower measure.steps"
            )
            return False
        trial, candidate = state.asker.ask(baseline)
        # Nothing is known of this machine yet, so the baseline may use all there is before it is killed.
        self._launch(candidate, "baseline", self._bounded(state.meter.left), trial)
        return True

    def _launch(
        self,
        candidate: Candidate,
        role: str,
        allowance: float,
        asked: optuna.Trial | None,
        move: Diagnosis | None = None,
        weights: str | None = None,
    ) -> int:
        """Reserve, place and start one trial; a trial that cannot be placed is recorded as failed.

        Args:
            candidate: the knobs.
            role: one of :mod:`tuner.records.roles`.
            allowance: device-seconds after which it is killed; they are held back until it ends.
            asked: Optuna's trial, if it was asked for one.
            move: the diagnosis that speaks for it.
            weights: folder of the weights it begins with; None: from scratch.
        """
        state = self.state
        number = state.next_number
        state.next_number += 1
        run = TrialRun(state.plan, state.folder, number, role, candidate)
        run.move = move.to_json() if move is not None else None
        run.weights = weights
        predicted = state.knowledge.predicted(candidate)
        run.predicted_step_s = float(str(predicted["step_time_s"]))
        state.meter.reserve(str(number), allowance)
        state.tell({"event": "trial_queued", "number": number, "role": role, "label": candidate.label()})
        self._running[number] = (run, asked)
        try:
            placed = run.place(
                self._session,
                self.shape,
                allowance / self.shape.devices,
                self._waiting(number),
                SLACK * state.knowledge.first_step_s(candidate),
            )
        except UserError as error:
            self._finish(number, Failure(kind="not_runnable", rank=None, text=str(error)))
            return number
        except Exception as error:
            self._finish(number, Failure(kind="start_failed", rank=None, text=f"{type(error).__name__}: {error}"))
            return number
        if not placed:
            text = "interrupted while waiting for devices" if state.stop_asked else self._no_devices()
            kind = "interrupted" if state.stop_asked else "no_devices"
            # A node may have died with the request on it; the candidate is asked for again on those that are left.
            self._unplaced += not state.stop_asked
            if self._unplaced >= PLACEMENT_TRIES:
                self.reason = self.reason or f"the cluster gave no devices: {text}, {self._unplaced} times in a row"
            self._finish(number, Failure(kind=kind, rank=None, text=text))
            return number
        self._unplaced = 0
        state.emit(
            "trial_placed",
            number=number,
            role=role,
            candidate=candidate.to_json(),
            label=candidate.label(),
            devices=self.shape.devices,
            nodes=run.node_ids,
            allowance_device_s=round(allowance, 1),
            predicted=predicted,
            move=run.move,
        )
        return number

    def _no_devices(self) -> str:
        """What to say of a gang whose devices never came."""
        shape = self.shape
        return (
            f"no {shape.nodes} node(s) with {shape.held_per_node} free devices within "
            f"{self.state.plan.job.cluster.wait_s:g} s; the wait is not charged. `ray status` shows who holds them; "
            "then `tune resume`, or wait longer by cluster.wait_s"
        )

    def _waiting(self, number: int) -> Callable[[], bool]:
        """What a trial that waits for devices calls: looks after the others, says whether to give up."""

        def look() -> bool:
            self._reap(but=number)
            return self.state.stop_asked

        return look

    def _reap(self, but: int | None = None) -> None:
        """Look at every running trial (one may be left out); finish those that ended; heartbeat."""
        for number, (run, _) in list(self._running.items()):
            if number == but:
                continue
            end = run.poll()
            if end is None and run.role == "search" and run.race(self._incumbent_high_s()):
                end = GangEnd("stopped")
            if end is not None:
                run.release()
                self._finish(number, run.result(end, self.state.transport), self._quarantine(end))
        if self._running and time.monotonic() - self._heartbeat > HEARTBEAT_S:
            self._heartbeat = time.monotonic()
            spending = {number: round(run.device_s, 2) for number, (run, _) in self._running.items()}
            self.state.journal.write("heartbeat", running=spending)
        for number, (run, _) in self._running.items():
            if number == but:
                continue
            self.state.tell({"event": "progress", "number": number, "device_s": run.device_s, **run.progress()})

    def _quarantine(self, end: GangEnd) -> str | None:
        """Take a node with foreign memory on its devices out of use, where the others suffice; its address."""
        if end.ended != "dirty_device" or end.node_id is None:
            return None
        if len(self._session.nodes()) <= self.shape.nodes:
            return None
        node = self._session.quarantine(end.node_id)
        if node is None:
            return None
        self._capacity.forget()
        self.state.emit("quarantine", node=node.address, node_id=node.node_id, text=end.text)
        return node.address

    def _incumbent_high_s(self) -> float | None:
        """Upper end of the best measured step time's interval."""
        best = self.state.best
        return float(best["step_time_ci_s"][1]) if best else None

    def _lose(self) -> None:
        """The cluster's head has gone: end as if stopped, and say so, unless the user had asked for the end."""
        if not self.state.stop_asked:
            self._stopped_by = HEAD_GONE
            self.state.stop_asked = True

    def check_head(self) -> None:
        """Raise if the study stops because the cluster's head has gone.

        Raises:
            UserError: it does.
        """
        if self._stopped_by == HEAD_GONE:
            self._session.check()

    def _stop_all(self) -> None:
        for number, (run, _) in list(self._running.items()):
            run.release()
            self._finish(number, Failure(kind="interrupted", rank=None, text=self._stopped_by))

    def _finish(self, number: int, outcome: Measurement | Failure, quarantined: str | None = None) -> None:
        """Release, charge, tell Optuna and the ledger, record; ``quarantined`` is a node that was put out of use."""
        state = self.state
        run, asked = self._running.pop(number)
        run.release()
        predicted = state.knowledge.predicted(run.candidate)
        record = run.record(outcome, predicted)
        if quarantined is not None:
            record["quarantined"] = quarantined
        state.meter.settle(str(number), record["device_s"])
        # The record is on disk before Optuna hears of it: after a crash the journal is the truth.
        state.trials.append(record)
        state.emit("trial", **record)
        self._canary.look(record)
        against = unsound(record, state.baseline) if record["state"] == "measured" else None
        if against:
            state.emit("warning", text=f"trial {number} cannot win: {against}")
        coefficients = self._decider.learn(record)
        if coefficients is not None and not state.plan.rehearsal:
            state.folder.coefficients.write_text(json.dumps(coefficients.to_json(), indent=1))
        if asked is None:
            return
        lesson = self._decider.answer(asked, record)
        if lesson.num_held:
            state.emit("held", number=number, count=lesson.num_held, reason=lesson.reason)


def _counts(record: dict[str, Any]) -> bool:
    """Whether a trial counts towards the job's limit: one of the search that was not cut off from outside."""
    cut_off = (record["failure"] or {}).get("class") in TRANSIENT
    return roles.searched(record) and not cut_off
