"""Prices: memory, communication and step time of every candidate of a pool, with intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pruning.accounts.account import Account
from pruning.accounts.account import find_account
from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from pruning.ledger.layout import Layout
from pruning.ledger.layout import layout_of
from pruning.ledger.layout import Links
from pruning.ledger.layout import Ranks
from pruning.ledger.layout import ranks_of
from pruning.ledger.layout import total
from pruning.ledger.memory import memory_of
from pruning.ledger.pipeline import Flow
from pruning.ledger.pipeline import flow_of
from pruning.ledger.step_time import step_parts
from search_space.pool import Pool
from search_space.setting import Setting


PARTS = (
    "bubble",
    "exposed_communication",
    "recompute",
    "data_wait",
    "kernel_efficiency",
    "cpu_launch",
    "straggler",
)
"""The seven losses, in the order they are shown."""

Z90 = 1.6449
"""Half-width of a 90% interval in standard deviations."""

CHUNK = 1 << 14
"""Candidates times pipeline ranks priced at once, so that working arrays stay in the cache."""


@dataclass(frozen=True)
class Prices:
    """What every candidate needs and takes. Arrays have shape (n,): seconds and bytes."""

    ideal_s: np.ndarray
    """Model FLOP / (devices × nominal peak)."""

    parts_s: dict[str, np.ndarray]
    """The seven losses by name; ideal plus parts is the step time."""

    step_time_s: np.ndarray
    """Predicted step time (median)."""

    step_time_low_s: np.ndarray
    """Lower end of its 90% interval."""

    step_time_high_s: np.ndarray
    """Upper end of its 90% interval."""

    memory_bytes: np.ndarray
    """Device memory of the worst rank: reserved by the allocator, context, libraries, communicators."""

    reserved_bytes: np.ndarray
    """The part of it that the caching allocator reserves (all of it on CPU slots)."""

    memory_low_bytes: np.ndarray
    """Lower end of its 90% interval."""

    memory_high_bytes: np.ndarray
    """Upper end of its 90% interval."""

    memory_by_rank_bytes: np.ndarray
    """Device memory by pipeline rank, shape (n, ranks); NaN where there is no such rank."""

    log_sigma: np.ndarray
    """Standard deviation of the logarithm of the step time."""

    def __len__(self) -> int:
        return len(self.step_time_s)

    @property
    def mfu_pct(self) -> np.ndarray:
        """Model FLOP utilisation, percent."""
        return 100.0 * self.ideal_s / self.step_time_s


def price(
    pool: Pool,
    setting: Setting,
    coefficients: Coefficients | None = None,
    account: Account | None = None,
    links: Links | None = None,
) -> Prices:
    """Price every candidate of a pool.

    Args:
        pool: the candidates; refused ones get numbers too, which mean little.
        setting: what is fixed for all of them.
        coefficients: calibrated coefficients; absent: the shipped priors for this kind of device.
        account: the framework's habits; absent: those of the setting's framework.
        links: measured bandwidths of each candidate's own nodes; absent: the hardware's.
    """
    prepared = prepare(pool, setting, account or find_account(setting.framework), links)
    return price_prepared(prepared, coefficients or prior(setting))


@dataclass(frozen=True)
class Prepared:
    """What of a pool's prices does not depend on coefficients."""

    size: int
    """Candidates."""

    width: int
    """Most pipeline ranks of any."""

    account: Account
    """The framework's habits."""

    pieces: list[tuple[np.ndarray, Layout, Ranks, Flow]]
    """Positions of the candidates priced together, with their degrees, ranks and pipeline."""


def prepare(pool: Pool, setting: Setting, account: Account, links: Links | None = None) -> Prepared:
    """Degrees, ranks and simulated pipelines of a pool, in pieces that fit the cache.

    Candidates with as many pipeline ranks go together, so that arrays by rank are no wider than needed.
    """
    n, pp = len(pool), pool["pipeline_parallel"]
    width = int(pp.max(initial=1))
    if n * width <= CHUNK:
        parts = [np.arange(n)]
    else:
        parts = []
        for size in np.unique(pp):
            mine, rows = np.flatnonzero(pp == size), max(256, CHUNK // int(size))
            parts += [mine[start : start + rows] for start in range(0, len(mine), rows)]
    pieces = []
    for index in parts:
        own = None if links is None else (links[0][index], links[1][index])
        layout = layout_of(pool.take(index), setting, own)
        ranks = ranks_of(layout, account.balances_head)
        pieces.append((index, layout, ranks, flow_of(layout, ranks)))
    return Prepared(n, width, account, pieces)


def price_prepared(prepared: Prepared, coefficients: Coefficients) -> Prices:
    """Prices of a prepared pool under some coefficients."""
    out = _empty(prepared.size, prepared.width)
    for index, layout, ranks, flow in prepared.pieces:
        _fill(out, index, _price_piece(layout, ranks, flow, prepared.account, coefficients))
    return out


def _empty(n: int, width: int) -> Prices:
    names = [name for name in Prices.__dataclass_fields__ if name not in ("parts_s", "memory_by_rank_bytes")]
    by_rank = np.full((n, width), np.nan)
    parts = {name: np.zeros(n) for name in PARTS}
    return Prices(parts_s=parts, memory_by_rank_bytes=by_rank, **{name: np.zeros(n) for name in names})


def _fill(out: Prices, index: np.ndarray, chunk: Prices) -> None:
    for name in Prices.__dataclass_fields__:
        if name == "parts_s":
            for part, seconds in chunk.parts_s.items():
                out.parts_s[part][index] = seconds
        elif name == "memory_by_rank_bytes":
            out.memory_by_rank_bytes[index, : chunk.memory_by_rank_bytes.shape[1]] = chunk.memory_by_rank_bytes
        else:
            getattr(out, name)[index] = getattr(chunk, name)


def _price_piece(
    layout: Layout, ranks: Ranks, flow: Flow, account: Account, coefficients: Coefficients
) -> Prices:
    memory = memory_of(layout, ranks, flow, account, coefficients)
    by_rank = memory.device
    worst = by_rank.max(axis=1, initial=0.0)
    reserved = memory.reserved.max(axis=1, initial=0.0)
    activations = memory.activations
    outside = np.maximum(worst, 1.0)
    memory_sigma = (
        np.sqrt(
            (coefficients.sigma("activation_factor") * activations) ** 2
            + (coefficients.sigma("fixed_bytes") * coefficients.value("fixed_bytes")) ** 2
            + (coefficients.sigma("reserved_factor") * reserved) ** 2
        )
        / outside
    )
    time = step_parts(layout, ranks, flow, account, coefficients)
    ideal = np.full(len(layout), layout.setting.ideal_s)
    step = ideal + total(time.parts.values())
    sigma = np.sqrt(time.variance + coefficients.value("model_error") ** 2)
    spread = np.exp(Z90 * sigma)
    memory_spread = np.exp(Z90 * memory_sigma)
    return Prices(
        ideal_s=ideal,
        parts_s=time.parts,
        step_time_s=step,
        step_time_low_s=step / spread,
        step_time_high_s=step * spread,
        memory_bytes=worst,
        reserved_bytes=reserved,
        memory_low_bytes=worst / memory_spread,
        memory_high_bytes=worst * memory_spread,
        memory_by_rank_bytes=np.where(ranks.exists, by_rank, np.nan),
        log_sigma=sigma,
    )
