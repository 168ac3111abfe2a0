"""What a study does next and what it learns from an answer: the part that a real study and a replay share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import Any

import numpy as np
import optuna

from pruning.calibration import Observation
from pruning.coefficients import Coefficients
from search_space.candidate import Candidate
from search_space.hardware import GIB
from tuner.budget import Meter
from tuner.records.roles import BASELINE
from tuner.study.asking import Asker
from tuner.study.contrasts import design
from tuner.study.knowledge import Knowledge
from tuner.study.lessons import CANNOT_WIN
from tuner.study.lessons import Lesson
from tuner.study.lessons import Lessons
from tuner.study.lessons import TRANSIENT
from tuner.study.moves import Diagnosis


SLACK = 2.0
"""A trial is killed at this many times its worst case, where the budget has room for it: a bound learned on a quiet
machine must not throw away a trial on a busy one."""

OPTIMISM = 3.0
"""Standard deviations below its prediction at which a candidate must still lose before the search gives up on it."""

EXHAUSTED = "every feasible candidate was measured"
HOPELESS = "no candidate left can beat the best one, even at its optimistic end"
NO_BUDGET = "budget: the next trial's worst case does not fit in what is left"


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The next trial of the search."""

    candidate: Candidate
    """What to measure."""

    allowance_device_s: float
    """Device-seconds after which it is killed; never more than the search may still commit."""

    trial: optuna.Trial
    """Optuna's side of it."""

    move: Diagnosis | None = None
    """The diagnosis that speaks for it, if one does."""


class Decider:
    """Asks, admits on the budget, learns, answers.

    Args:
        asker: Optuna's side.
        knowledge: the ledger's side.
        meter: the budget.
        devices: devices that a trial holds.
        lessons: what earlier failures meant; None starts without any.
    """

    def __init__(
        self, asker: Asker, knowledge: Knowledge, meter: Meter, devices: int, lessons: Lessons | None = None
    ) -> None:
        self._asker, self._knowledge, self._meter, self._devices = asker, knowledge, meter, devices
        self._lessons = lessons or Lessons(knowledge.pool, knowledge.setting)
        self._again: list[Candidate] = []
        self._repeated: set[str] = set()
        self._stop = ""
        self._best_s = float("inf")

    def remember(self, records: Sequence[dict[str, Any]]) -> None:
        """Take in earlier sessions: the best, the diagnoses."""
        for record in records:
            if record["state"] == "measured":
                self._best_s = min(self._best_s, record["step_time_s"])
        for record in records:
            if record["state"] == "measured":
                self._knowledge.diagnose(record, self._best_s)

    def left(self, limit: float) -> float:
        """Device-seconds that the search may still commit, when it may spend ``limit`` in all."""
        return min(self._meter.left, limit - (self._meter.limit - self._meter.left))

    def propose(self, limit: float, *, idle: bool, incumbent_high_s: float | None) -> Proposal | str:
        """The next trial, or why there is none (empty: none for now, running trials may change that).

        Args:
            limit: device-seconds that the search may spend in all.
            idle: whether nothing runs now.
            incumbent_high_s: upper end of the best step time's interval; None never gives up on the pool.
        """
        knowledge, asker = self._knowledge, self._asker
        if self._stop:
            return self._stop
        knowledge.wall_limit_s = float("inf")
        again = self._retry(limit)
        if again is not None:
            return again
        if not asker.left:
            return EXHAUSTED if idle else ""
        if idle and incumbent_high_s is not None and self.nothing_can_win(incumbent_high_s):
            return HOPELESS
        knowledge.wall_limit_s = self.left(limit) / self._devices
        if not asker.left:
            return NO_BUDGET if idle else ""
        trial, candidate = asker.ask()
        worst = self._devices * knowledge.worst_s(candidate)
        return Proposal(
            candidate=candidate,
            allowance_device_s=min(SLACK * worst, self.left(limit)),
            trial=trial,
            move=knowledge.raised.get(knowledge.position(candidate)),
        )

    def _retry(self, limit: float) -> Proposal | None:
        """The candidate that a failure from outside ended, once more, if it still fits."""
        while self._again:
            candidate = self._again.pop(0)
            worst = self._devices * self._knowledge.worst_s(candidate)
            if worst <= self.left(limit) and self._knowledge.feasible[self._knowledge.position(candidate)]:
                trial, candidate = self._asker.ask(candidate)
                allowance = min(SLACK * worst, self.left(limit))
                return Proposal(candidate=candidate, allowance_device_s=allowance, trial=trial)
        return None

    def contrast(self, limit: float, ratio_left: float, centre: Candidate) -> Proposal | None:
        """The next designed contrast that fits in what is left of the ratio arm; None when none does.

        Args:
            limit: device-seconds that the search may spend in all.
            ratio_left: device-seconds that the ratio arm may still commit.
            centre: the candidate that contrasts should be like in all else.
        """
        if self._stop:
            return None
        knowledge = self._knowledge
        knowledge.wall_limit_s = float("inf")
        prices, left = knowledge.assessment.prices, set(self._asker.left_positions())
        for position in design(knowledge.pool, knowledge.feasible, prices.step_time_s, centre):
            candidate = knowledge.pool.candidate(position)
            worst = self._devices * knowledge.worst_s(candidate)
            if position not in left or worst > min(ratio_left, self.left(limit)):
                continue
            trial, _ = self._asker.ask(candidate)
            allowance = min(SLACK * worst, ratio_left, self.left(limit))
            return Proposal(candidate=candidate, allowance_device_s=allowance, trial=trial)
        return None

    def nothing_can_win(self, incumbent_high_s: float) -> bool:
        """Whether every candidate left loses against the incumbent even at its optimistic end."""
        prices, left = self._knowledge.assessment.prices, self._asker.left_positions()
        optimistic = np.log(prices.step_time_s[left]) - OPTIMISM * prices.log_sigma[left]
        return bool(np.all(optimistic > np.log(incumbent_high_s)))

    def learn(self, record: dict[str, Any]) -> Coefficients | None:
        """Take a finished trial's record into costs and ledger; the new coefficients, if it taught some."""
        knowledge = self._knowledge
        if record["state"] == "measured" and not record.get("saved_device_s"):
            in_steps = knowledge.costs.steps * record["step_time_s"]
            knowledge.costs.learn(record["candidate"]["compile"], max(0.0, record["wall_s"] - in_steps))
        if record["state"] == "measured":
            self._best_s = min(self._best_s, record["step_time_s"])
            knowledge.diagnose(record, self._best_s)
        observation = observation_of(record)
        if observation is None:
            return None
        knowledge.observe(observation)
        return knowledge.coefficients

    def _disturbed(self, record: dict[str, Any]) -> bool:
        """Whether a trial's step time changed on the way, and its faster part could have won; once per candidate."""
        fast = record.get("undisturbed_s")
        if record["state"] != "measured" or record.get("role") == BASELINE or not fast:
            return False
        key = Candidate.from_json(record["candidate"]).key()
        if key in self._repeated or fast >= self._best_s or record["step_time_s"] <= self._best_s:
            return False
        self._repeated.add(key)
        return True

    def answer(self, trial: optuna.Trial, record: dict[str, Any]) -> Lesson:
        """Tell Optuna how a trial ended; a candidate that failed by itself is never proposed again.

        Returns:
            What a failure means for the rest of the study; empty for a measured trial.
        """
        lesson = self._lessons.take(record)
        self._stop = self._stop or lesson.stop
        asker, knowledge = self._asker, self._knowledge
        if self._disturbed(record):
            # Not told as measured: the candidate is asked for once more, and that run counts.
            asker.tell_interrupted(trial)
            self._again.append(Candidate.from_json(record["candidate"]))
            return replace(lesson, again=True)
        if timed(record):
            asker.tell_measured(trial, record["step_time_s"], number=record["number"], mfu_pct=record["mfu_pct"])
            return lesson
        kind = record["failure"]["class"]
        candidate = Candidate.from_json(record["candidate"])
        if lesson.again:
            asker.tell_interrupted(trial)
            if kind not in TRANSIENT and record.get("role") != "baseline":
                self._again.append(candidate)
            return lesson
        step_s = float(knowledge.assessment.prices.step_time_s[knowledge.position(candidate)])
        asker.tell_failed(trial, step_s, kind)
        knowledge.block(candidate)
        if lesson.held is not None:
            knowledge.hold(lesson.held)
        return lesson


def _class(record: dict[str, Any]) -> str:
    """Failure class of a record; empty when it did not fail."""
    return str((record.get("failure") or {}).get("class", ""))


def timed(record: dict[str, Any]) -> bool:
    """Whether a trial's step time is known: it was measured, or stopped as a loser after enough steps."""
    return record["state"] == "measured" or _class(record) == CANNOT_WIN


def observation_of(record: dict[str, Any]) -> Observation | None:
    """What a trial's record teaches the ledger; None when it teaches nothing."""
    candidate = Candidate.from_json(record.get("effective_candidate") or record["candidate"])
    if timed(record):
        peak = record["peak_reserved_gib"]
        return Observation(
            candidate=candidate,
            step_time_s=record["step_time_s"],
            step_time_ci_s=tuple(record["step_time_ci_s"]),
            peak_reserved_bytes=peak * GIB if peak else None,
        )
    if _class(record) == "out_of_memory":
        return Observation(candidate=candidate, oom=True)
    return None
