"""Optuna's side of a study: ask, tell, resume."""

from __future__ import annotations

from collections.abc import Callable
import json
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
from tuner.records.roles import searched
from tuner.study.storage import StudyStorage


SPACE = "space"
"""User attribute of an Optuna study that holds its knobs and their values."""


class Asker:
    """One Optuna study over the pool, kept in a database.

    Args:
        path: SQLite file; None keeps the study in memory.
        name: study name.
        pool: the candidates.
        prior: present predictions over the pool.
        strategy: sampler strategy.
        seed: seed of the sampler.
        address: shared database instead of the file, from :func:`tuner.study.storage.storage_address`.

    Raises:
        UserError: the shared database does not answer.
    """

    def __init__(
        self,
        path: Path | None,
        name: str,
        pool: Pool,
        prior: Callable[[], Prior],
        strategy: str,
        seed: int,
        address: str | None = None,
    ) -> None:
        optuna.logging.set_verbosity(logging.WARNING)
        self._pool = pool
        self._sampler = PoolSampler(pool, prior, strategy, seed)
        self._storage = StudyStorage(path, address)
        storage = self._storage.optuna
        self._study = optuna.create_study(
            storage=storage,
            study_name=self._fitting_name(storage, self._storage.name(name)),
            sampler=self._sampler,
            direction="minimize",
            load_if_exists=True,
        )
        self._study.set_user_attr(SPACE, self._space)

    @property
    def _space(self) -> str:
        """The knobs that vary and their values, as text."""
        return json.dumps({name: repr(space) for name, space in sorted(self._sampler.distributions.items())})

    def _fitting_name(self, storage: optuna.storages.BaseStorage, name: str) -> str:
        """The study's name in the storage. Optuna refuses a parameter whose choices changed, so a pool with other
        values has an Optuna study of its own; the journal's trials are adopted into it."""
        known = {found.study_name: found for found in optuna.get_all_study_summaries(storage)}
        for count in range(1, len(known) + 2):
            tried = name if count == 1 else f"{name}~{count}"
            if tried not in known or known[tried].user_attrs.get(SPACE, self._space) == self._space:
                return tried
        raise AssertionError("unreachable: one name more than there are studies was tried")

    def free_running(self) -> None:
        """Set the trials free that an earlier session left running, to be asked again.

        Only the process that holds the study's lease may do so: another worker's trials are none of ours.
        """
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
        """The next trial; a given candidate is taken as it is, else the sampler proposes one.

        Workers in several processes may ask on one storage; no two get the same candidate.
        """
        with self._storage.alone(self._study.study_name):
            return self._ask(candidate)

    def _ask(self, candidate: Candidate | None) -> tuple[optuna.Trial, Candidate]:
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
            seconds = record.get("step_time_s")
            if not searched(record) or candidate.key() in known or not seconds:
                continue
            if self._pool.position(candidate) is None:
                continue
            known.add(candidate.key())
            trial, _ = self.ask(candidate)
            self.tell_measured(trial, seconds, number=record["number"], mfu_pct=record["mfu_pct"])
