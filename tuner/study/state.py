"""The moving parts of a study."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from tuner.budget import Meter
from tuner.evidence.sanity import unsound
from tuner.records import roles
from tuner.records.journal import Journal
from tuner.records.layout import StudyFolder
from tuner.study.asking import Asker
from tuner.study.knowledge import Knowledge
from tuner.study.lessons import Lessons
from tuner.study.plan import StudyPlan


Listener = Callable[[dict[str, Any]], None]
"""Called with every event of the study."""


@dataclass
class StudyState:
    """The moving parts of a study."""

    plan: StudyPlan
    folder: StudyFolder
    journal: Journal
    meter: Meter
    asker: Asker
    knowledge: Knowledge
    lessons: Lessons
    listeners: list[Listener] = field(default_factory=list)
    trials: list[dict[str, Any]] = field(default_factory=list)
    """Records of finished trials, earlier sessions included."""

    next_number: int = 0
    first_number: int = 0
    """Number of this session's first trial."""

    stop_asked: bool = False
    """Set by Ctrl-C: start nothing new, stop what runs."""

    def emit(self, event: str, **facts: Any) -> None:
        """Write an event to the journal and tell every listener."""
        line = self.journal.write(event, **facts)
        self.tell(line)

    def tell(self, line: dict[str, Any]) -> None:
        """Tell listeners something that needs no journal."""
        for listener in self.listeners:
            listener(line)

    @property
    def measured(self) -> list[dict[str, Any]]:
        """Records of the trials that measured something."""
        return [trial for trial in self.trials if trial["state"] == "measured"]

    @property
    def baseline(self) -> dict[str, Any] | None:
        """The baseline's record, if it was measured."""
        return next((trial for trial in self.measured if trial["role"] == "baseline"), None)

    @property
    def transport(self) -> str | None:
        """Network that the first measured trial's collectives used, where its ranks said so."""
        return next((trial["transport"] for trial in self.measured if trial.get("transport")), None)

    @property
    def best(self) -> dict[str, Any] | None:
        """The fastest measured trial of the search that may win, the baseline counted."""
        baseline = self.baseline
        searched = [
            trial
            for trial in self.measured
            if trial["role"] == "baseline" or (roles.searched(trial) and not unsound(trial, baseline))
        ]
        return min(searched, key=lambda trial: trial["step_time_s"], default=None)
