"""The replay run: every strategy on every group of some tables."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search_space.errors import UserError
from tuner.replay.figures import GroupResult
from tuner.replay.figures import overall
from tuner.replay.play import Costs
from tuner.replay.play import play
from tuner.replay.play import PLENTY
from tuner.replay.table import read_clusters
from tuner.replay.table import TableCluster


STRATEGIES = ("ours", "ledger", "tpe", "gp", "random")
"""Names that may be asked for."""

DRAWS = ("tpe", "gp", "random")
"""Strategies with chance in them; of the others one replay stands for every seed."""


def replay(
    paths: Sequence[str | Path],
    strategies: Sequence[str],
    seeds: int,
    costs: Costs,
    least: int = 8,
    budget_device_s: float = PLENTY,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Any], dict[str, list[GroupResult]]]:
    """Replay strategies on every group of some tables.

    Args:
        paths: CSV files under the common header.
        strategies: names out of :data:`STRATEGIES`.
        seeds: replays of each strategy that draws at random.
        costs: what trials cost.
        least: measured configurations from which a group takes part.
        budget_device_s: device-seconds that each replay may spend.
        tell: called with each finished group in words.

    Returns:
        The document of ``tune replay``, and the replays behind it by strategy.

    Raises:
        UserError: an unknown strategy, no seed, an unreadable table, or no group large enough.
    """
    unknown = [name for name in strategies if name not in STRATEGIES]
    if unknown:
        raise UserError(f"--strategy: found {', '.join(unknown)}, needs some of {', '.join(STRATEGIES)}")
    if seeds < 1:
        raise UserError(f"--seeds: found {seeds}, needs at least 1")
    tell("fitting coefficients for each group on other groups …")
    clusters = read_clusters(paths, least)
    results: dict[str, list[GroupResult]] = {}
    for name in dict.fromkeys([*strategies, "random"]):
        results[name] = [_of_group(cluster, name, seeds, costs, budget_device_s, tell) for cluster in clusters]
    document = {
        "costs": {"startup_s": costs.startup_s, "steps": costs.steps, "oom_s": costs.oom_s},
        "seeds": seeds,
        "strategies": {
            name: {
                "groups": [result.to_json() for result in results[name]],
                "overall": overall(results[name], results["random"]),
                "tables": {
                    table: overall(
                        [r for r in results[name] if r.cluster.table == table],
                        [r for r in results["random"] if r.cluster.table == table],
                    )
                    for table in dict.fromkeys(cluster.table for cluster in clusters)
                },
            }
            for name in strategies
        },
    }
    return document, {name: results[name] for name in strategies}


def _of_group(
    cluster: TableCluster, name: str, seeds: int, costs: Costs, budget_device_s: float, tell: Callable[[str], None]
) -> GroupResult:
    enough = float(cluster.truth().min()) * 1.01
    drawn = range(seeds) if name in DRAWS else range(1)
    plays = tuple(play(cluster, name, seed, costs, budget_device_s, enough=enough) for seed in drawn)
    result = GroupResult(cluster, plays if name in DRAWS else plays * seeds, costs)
    told = result.to_json()
    tell(f"{name}: {cluster.model} on {cluster.gpus}: {told['trials_to_1pct'] or 'never'} trials to within 1%")
    return result
