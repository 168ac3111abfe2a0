"""Has the machine changed between two measurements? The control that their trials ran says so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tuner.evidence.noise import estimate


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

    def draws(self, rng: np.random.Generator, size: int) -> np.ndarray:
        """Draws of :attr:`change` with its error (Student's t, scaled), shape (size,)."""
        then, now = (self.sd / np.sqrt(runs) * rng.standard_t(self.dof, size) for runs in self.runs)
        return np.asarray(self.change + now - then)

    def interval_pct(self) -> tuple[float, float]:
        """95% interval of the change, percent."""
        low, high = np.quantile(self.draws(np.random.default_rng(0), 4000), [0.025, 0.975])
        return float(100 * np.expm1(low)), float(100 * np.expm1(high))

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
