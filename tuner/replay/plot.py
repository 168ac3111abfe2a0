"""Regret against cost as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tuner.figures import save_figure
from tuner.replay.figures import GroupResult


def curves(results: Sequence[GroupResult], ratios: np.ndarray) -> np.ndarray:
    """Regret in percent after so many times the oracle's cost, every replay of every group; shape (replays, ratios).

    Before anything is measured the regret is infinite.
    """
    rows = []
    for result in results:
        for play in result.plays:
            best = np.minimum.accumulate(play.step_time_s)
            done = np.searchsorted(play.device_s, ratios * result.oracle_device_s * (1 + 1e-9), side="right")
            reached = np.concatenate([[np.inf], best])[done]
            rows.append(100 * (reached / result.best_s - 1))
    return np.array(rows)


def plot(results: Mapping[str, Sequence[GroupResult]], path: Path) -> None:
    """Draw the median regret of each strategy, and the middle half of its replays, against cost.

    Raises:
        UserError: the picture cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ratios = np.geomspace(0.05, 40, 120)
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for name, groups in results.items():
        found = np.minimum(curves(groups, ratios), 1e4)
        low, middle, high = np.quantile(found, (0.25, 0.5, 0.75), axis=0, method="inverted_cdf")
        (line,) = axes.plot(ratios, middle, label=name)
        axes.fill_between(ratios, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0, 300)
    axes.set_xlabel("device-seconds spent / device-seconds of measuring the best first")
    axes.set_ylabel("regret of the best measured step time, %")
    axes.legend(title=f"{len(next(iter(results.values())))} groups, median and middle half")
    save_figure(figure, path)
