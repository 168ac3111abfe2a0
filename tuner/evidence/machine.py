"""Has the machine changed between two measurements? The control that their trials ran says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t

from tuner.evidence.noise import estimate


PRIOR_TAIL = 2.0
"""Degrees of freedom of what hours differ by: heavy tails."""

SAME_SOFTWARE = ("python", "torch")
"""Packages whose versions the control itself depends on: under others a slower control may be the software's."""


@dataclass(frozen=True, kw_only=True)
class Control:
    """What the control said beside the runs of one configuration; see :mod:`trial_runner.control`."""

    work: str = ""
    """Name of the work; times compare only under one name. Empty: there was none."""

    runs_s: tuple[float, ...] = ()
    """Time of a round beside each run, seconds."""

    @classmethod
    def of(cls, trials: Sequence[dict[str, object]]) -> Control:
        """From trial records; empty unless all of them have a control, and the same."""
        names = {str(trial.get("control", "")) for trial in trials}
        if len(names) != 1 or names == {""}:
            return cls()
        return cls(work=names.pop(), runs_s=tuple(float(trial["control_s"]) for trial in trials))  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class MachineChange:
    """How much slower the machine is now, natural-log units."""

    change: float
    """Mean log time of the control's rounds now less that of the claim's runs; positive is slower."""

    sd: float
    """Standard deviation of the log time between runs."""

    dof: float
    """Degrees of freedom behind it."""

    runs: tuple[int, int]
    """Runs behind the claim's and today's level."""

    @property
    def error(self) -> float:
        """Scale of the error of :attr:`change`."""
        return float(self.sd * np.sqrt(sum(1 / runs for runs in self.runs)))

    def draws(self, usual: float, rng: np.random.Generator, size: int) -> np.ndarray:
        """Draws of how much slower the machine is, natural-log units, shape (size,).

        Hours seldom differ by much, and sometimes by a lot: before the control is looked at, the change is Student's t
        with :data:`PRIOR_TAIL` degrees of freedom, as wide as ``usual``. The control's error is Student's t too. So
        small differences of the control, mostly its own noise, excuse little, and large ones nearly all they show.

        Args:
            usual: what hours usually differ by, standard deviation of the log step time.
            rng: dice.
            size: draws.
        """
        reach = 8 * max(usual, self.error) + 1.5 * abs(self.change)
        grid = np.linspace(-reach, reach, 4001)
        weight = t.pdf(grid / usual, PRIOR_TAIL) * t.pdf((grid - self.change) / self.error, self.dof)
        return np.asarray(rng.choice(grid, size, p=weight / weight.sum()))

    def interval_pct(self) -> tuple[float, float]:
        """95% interval of the control's change, percent: what it shows by itself."""
        half = t.ppf(0.975, self.dof) * self.error
        return float(100 * np.expm1(self.change - half)), float(100 * np.expm1(self.change + half))

    @property
    def pct(self) -> float:
        """The change, percent."""
        return float(100 * np.expm1(self.change))


def machine_change(then: Control, now: Control, device: str) -> MachineChange | None:
    """The machine now against the machine of a claim; None where a control is missing or was other work.

    Args:
        then: beside the claim's runs.
        now: beside today's.
        device: ``gpu`` or ``cpu``, for the prior of the noise.
    """
    if not then.runs_s or not now.runs_s or then.work != now.work:
        return None
    noise = estimate([then.runs_s, now.runs_s], device)
    level = [float(np.mean(np.log(control.runs_s))) for control in (then, now)]
    return MachineChange(
        change=level[1] - level[0], sd=noise.sd, dof=noise.dof, runs=(len(then.runs_s), len(now.runs_s))
    )
