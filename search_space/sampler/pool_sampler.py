"""An Optuna sampler over an enumerated pool: never a candidate outside it, never the same one twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.distributions import CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial
from optuna.trial import TrialState

from search_space.candidate import Candidate
from search_space.pool import NAMES
from search_space.pool import Pool
from search_space.sampler.prior import Prior
from search_space.sampler.prior import Told
from search_space.sampler.strategies import random
from search_space.sampler.strategies import STRATEGIES


KEY = "candidate"
"""User attribute of an Optuna trial that holds its candidate's key."""

ATTEMPTS = {"tpe": 50, "gp": 3}
"""How often Optuna's own samplers are asked again for a candidate that is in the pool and new. The Gaussian process
draws nothing at random once it has a model, so it soon repeats itself, and each of its answers takes a second."""


def candidate_params(candidate: Candidate, names: list[str]) -> dict[str, Any]:
    """The Optuna parameters of a candidate: the knobs called ``names``."""
    return {name: getattr(candidate, name) for name in names}


class PoolSampler(BaseSampler):
    """Proposes candidates of a pool.

    Args:
        pool: the candidates; its order must not change between sessions of one study.
        prior: called at each ask for the present predictions over the pool.
        strategy: a name of :data:`STRATEGIES`, or ``tpe`` or ``gp`` for Optuna's own samplers on the same pool.
        seed: seed of every random choice.
    """

    def __init__(self, pool: Pool, prior: Callable[[], Prior], strategy: str = "ours", seed: int = 0) -> None:
        self._pool, self._prior, self._strategy = pool, prior, strategy
        self._rng = np.random.default_rng(seed)
        # Pools may hold a million candidates: columns are looked at, objects are made for single ones.
        self._values = {
            name: _values(pool, name) for name in NAMES if len(pool) and pool[name].min() != pool[name].max()
        }
        self._fixed = pool.candidate(0).to_json() if len(pool) else {}
        self._spaces: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(sorted(values, key=str)) for name, values in self._values.items()
        }
        self._places: dict[str, int | None] = {}
        self._delegate: BaseSampler | None = None
        if strategy == "tpe":
            self._delegate = optuna.samplers.TPESampler(seed=seed)
        elif strategy == "gp":
            self._delegate = optuna.samplers.GPSampler(seed=seed)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """One categorical distribution per knob that varies in the pool."""
        return dict(self._spaces)

    def params(self, candidate: Candidate) -> dict[str, Any]:
        """The Optuna parameters of a candidate of the pool."""
        return candidate_params(candidate, list(self._values))

    def find(self, params: dict[str, Any]) -> int | None:
        """Position of the candidate with these parameters, or None when the pool has none."""
        return self._pool.position(Candidate.from_json(self._fixed | params))

    def place(self, trial: FrozenTrial) -> int | None:
        """Position of the candidate that a trial measures; None when it is none of this pool."""
        key = trial.user_attrs.get(KEY, "")
        if key not in self._places:
            found = self.find(trial.params)
            if found is not None and self._pool.candidate(found).key() != key:
                found = None
            if not key:
                return None
            self._places[key] = found
        return self._places[key]

    def told(self, study: Study) -> Told:
        """What the study knows, as positions of the pool. Failed trials are asked, but not measured."""
        measured, values, running, asked = [], [], [], []
        states = (TrialState.COMPLETE, TrialState.RUNNING, TrialState.FAIL, TrialState.PRUNED)
        for trial in study.get_trials(deepcopy=False, states=states):
            position = self.place(trial)
            if position is None:
                continue
            if trial.state == TrialState.COMPLETE:
                asked.append(position)
                if not trial.user_attrs.get("failed") and trial.value:
                    measured.append(position)
                    values.append(float(np.log(trial.value)))
            elif trial.state == TrialState.RUNNING:
                asked.append(position)
                running.append(position)
            elif not trial.user_attrs.get("interrupted"):
                asked.append(position)
        return Told(
            measured=np.array(measured, dtype=int),
            log_step_time=np.array(values),
            running=np.array(running, dtype=int),
            asked=np.array(asked, dtype=int),
        )

    def left(self, study: Study) -> np.ndarray:
        """Positions that may still be proposed."""
        return _left(self._prior(), self.told(study))

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Every varying knob: candidates are proposed whole."""
        return self.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """One whole candidate of the pool that was not asked before.

        Raises:
            IndexError: nothing is left to propose (ask :meth:`left` first).
        """
        prior, told = self._prior(), self.told(study)
        left = _left(prior, told)
        if not len(left):
            raise IndexError("the pool is exhausted")
        if self._delegate is not None:
            position = self._ask_delegate(study, trial, search_space, left)
        else:
            position = STRATEGIES[self._strategy](self._pool, prior, told, left, self._rng)
        candidate = self._pool.candidate(position)
        self._places[candidate.key()] = position
        return self.params(candidate)

    def _ask_delegate(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution], left: np.ndarray
    ) -> int:
        """Ask Optuna's own sampler until it names a candidate that is left; after that any that is left."""
        assert self._delegate is not None
        allowed = np.zeros(len(self._pool), dtype=bool)
        allowed[left] = True
        for _ in range(ATTEMPTS[self._strategy]):
            params = dict(self._delegate.sample_relative(study, trial, self._delegate_space(study, trial)))
            for name, space in search_space.items():
                if name not in params:
                    params[name] = self._delegate.sample_independent(study, trial, name, space)
            position = self.find(params)
            if position is not None and allowed[position]:
                return position
        return random(self._pool, self._prior(), self.told(study), left, self._rng)

    def _delegate_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        assert self._delegate is not None
        return self._delegate.infer_relative_search_space(study, trial)

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never needed, since candidates are proposed whole.

        Raises:
            ValueError: a parameter outside the pool was asked for.
        """
        raise ValueError(f"{param_name!r} is no knob that varies in this pool")


def _left(prior: Prior, told: Told) -> np.ndarray:
    mask = prior.allowed.copy()
    mask[told.asked] = False
    return np.flatnonzero(mask)


def _values(pool: Pool, name: str) -> list[Any]:
    """Every value that a knob takes in a pool, in the knob's own terms."""
    _, first = np.unique(pool[name], return_index=True)
    return [getattr(pool.candidate(int(i)), name) for i in first]
