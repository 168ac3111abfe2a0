"""The real program on fake tensors, before any device is reserved: what the framework refuses is never placed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
import time
from typing import Any

import numpy as np

from pruning.ledger.prices import price
from search_space.candidate import Candidate
from search_space.errors import UserError
from search_space.pool import Pool
from trial_runner.dry_run import dry_run
from trial_runner.dry_run import DryRun
from tuner.study.plan import StudyPlan


TIMEOUT_S = 120.0
"""Longest time of one dry run; one that takes longer refuses nothing."""


@dataclass
class Oracle:
    """Asks the framework about a candidate once, at the pipeline rank that the ledger expects to hold most.

    Only where a trial is dearer than the question: on GPUs, with more than one device. On CPU slots a trial starts in
    the time that a dry run takes.
    """

    plan: StudyPlan
    """The study's plan."""

    known: dict[str, str | None] = field(default_factory=dict)
    """The framework's error by candidate key; None where it accepts."""

    run: Callable[..., DryRun] = dry_run
    """The dry run."""

    @property
    def wanted(self) -> bool:
        """Whether candidates of this study are asked about."""
        return self.plan.device == "gpu" and self.plan.setting.num_devices > 1

    def remember(self, event: dict[str, Any]) -> None:
        """Take over an answer of an earlier session from the journal."""
        self.known[event["key"]] = event["error"]

    def ask(self, candidate: Candidate) -> dict[str, Any] | None:
        """The facts of a new dry run for the journal; None where there was nothing to ask."""
        key = candidate.key()
        if not self.wanted or key in self.known:
            return None
        began = time.perf_counter()
        plan = self.plan
        pool = Pool.from_candidates([candidate])
        rank = int(np.nanargmax(price(pool, plan.setting).memory_by_rank_bytes[0]))
        try:
            found = self.run(candidate, plan.base, plan.recipe, [rank], timeout_s=TIMEOUT_S)
        except UserError as error:
            found = DryRun(valid=False, error=str(error), ranks=[], elapsed_s=0.0)
        refused = not found.valid and not found.unknown
        self.known[key] = found.error if refused else None
        return {
            "key": key,
            "label": candidate.label(),
            "candidate": candidate.to_json(),
            "valid": found.valid,
            "unknown": found.unknown,
            "error": found.error if refused else None,
            "pp_rank": rank,
            "peak_allocated_gib": found.ranks[0].peak_allocated_bytes / 2**30 if found.ranks else None,
            "elapsed_s": time.perf_counter() - began,
        }

    def refuses(self, candidate: Candidate) -> bool:
        """Whether the framework is known to refuse a candidate."""
        return self.known.get(candidate.key()) is not None
