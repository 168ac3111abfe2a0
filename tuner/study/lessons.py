"""What a failed trial means for the rest of a study: tried again, held siblings, or an end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from search_space.candidate import Candidate
from search_space.pool import Pool
from search_space.rules import judge
from search_space.rules import RISKS
from search_space.setting import Setting
from trial_runner.failure import failure_class
from trial_runner.failure.classes import NOTHING
from trial_runner.failure.classes import SIBLINGS
from trial_runner.failure.faults import FAULTS


TRANSIENT = ("interrupted", "no_devices", "driver_lost", "stopped")
"""Failure classes of trials that were cut off from outside: they count as no try and may be asked again."""

CANNOT_WIN = "cannot_win"
"""Failure class of a trial that was stopped as a loser; its step time is known, so it is no failure."""

AT_ONCE = ("disk_full",)
"""Classes that stop a study the first time; the others that stop one do so when two trials in a row meet them."""


def retried(kind: str) -> bool:
    """Whether a failure of this class speaks of the machine, not of the configuration, so a baseline is tried again."""
    return kind in TRANSIENT or failure_class(kind).retries > 0


UNEXPLAINED = ("illegal_access", "exception", "unknown", "rank_killed", "peer_lost", "agent_lost", "hardware_fault")
"""Classes that name no fault of a candidate."""

_FAULTS = {fault.code: fault for fault in FAULTS}


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What one failed trial means."""

    again: bool = False
    """Try the same candidate once more."""

    held: np.ndarray | None = None
    """Candidates held back because they would fail the same way, shape (n,) of bool."""

    reason: str = ""
    """Why they are held."""

    stop: str = ""
    """Why the study should end; empty when it goes on."""

    @property
    def num_held(self) -> int:
        """Candidates held."""
        return 0 if self.held is None else int(self.held.sum())


class Lessons:
    """Counts failures of a study, from its records in order.

    Args:
        pool: every candidate.
        setting: what is fixed.
    """

    def __init__(self, pool: Pool, setting: Setting) -> None:
        self._pool, self._setting = pool, setting
        self._tries: Counter[str] = Counter()
        self._in_a_row = 0
        self._unexplained: list[str] = []
        self._any_measured = False

    def take(self, record: Mapping[str, Any]) -> Lesson:
        """What a record means; an empty lesson for trials that measured something.

        A class that can be retried is, as often as its table says, and charged each time. A deterministic failure
        holds back the siblings of its known fault, or of the risks that the candidate was known to have.
        """
        failure = record["failure"]
        if record["state"] == "measured" or not failure or failure["class"] == CANNOT_WIN:
            self._in_a_row = 0
            self._unexplained.clear()
            self._any_measured = True
            return Lesson()
        kind = failure_class(failure["class"])
        if failure["class"] in TRANSIENT or record.get("quarantined"):
            return Lesson(again=True)
        stop = ""
        if kind.stops_study:
            self._in_a_row += 1
            if kind.kind in AT_ONCE or self._in_a_row > 1:
                stop = f"{kind.kind}: {kind.why} ({failure.get('text', '')[:200]}); {kind.advice}"
        else:
            self._in_a_row = 0
        candidate = Candidate.from_json(record["candidate"])
        stop = stop or self._broken(candidate, kind.kind, failure.get("text", ""))
        self._tries[candidate.key()] += 1
        if self._tries[candidate.key()] <= kind.retries:
            return Lesson(again=True, stop=stop)
        if kind.teaches == NOTHING and kind.stops_study:
            return Lesson(again=True, stop=stop)
        if kind.teaches != SIBLINGS:
            return Lesson(stop=stop)
        held, reason = self._siblings(candidate, failure.get("fault"))
        return Lesson(held=held, reason=reason, stop=stop)

    def blocked_by(self, records: Sequence[Mapping[str, Any]]) -> tuple[list[Candidate], np.ndarray]:
        """Candidates that never may be proposed again after some records, and held siblings, shape (n,) of bool."""
        blocked: dict[str, Candidate] = {}
        held = np.zeros(len(self._pool), dtype=bool)
        for record in records:
            lesson = self.take(record)
            if record["state"] == "failed" and not lesson.again:
                candidate = Candidate.from_json(record["candidate"])
                blocked[candidate.key()] = candidate
            if lesson.held is not None:
                held |= lesson.held
        # Whatever ended the last session may be mended by now: its failures in a row do not count into this one's.
        self._in_a_row = 0
        self._unexplained.clear()
        return list(blocked.values()), held

    def _broken(self, candidate: Candidate, kind: str, text: str) -> str:
        """Why the environment counts as broken: different candidates fail one after the other without a reason."""
        if kind not in UNEXPLAINED:
            self._unexplained.clear()
            return ""
        if candidate.key() not in self._unexplained:
            self._unexplained.append(candidate.key())
        if len(self._unexplained) < (3 if self._any_measured else 2):
            return ""
        return (
            f"environment broken: {len(self._unexplained)} different configurations failed in a row without a reason "
            f"of their own ({kind}: {text[:200]}); check drivers, library versions and devices, then `tune resume`"
        )

    def _siblings(self, candidate: Candidate, fault: str | None) -> tuple[np.ndarray | None, str]:
        if fault in _FAULTS:
            known = _FAULTS[fault]
            return known.holds(self._pool), f"{known.code}: {known.held} ({known.versions}); {known.advice}"
        one = judge(Pool.from_candidates([candidate]), self._setting, RISKS)
        risks = [i for i in range(len(RISKS)) if one.violations[i, 0]]
        if not risks:
            return None, ""
        everyone = judge(self._pool, self._setting, RISKS).violations
        text = "; ".join(RISKS[i].text for i in risks)
        return np.asarray(everyone[risks].any(axis=0)), f"known risk met: {text}"
