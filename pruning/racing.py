"""Racing: may a running trial stop, because it cannot be the winner any more or because it knows enough?

Pure functions over the step times seen so far; they may be asked after every step, and their error rates hold over
all the asking together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import binom
from scipy.stats import rankdata


SLACK = 0.01
"""A trial within this share of the incumbent's upper end is never stopped: two runs of one configuration differ by
about as much, and no number of steps of one run can tell."""

BETS = (0.6, 1.2, 1.8)
"""Stakes of the betting test, 0 to 2; the capital is spread evenly over them."""

FEWEST = 8
"""Steps below which nothing is decided."""

LEAST_BLOCK = 3
"""Steps of the shortest block."""

SAFETY = 1.5
"""Factor on the estimated correlation time of steps."""

LOOK_GROWTH = 1.5
"""Ratio of the step counts at which tightness is looked at."""

FIRST_LOOK = 20
"""Steps at the first of those looks."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How a running trial stands."""

    lost: bool
    """Whether it cannot be the winner, at the asked confidence."""

    tight: bool
    """Whether its interval is as tight as asked."""

    steps: int
    """Steps looked at."""

    median_s: float
    """Median of them, seconds."""

    evidence: float
    """Capital of the bet against the trial; it is lost at 1 / (1 - confidence)."""


def stand(
    times: np.ndarray, incumbent_high_s: float | None, confidence: float = 0.95, tight_pct: float = 0.0
) -> Standing:
    """Where a trial stands after some steady steps.

    Args:
        times: step times after warm-up and recompiles, seconds, shape (n,).
        incumbent_high_s: upper end of the best step time's interval; None: there is no incumbent.
        confidence: that a trial which could win is not stopped, over all looks; 1 never stops one.
        tight_pct: half-width of the median's interval at which it is tight enough, percent; 0 never.
    """
    median = float(np.median(times)) if len(times) else float("nan")
    evidence = 0.0
    lost = tight = False
    if len(times) >= FEWEST:
        if incumbent_high_s is not None and confidence < 1:
            evidence = capital(times, incumbent_high_s * (1 + SLACK))
            lost = evidence >= 1 / (1 - confidence)
        tight = tight_pct > 0 and _is_tight(times, confidence, tight_pct)
    return Standing(lost=lost, tight=tight and not lost, steps=len(times), median_s=median, evidence=evidence)


def capital(times: np.ndarray, bound_s: float) -> float:
    """Capital of a gambler who bets that the median step is above ``bound_s``, starting from 1.

    Steps are cut into blocks longer than their correlation, and each block's median is a coin: above the bound or not.
    If the trial's median is not above the bound, heads has a chance of at most one half whatever came before, the
    capital is a supermartingale, and it ever reaches 1/α with a chance of at most α (Ville's inequality; the betting
    form follows Waudby-Smith & Ramdas 2024, "Estimating means of bounded random variables by betting"). So it may be
    looked at after every step. The block length is estimated from the same steps, on the safe side: that part is
    approximate, and checked by simulation with correlated noise.
    """
    length = block_length(times)
    count = len(times) // length
    if not count:
        return 1.0
    blocks = np.median(times[: count * length].reshape(count, length), axis=1)
    heads = np.where(blocks > bound_s, 0.5, -0.5)
    return float(np.mean([np.prod(1 + stake * heads) for stake in BETS]))


def block_length(times: np.ndarray) -> int:
    """Steps after which step times have forgotten each other, at least :data:`LEAST_BLOCK`.

    Integrated autocorrelation time (1 + φ) / (1 - φ) of a first-order process, with φ at the upper end of its one-sided
    95% interval after the small-sample correction of Kendall (1954), from ranks so that single spikes do not hide it.
    """
    n = len(times)
    ranks = rankdata(times) - (n + 1) / 2
    square = float(ranks @ ranks)
    found = float(ranks[1:] @ ranks[:-1]) / square if square else 0.0
    found += (1 + 3 * max(found, 0.0)) / n
    upper = min(0.97, max(0.0, found + 1.64 * np.sqrt(max(1 - found**2, 0.02) / n)))
    return max(LEAST_BLOCK, int(np.ceil(SAFETY * (1 + upper) / (1 - upper))))


def looks(most: int = 100_000) -> list[int]:
    """Step counts at which tightness is looked at."""
    found = [FIRST_LOOK]
    while found[-1] < most:
        found.append(int(np.ceil(found[-1] * LOOK_GROWTH)))
    return found


def _is_tight(times: np.ndarray, confidence: float, tight_pct: float) -> bool:
    """Whether at the last look the median's interval was within the asked width.

    Order-statistic interval of the median over block medians; look k spends (1 - confidence) / (k (k + 1)), which sums
    to 1 - confidence.
    """
    done = [count for count in looks(len(times)) if count <= len(times)]
    if not done:
        return False
    seen = times[: done[-1]]
    length = block_length(seen)
    count = len(seen) // length
    blocks = np.sort(np.median(seen[: count * length].reshape(count, length), axis=1))
    spend = (1 - confidence) / (len(done) * (len(done) + 1)) if confidence < 1 else 1e-6
    low = int(binom.ppf(spend / 2, count, 0.5))
    if low < 1:
        return False
    half = (blocks[count - low] - blocks[low - 1]) / 2
    return bool(100 * half <= tight_pct * np.median(seen))
