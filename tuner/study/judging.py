"""Judging measured trials against each other: which runs count, how noisy they are, whether their losses agree."""

from __future__ import annotations

from typing import Any

import numpy as np

from search_space.candidate import Candidate
from trial_runner.measure import read_records
from trial_runner.measure import Records
from trial_runner.measure import steady_times
from tuner.evidence.compare import compare
from tuner.evidence.compare import Comparison
from tuner.evidence.noise import net_of_rounds
from tuner.evidence.noise import Noise
from tuner.evidence.parity import compare_curves
from tuner.evidence.parity import numeric_changes
from tuner.evidence.parity import Parity
from tuner.evidence.parity import same_samples
from tuner.evidence.parity import same_start
from tuner.records import roles
from tuner.study.state import StudyState


def noise_of(state: StudyState, node: str | None = None) -> Noise:
    """Run-to-run noise of a study, from every configuration that ran more than once, net of what a turn's runs share.

    Canaries do not count: they are there to see what is no noise.

    Args:
        state: the study.
        node: count only runs that lay on this node (Ray's id); None: runs anywhere.
    """
    cells: list[tuple[str, int, float]] = []
    number, seen = 0, set[str]()
    for trial in state.measured:
        if trial["role"] == roles.CANARY or (node is not None and node not in trial.get("nodes", ())):
            continue
        name = Candidate.from_json(trial["candidate"]).key()
        if not roles.searched(trial) and (number == 0 or name in seen):
            # A new turn of confirmation or ablation; the search is one round of its own.
            number, seen = number + 1, set()
        seen.add(name)
        cells.append((name, number, trial["step_time_s"]))
    return net_of_rounds(cells, state.plan.device)


def noise_facts(state: StudyState) -> dict[str, Any]:
    """The study's noise, and that of each node where trials lay on several: facts of the ``noise`` event."""
    nodes = sorted({node for trial in state.measured for node in trial.get("nodes", ())})
    by_node = {node: noise_of(state, node).to_json() for node in nodes} if len(nodes) > 1 else {}
    return noise_of(state).to_json() | {"by_node": by_node}


class Judge:
    """Verdicts over a study's measured trials.

    Args:
        state: the study.
    """

    def __init__(self, state: StudyState) -> None:
        self._state = state
        self._read: dict[int, Records] = {}

    def records(self, candidate: Candidate) -> list[dict[str, Any]]:
        """The measured trials of a candidate whose step times count.

        Those run in turns after the search, where there are any: they were not chosen for being fast, and the hour
        was the same for all. Else all of them.
        """
        same = [trial for trial in self._state.measured if Candidate.from_json(trial["candidate"]) == candidate]
        repeats = [trial for trial in same if trial["role"] in (roles.CONFIRM, roles.ABLATE)]
        return repeats or same

    def times(self, candidate: Candidate) -> list[np.ndarray]:
        """Steady step times of each run that counts, seconds."""
        return [steady_times(self._facts(trial)) for trial in self.records(candidate)]

    def level_s(self, candidate: Candidate) -> float:
        """Geometric mean of the runs' median step times, seconds; infinite without runs."""
        runs = self.times(candidate)
        return float(np.exp(np.mean([np.log(np.median(run)) for run in runs]))) if runs else float("inf")

    @property
    def noise(self) -> Noise:
        """Run-to-run noise from every configuration that ran more than once."""
        return noise_of(self._state)

    def compare(self, candidate: Candidate, other: Candidate) -> Comparison:
        """The first against the second; both must have runs."""
        ideal_s = self._state.plan.setting.ideal_s
        return compare(self.times(candidate), self.times(other), ideal_s, self.noise)

    def parity(self, candidate: Candidate) -> Parity:
        """Whether a candidate's loss curve agrees with the baseline's."""
        plan = self._state.plan
        baseline, changes = plan.baseline, numeric_changes(candidate, plan.baseline)
        if candidate == baseline:
            return Parity(verdict="agree", why="it is the baseline")
        if not same_samples(candidate, baseline, plan.job.recipe.data):
            why = 'its steps hold other samples than the baseline\'s; recipe.data = "synthetic" makes them the same'
            return Parity(verdict="untested", why=why, numeric_changes=changes)
        starts: list[str | None] = [trial["weights"] for trial in self._state.measured if trial.get("weights")]
        if same_start(candidate, baseline):
            starts.insert(0, None)
        for weights in reversed(list(dict.fromkeys(starts))):
            own, theirs = self._curves(candidate, weights), self._curves(baseline, weights)
            if own and theirs:
                return compare_curves(own[-1], theirs, plan.setting.precision, changes)
        why = "no run of both began with the same weights"
        return Parity(verdict="untested", why=why, numeric_changes=changes)

    def _curves(self, candidate: Candidate, weights: str | None) -> list[list[float]]:
        """Loss curves of every measured run of a candidate that began with these weights (None: from scratch), traced
        steps left out."""
        found = []
        for trial in self._state.measured:
            if Candidate.from_json(trial["candidate"]) == candidate and trial.get("weights") == weights:
                curve = _losses(self._facts(trial))
                if curve:
                    found.append(curve)
        return found

    def _facts(self, trial: dict[str, Any]) -> Records:
        if trial["number"] not in self._read:
            world = self._state.plan.setting.num_devices
            self._read[trial["number"]] = read_records(self._state.folder.trial(trial["number"]), world)
        return self._read[trial["number"]]


def _losses(records: Records) -> list[float]:
    """Loss of each step before the trace, from the first rank that knows it."""
    for _, steps in sorted(records.steps.items()):
        known = [step["loss"] for step in steps if step["phase"] != "trace" and step.get("loss") is not None]
        if known:
            return known
    return []
