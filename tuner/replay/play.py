"""One replay: a strategy on a table's cluster, through the same asking, admitting and learning as a real study."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from search_space.candidate import Candidate
from search_space.job import MeasureSection
from tuner.budget import Meter
from tuner.replay.table import Answer
from tuner.replay.table import TableCluster
from tuner.study.asking import Asker
from tuner.study.costs import CostModel
from tuner.study.deciding import Decider
from tuner.study.knowledge import Knowledge


PLENTY = 1e15
"""Budget of a replay that none is stated for, device-seconds."""

LEARNS = ("ours",)
"""Strategies whose ledger is calibrated by trials. ``ledger`` keeps its first order, so that what learning adds shows;
the others read no predictions."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What trials cost, seconds of wall time."""

    startup_s: float = 180.0
    """Placement to the end of the first step."""

    steps: int = 100
    """Steps of a trial that runs."""

    oom_s: float = 120.0
    """A trial that runs out of memory."""

    def of(self, answer: Answer) -> float:
        """Wall time of a trial with this answer."""
        return self.oom_s if answer.step_time_s is None else self.startup_s + self.steps * answer.step_time_s


@dataclass(frozen=True, kw_only=True)
class Played:
    """The trials of one replay, in order. Arrays have shape (trials,)."""

    step_time_s: np.ndarray
    """Measured step time; infinite where there is none."""

    device_s: np.ndarray
    """Device-seconds spent after each trial."""

    oom: np.ndarray
    """Whether the trial ran out of memory."""

    labels: list[str]
    """What was asked."""

    ended: str
    """Why it ended."""


def play(
    cluster: TableCluster,
    strategy: str,
    seed: int,
    costs: Costs,
    budget_device_s: float = PLENTY,
    enough: float | None = None,
    least: int = 10,
) -> Played:
    """Run one strategy until budget or pool is at its end.

    Args:
        cluster: the group that answers.
        strategy: name of a sampler strategy.
        seed: seed of the sampler.
        costs: what trials cost.
        budget_device_s: device-seconds that may be spent.
        enough: the referee's word: after a step time this low and ``least`` trials the rest is not worth replaying.
            The strategy never hears of it.
        least: trials that are replayed in any case.
    """
    measure = MeasureSection(steps=costs.steps, warmup_steps=1, trace=False)
    knowledge = Knowledge(
        cluster.pool,
        cluster.setting,
        CostModel("gpu", measure),
        coefficients=cluster.coefficients,
        ledger=cluster.ledger,
        calibrates=strategy in LEARNS,
    )
    asker = Asker(None, "replay", cluster.pool, knowledge.prior, strategy, seed)
    meter = Meter(budget_device_s)
    decider = Decider(asker, knowledge, meter, cluster.gpus)
    times: list[float] = []
    spent: list[float] = []
    ooms: list[bool] = []
    labels: list[str] = []
    ended = "enough"
    while enough is None or len(times) < least or min(times) > enough:
        proposed = decider.propose(meter.limit, idle=True, incumbent_high_s=None)
        if isinstance(proposed, str):
            ended = proposed
            break
        meter.reserve("trial", proposed.allowance_device_s)
        record = answered(cluster, proposed.candidate, costs, proposed.allowance_device_s, len(times))
        meter.settle("trial", record["device_s"])
        decider.learn(record)
        decider.answer(proposed.trial, record)
        times.append(record["step_time_s"] or np.inf)
        spent.append(meter.spent)
        ooms.append((record["failure"] or {}).get("class") == "out_of_memory")
        labels.append(proposed.candidate.label())
    return Played(
        step_time_s=np.array(times),
        device_s=np.array(spent),
        oom=np.array(ooms, dtype=bool),
        labels=labels,
        ended=ended,
    )


def answered(
    cluster: TableCluster, candidate: Candidate, costs: Costs, allowance_device_s: float, number: int
) -> dict[str, Any]:
    """The record of a trial that the table answers; one that outlives its allowance is killed there."""
    answer = cluster.answer(candidate)
    wall = costs.of(answer)
    record: dict[str, Any] = {
        "number": number,
        "candidate": candidate.to_json(),
        "state": "failed",
        "step_time_s": None,
        "step_time_ci_s": None,
        "mfu_pct": None,
        "peak_reserved_gib": None,
        "wall_s": wall,
        "device_s": cluster.gpus * wall,
        "failure": None,
    }
    if cluster.gpus * wall > allowance_device_s:
        failure = {"class": "timeout", "rank": None, "text": "the trial outlived its allowance"}
        return record | {"device_s": allowance_device_s, "failure": failure}
    if answer.step_time_s is None:
        return record | {"failure": {"class": "out_of_memory", "rank": None, "text": "the table says so"}}
    step = answer.step_time_s
    return record | {"state": "measured", "step_time_s": step, "step_time_ci_s": [step, step]}
