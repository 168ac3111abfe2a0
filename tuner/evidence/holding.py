"""Does a claim hold: new runs of a committed configuration against what was claimed for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.evidence.claim import Side
from tuner.evidence.compare import RESAMPLES
from tuner.evidence.compare import spread
from tuner.evidence.machine import MachineChange
from tuner.evidence.noise import Noise
from tuner.evidence.noise import pooled


HOLDS, REGRESSED, CANNOT_TELL = "hold", "regressed", "cannot_tell"
"""Verdicts."""

EXIT_CODES = {HOLDS: 0, REGRESSED: 4, CANNOT_TELL: 5}
"""Exit codes of the verdicts."""


@dataclass(frozen=True, kw_only=True)
class Holding:
    """Whether a claim holds."""

    verdict: str
    """:data:`HOLDS`, :data:`REGRESSED` or :data:`CANNOT_TELL`."""

    step_time_s: float
    """Step time now, seconds."""

    claimed_step_time_s: float
    """Step time claimed, seconds."""

    change_pct: float
    """Now against the claim, percent; positive is slower."""

    change_ci_pct: tuple[float, float]
    """95% interval of the same."""

    noise_floor_pct: float
    """Difference of two single runs that is noise, percent."""

    apart_pct: float
    """The same for runs in different hours: what unchanged code may differ by from its claim, percent."""

    runs: int
    """New runs."""

    machine_change_pct: float | None
    """Control now against the control beside the claim, percent; positive is a slower machine; None: not known."""

    machine_change_ci_pct: tuple[float, float] | None
    """95% interval of the same."""

    net_change_pct: float
    """The change less what a slower machine explains, percent: what is judged."""

    net_change_ci_pct: tuple[float, float]
    """95% interval of the same."""

    why: str
    """The verdict in words."""

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)


def holding(
    claimed: Side, claimed_noise: Noise, runs: Sequence[np.ndarray], machine: MachineChange | None = None
) -> Holding:
    """The stated test.

    What is judged is the change less what a slower machine explains: a control that is slower by as much excuses it. A
    faster machine excuses nothing, so a claim never fails for a step time that it allows.

    The claim holds when that is surely (upper end of the 95% interval) not above what two runs in different hours
    differ by; it has regressed when it is surely (lower end) above half the noise floor; else nobody can tell yet. Half
    the floor, not zero: a test that is run every day must not cry for one chance difference in forty.

    Args:
        claimed: the configuration as it was claimed.
        claimed_noise: run-to-run noise then.
        runs: steady step times of each new run, seconds; at least one.
        machine: how the machine changed; None: not known.
    """
    medians = [float(np.median(run)) for run in runs]
    noise = pooled(claimed_noise, [medians])
    rng = np.random.default_rng(0)
    level = float(np.mean(np.log(medians)))
    error = spread(runs, noise, rng) - noise.draws(len(claimed.run_medians_s), rng, RESAMPLES)
    change = level - float(np.log(claimed.step_time_s))
    excuse = np.zeros(1) if machine is None else np.maximum(0.0, machine.draws(noise.sd, rng, RESAMPLES))
    net = change + error - excuse
    low, high = (float(value) for value in np.quantile(net, [0.025, 0.975]))
    floor, apart = (float(np.log1p(value / 100)) for value in (noise.floor_pct, noise.apart_pct))
    verdict = REGRESSED if low > floor / 2 else HOLDS if high < apart else CANNOT_TELL
    percent = [float(100 * np.expm1(change + q)) for q in (0.0, *np.quantile(error, [0.025, 0.975]))]
    net_percent = [float(100 * np.expm1(value)) for value in (change - excuse.mean(), low, high)]
    words = {
        HOLDS: f"not slower by {noise.apart_pct:.1f}%, what two runs in different hours differ by",
        REGRESSED: f"slower by more than half the noise floor of {noise.floor_pct:.1f}%",
        CANNOT_TELL: f"neither surely below {noise.apart_pct:.1f}%, what two runs in different hours differ by, nor "
        f"surely above half the noise floor of {noise.floor_pct:.1f}%",
    }
    return Holding(
        verdict=verdict,
        step_time_s=float(np.exp(level)),
        claimed_step_time_s=claimed.step_time_s,
        change_pct=percent[0],
        change_ci_pct=(percent[1], percent[2]),
        noise_floor_pct=noise.floor_pct,
        apart_pct=noise.apart_pct,
        runs=len(medians),
        machine_change_pct=None if machine is None else machine.pct,
        machine_change_ci_pct=None if machine is None else machine.interval_pct(),
        net_change_pct=net_percent[0],
        net_change_ci_pct=(net_percent[1], net_percent[2]),
        why=f"step time {_shown(percent)} against the claim{_machine(machine, net_percent)}: {words[verdict]}",
    )


def _shown(percent: Sequence[float]) -> str:
    return f"{percent[0]:+.1f}% [{percent[1]:+.1f}, {percent[2]:+.1f}]"


def _machine(machine: MachineChange | None, net: Sequence[float]) -> str:
    if machine is None:
        return ""
    found = f", the machine's own {_shown([machine.pct, *machine.interval_pct()])}"
    return f"{found}, net {_shown(net)}" if machine.change > 0 else found
