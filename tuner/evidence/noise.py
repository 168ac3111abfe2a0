"""The noise floor: how much two runs of one configuration differ on the same devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t


PRIOR_SD = {"gpu": 0.005, "cpu": 0.02}
"""Standard deviation of the log median step time between runs, before any run was repeated, by kind of device."""

PRIOR_DOF = 2.0
"""Repeats that the prior counts for: few, so that a noisier machine shows in two or three."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Run-to-run noise of the log median step time."""

    sd: float
    """Standard deviation, natural-log units (0.01 is about 1%)."""

    dof: float
    """Degrees of freedom behind it, the prior's counted."""

    repeats: int
    """Runs beyond the first of their configuration that it rests on; 0: the prior alone."""

    @property
    def floor_pct(self) -> float:
        """Difference of two single runs that 95% of repeats stay within, percent."""
        return float(100 * np.expm1(t.ppf(0.975, self.dof) * self.sd * np.sqrt(2)))

    @property
    def apart_pct(self) -> float:
        """The same for two runs in different hours, percent: the hours are taken to differ by as much as two runs do.

        A study sees one hour, so nothing better is known. On a shared CPU machine the medians of 20 sessions within ten
        minutes had 0.6 times the standard deviation of the runs inside them, and an hour's distance added 2%.
        """
        return float(100 * np.expm1(np.sqrt(2) * np.log1p(self.floor_pct / 100)))

    def draws(self, runs: int, rng: np.random.Generator, size: int) -> np.ndarray:
        """Errors of the mean of ``runs`` log medians, shape (size,): Student's t, scaled."""
        return self.sd / np.sqrt(runs) * rng.standard_t(self.dof, size)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Noise:
        """The inverse of :meth:`to_json`."""
        return cls(sd=values["sd"], dof=values["dof"], repeats=values["repeats"])

    def to_json(self) -> dict[str, Any]:
        """Every field, and the floor in percent."""
        return asdict(self) | {"floor_pct": self.floor_pct}


def estimate(medians: Sequence[Sequence[float]], device: str) -> Noise:
    """Noise from repeated runs: the pooled variance of log medians within configurations, with a weak prior.

    The prior is a scaled inverse χ² with :data:`PRIOR_DOF` degrees of freedom (Gelman et al., Bayesian Data Analysis,
    3rd ed., section 2.6), so the errors of a mean follow Student's t.

    Args:
        medians: median step times of the runs of each configuration, seconds; configurations that ran once say nothing.
        device: ``gpu`` or ``cpu``.
    """
    return pooled(Noise(sd=PRIOR_SD[device], dof=PRIOR_DOF, repeats=0), medians)


def pooled(known: Noise, medians: Sequence[Sequence[float]]) -> Noise:
    """What is known of the noise with more repeated runs taken in.

    Args:
        known: the noise so far.
        medians: as in :func:`estimate`.
    """
    squares, repeats = 0.0, 0
    for runs in medians:
        logs = np.log(np.asarray(runs, dtype=float))
        if len(logs) > 1:
            squares += float(((logs - logs.mean()) ** 2).sum())
            repeats += len(logs) - 1
    dof = known.dof + repeats
    variance = (known.dof * known.sd**2 + squares) / dof
    return Noise(sd=float(np.sqrt(variance)), dof=dof, repeats=known.repeats + repeats)


def net_of_rounds(cells: Sequence[tuple[str, int, float]], device: str) -> Noise:
    """Noise from repeated runs, net of what all configurations of a round share: the hour, a busy neighbour.

    Log medians are fitted by a level for each configuration and one for each round (two-way analysis of variance); what
    is left is noise. Degrees of freedom are cells minus the rank of that fit, so a configuration that ran once, or a
    round of one repeated configuration alone, says nothing.

    Args:
        cells: configuration, round and median step time (seconds) of each run.
        device: ``gpu`` or ``cpu``.
    """
    prior = Noise(sd=PRIOR_SD[device], dof=PRIOR_DOF, repeats=0)
    if not cells:
        return prior
    names = sorted({name for name, _, _ in cells})
    rounds = sorted({number for _, number, _ in cells})
    design = np.zeros((len(cells), len(names) + len(rounds)))
    for row, (name, number, _) in enumerate(cells):
        design[row, names.index(name)] = design[row, len(names) + rounds.index(number)] = 1
    logs = np.log([seconds for _, _, seconds in cells])
    fit, _, rank, _ = np.linalg.lstsq(design, logs, rcond=None)
    repeats = len(cells) - int(rank)
    squares = float(((logs - design @ fit) ** 2).sum()) if repeats else 0.0
    dof = prior.dof + repeats
    return Noise(sd=float(np.sqrt((prior.dof * prior.sd**2 + squares) / dof)), dof=dof, repeats=repeats)
