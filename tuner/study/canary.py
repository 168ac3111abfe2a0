"""The canary: the baseline measured again when an hour has passed, to see whether the machine has changed."""

from __future__ import annotations

import time
from typing import Any

from tuner.records import roles
from tuner.records.journal import read_journal
from tuner.study.judging import noise_of
from tuner.study.state import StudyState


class Canary:
    """When the baseline is due again, and what its step time says.

    Args:
        state: the study.
    """

    def __init__(self, state: StudyState) -> None:
        self._state = state
        self._measured_unix = 0.0
        for event in read_journal(state.folder.journal):
            if event["event"] == "trial":
                self._remember(event, event["unix_s"])

    @property
    def due(self) -> bool:
        """Whether the baseline was last measured longer ago than the job allows."""
        every = self._state.plan.job.measure.canary_s
        return bool(every and self._state.baseline is not None and time.time() - self._measured_unix > every)

    def skip(self) -> None:
        """Let it be until it is due again: the budget has no room for it."""
        self._measured_unix = time.time()

    def look(self, record: dict[str, Any]) -> None:
        """Take a finished trial; a canary's step time is compared with the baseline's first."""
        self._remember(record, time.time())
        first = self._state.baseline
        if record.get("role") != roles.CANARY:
            return
        if record["state"] != "measured" or first is None:
            self.skip()
            return
        change = 100 * (record["step_time_s"] / first["step_time_s"] - 1)
        floor = noise_of(self._state).floor_pct
        drifted = abs(change) > floor
        self._state.emit("canary", number=record["number"], change_pct=change, noise_floor_pct=floor, drifted=drifted)
        if drifted:
            text = (
                f"the baseline takes {change:+.1f}% of its first step time (noise floor {floor:.1f}%): earlier and "
                "later trials compare less well; the winner is confirmed in turns, which this does not touch"
            )
            self._state.emit("warning", text=text)

    def _remember(self, record: dict[str, Any], unix_s: float) -> None:
        if record.get("role") in (roles.BASELINE, roles.CANARY) and record["state"] == "measured":
            self._measured_unix = unix_s
