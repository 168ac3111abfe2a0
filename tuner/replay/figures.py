"""Figures of replays: what each strategy paid until it was near the best, by group and over all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tuner.replay.play import Costs
from tuner.replay.play import Played
from tuner.replay.table import TableCluster


NEAR = {"1pct": 1.01, "5pct": 1.05}
"""How near a step time is to the group's best, by name."""

LOOKS = (1, 3, 5, 10)
"""Trials after which the regret is reported."""


@dataclass(frozen=True)
class GroupResult:
    """One strategy on one group, over its seeds; never reaching counts as infinite. Arrays have shape (seeds,)."""

    cluster: TableCluster
    plays: tuple[Played, ...]
    costs: Costs

    @property
    def best_s(self) -> float:
        """The group's best step time."""
        return float(self.cluster.truth().min())

    @property
    def oracle_device_s(self) -> float:
        """What measuring the best first costs."""
        return self.cluster.gpus * (self.costs.startup_s + self.costs.steps * self.best_s)

    def trials_to(self, near: str) -> np.ndarray:
        """Trials until the measured best is that near."""
        return np.array([_first(play, NEAR[near] * self.best_s) for play in self.plays])

    def device_s_to(self, near: str) -> np.ndarray:
        """Device-seconds until then."""
        counts = self.trials_to(near)
        return np.array([play.device_s[int(k) - 1] if k < np.inf else np.inf for play, k in zip(self.plays, counts)])

    def regret_pct_after(self, trials: int) -> np.ndarray:
        """How much slower than the group's best the best of the first trials is, percent; a shorter replay ends so."""
        best = [play.step_time_s[:trials].min() if len(play.step_time_s) else np.inf for play in self.plays]
        return np.asarray(100 * (np.array(best) / self.best_s - 1))

    def oom_paid(self) -> np.ndarray:
        """Trials that ran out of memory before the best was within 1%."""
        counts = self.trials_to("1pct")
        return np.array([int(play.oom[: int(min(k, len(play.oom)))].sum()) for play, k in zip(self.plays, counts)])

    def to_json(self) -> dict[str, Any]:
        """The keys of the command-line contract; medians over seeds, ``…_p10_p90`` the spread."""
        cluster = self.cluster
        found: dict[str, Any] = {
            "table": cluster.table,
            "model": cluster.model,
            "gpus": cluster.gpus,
            "seq_len": cluster.seq_len,
            "global_batch_seqs": cluster.global_batch_seqs,
            "n": cluster.measured,
            "pool": len(cluster.pool),
            "left_out": cluster.left_out,
            "best_step_time_s": self.best_s,
            "oracle_device_s": self.oracle_device_s,
        }
        for near in NEAR:
            for name, values in (("device_s", self.device_s_to(near)), ("trials", self.trials_to(near))):
                found[f"{name}_to_{near}"] = finite(np.median(values))
                found[f"{name}_to_{near}_p10_p90"] = spread(values)
        found["regret_pct_after"] = {str(k): finite(np.median(self.regret_pct_after(k))) for k in LOOKS}
        found["oom_paid"] = finite(np.median(self.oom_paid()))
        found["oom_paid_max"] = int(self.oom_paid().max())
        return found


def _first(play: Played, target_s: float) -> float:
    hits = np.flatnonzero(play.step_time_s <= target_s)
    return float(hits[0] + 1) if len(hits) else np.inf


def overall(results: Sequence[GroupResult], random: Sequence[GroupResult]) -> dict[str, Any]:
    """Figures over all groups.

    Args:
        results: one strategy's groups.
        random: the same groups under ``random``, as the yardstick.
    """
    cost = np.array([np.median(result.device_s_to("1pct")) for result in results])
    oracle = np.array([result.oracle_device_s for result in results])
    chance = np.array([np.median(result.device_s_to("1pct")) for result in random])
    every = np.concatenate([result.trials_to("1pct") for result in results])
    with np.errstate(invalid="ignore"):
        ratios = cost / oracle
        by_random = cost / chance
    paid = np.concatenate([result.oom_paid() for result in results])
    return {
        "groups": len(results),
        "median_device_s_ratio_to_random": finite(np.median(by_random)),
        "median_device_s_ratio_to_oracle": finite(np.median(ratios)),
        "worst_device_s_ratio_to_oracle": finite(ratios.max()),
        "median_trials_to_1pct": finite(np.median([np.median(result.trials_to("1pct")) for result in results])),
        "p90_trials_to_1pct": finite(np.quantile(every, 0.9, method="inverted_cdf")),
        "unreached_pct": float(100 * np.mean(np.isinf(every))),
        "median_regret_after_3_pct": finite(np.median([np.median(r.regret_pct_after(3)) for r in results])),
        "median_oom_paid": finite(np.median(paid)),
        "most_oom_paid": int(paid.max()),
    }


def finite(value: Any) -> float | None:
    """The number, or None where it is infinite or none."""
    return float(value) if np.isfinite(value) else None


def spread(values: np.ndarray) -> list[float | None]:
    """10th and 90th percentile over seeds."""
    return [finite(np.quantile(values, share, method="inverted_cdf")) for share in (0.1, 0.9)]
