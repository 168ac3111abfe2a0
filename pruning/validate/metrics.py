"""Figures that say how well a planner ranks and predicts."""

from __future__ import annotations

import numpy as np


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0, ties sharing their mean, shape (n,)."""
    order = np.argsort(values, kind="stable")
    places = np.empty(len(values))
    places[order] = np.arange(len(values))
    for value in np.unique(values):
        same = values == value
        places[same] = places[same].mean()
    return places


def spearman(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Rank correlation; NaN with fewer than two distinct values on a side."""
    a, b = ranks(predicted), ranks(measured)
    if a.std() == 0 or b.std() == 0:
        return float("nan")
    return float(np.corrcoef(a, b)[0, 1])


def regret_pct(predicted: np.ndarray, measured: np.ndarray, first: int) -> float:
    """How much slower the best of the ``first`` predicted fastest is than the best of all, in percent."""
    chosen = measured[np.argsort(predicted, kind="stable")[:first]]
    return float(100 * (chosen.min() / measured.min() - 1))


def mean_error_pct(predicted: np.ndarray, measured: np.ndarray) -> float:
    """Mean absolute relative error, percent; NaN when empty."""
    if not len(measured):
        return float("nan")
    return float(100 * np.mean(np.abs(predicted / measured - 1)))


def median(values: list[float]) -> float | None:
    """Median of the numbers that are not NaN; None when there are none."""
    kept = [value for value in values if not np.isnan(value)]
    return float(np.median(kept)) if kept else None


def percentile(values: list[float], share: float) -> float | None:
    """Percentile of the numbers that are not NaN; None when there are none."""
    kept = [value for value in values if not np.isnan(value)]
    return float(np.percentile(kept, share)) if kept else None
