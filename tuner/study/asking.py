"""Optuna's side of a study: ask, tell, resume."""

from __future__ import annotations

from collections.abc import Callable
import logging
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import TrialState

from search_space.candidate import Candidate
from search_space.pool import Pool
from search_space.sampler import PoolSampler
from search_space.sampler import Prior
from search_space.sampler.pool_sampler import KEY


class Asker:
    """One Optuna study over the pool, kept in a database.

    Args:
        path: SQLite file; None keeps the study in memory.
        name: study name.
        pool: the candidates.
        prior: present predictions over the pool.
        strategy: sampler strategy.
        seed: seed of the sampler.
    """

    def __init__(
        self, path: Path | None, name: str, pool: Pool, prior: Callable[[], Prior], strategy: str, seed: int
    ) -> None:
        optuna.logging.set_verbosity(logging.WARNING)
        self._pool = pool
        self._sampler = PoolSampler(pool, prior, strategy, seed)
        storage = optuna.storages.InMemoryStorage() if path is None else optuna.storages.RDBStorage(f"sqlite:///{path}")
        self._study = optuna.create_study(
            storage=storage, study_name=name, sampler=self._sampler, direction="minimize", load_if_exists=True
        )
        self._interrupt_running()

    def _interrupt_running(self) -> None:
        """Trials that an earlier session left running are set free, to be asked again."""
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            self._study._storage.set_trial_user_attr(trial._trial_id, "interrupted", True)
            self._study.tell(trial.number, state=TrialState.FAIL)

    @property
    def left(self) -> int:
        """Candidates that may still be proposed."""
        return len(self._sampler.left(self._study))

    def left_positions(self) -> list[int]:
        """Positions in the pool that may still be proposed."""
        return [int(i) for i in self._sampler.left(self._study)]

    def ask(self, candidate: Candidate | None = None) -> tuple[optuna.Trial, Candidate]:
        """The next trial; a given candidate is taken as it is, else the sampler proposes one."""
        if candidate is not None:
            self._study.enqueue_trial(self._sampler.params(candidate))
        trial = self._study.ask(self._sampler.distributions)
        if candidate is None:
            position = self._sampler.find(trial.params)
            assert position is not None
            candidate = self._pool.candidate(position)
        chosen = candidate
        trial.set_user_attr(KEY, chosen.key())
        trial.set_user_attr("label", chosen.label())
        return trial, chosen

    def tell_measured(self, trial: optuna.Trial, step_time_s: float, **attrs: object) -> None:
        """A trial measured its step time, seconds."""
        for name, value in attrs.items():
            trial.set_user_attr(name, value)
        trial.set_constraint("failed", -1.0)
        self._study.tell(trial, step_time_s)

    def tell_failed(self, trial: optuna.Trial, predicted_s: float, kind: str) -> None:
        """A trial failed: told with the ledger's prediction and a violated constraint, never dropped."""
        trial.set_user_attr("failed", kind)
        trial.set_constraint("failed", 1.0)
        self._study.tell(trial, predicted_s)

    def tell_interrupted(self, trial: optuna.Trial) -> None:
        """A trial was stopped by the user or the machine: it may be asked again."""
        trial.set_user_attr("interrupted", True)
        self._study.tell(trial, state=TrialState.FAIL)

    def adopt(self, records: list[dict[str, Any]]) -> None:
        """Bring Optuna up to the journal: a record that a crash kept from being told is added now."""
        known = {
            trial.user_attrs.get(KEY)
            for trial in self._study.get_trials(deepcopy=False)
            if not trial.user_attrs.get("interrupted")
        }
        for record in records:
            candidate = Candidate.from_json(record["candidate"])
            measured = record["state"] == "measured"
            if record.get("role") == "confirm" or candidate.key() in known or not measured:
                continue
            trial, _ = self.ask(candidate)
            self.tell_measured(trial, record["step_time_s"], number=record["number"], mfu_pct=record["mfu_pct"])
