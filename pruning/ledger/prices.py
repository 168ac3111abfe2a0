"""Prices: memory, communication and step time of every candidate of a pool, with intervals."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pruning.accounts.account import find_account
from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from pruning.ledger.layout import layout_of
from pruning.ledger.layout import ranks_of
from pruning.ledger.layout import total
from pruning.ledger.memory import memory_terms
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

CHUNK = 1 << 16
"""Candidates priced at once, so that working arrays stay small."""


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
    """Reserved memory of the worst rank."""

    memory_low_bytes: np.ndarray
    """Lower end of its 90% interval."""

    memory_high_bytes: np.ndarray
    """Upper end of its 90% interval."""

    memory_by_rank_bytes: np.ndarray
    """Reserved memory by pipeline rank, shape (n, ranks); NaN where there is no such rank."""

    log_sigma: np.ndarray
    """Standard deviation of the logarithm of the step time."""

    def __len__(self) -> int:
        return len(self.step_time_s)

    @property
    def mfu_pct(self) -> np.ndarray:
        """Model FLOP utilisation, percent."""
        return 100.0 * self.ideal_s / self.step_time_s


def price(pool: Pool, setting: Setting, coefficients: Coefficients | None = None) -> Prices:
    """Price every candidate of a pool.

    Args:
        pool: the candidates; refused ones get numbers too, which mean little.
        setting: what is fixed for all of them.
        coefficients: calibrated coefficients; absent: the shipped priors for this kind of device.
    """
    used = coefficients or prior(setting)
    n = len(pool)
    width = int(pool["pipeline_parallel"].max(initial=1))
    chunks = []
    for start in range(0, max(n, 1), CHUNK):
        chunk = _price_chunk(pool.take(np.arange(start, min(n, start + CHUNK))), setting, used)
        missing = width - chunk.memory_by_rank_bytes.shape[1]
        if missing:
            padded = np.pad(chunk.memory_by_rank_bytes, ((0, 0), (0, missing)), constant_values=np.nan)
            chunk.__dict__["memory_by_rank_bytes"] = padded
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else _join(chunks)


def _join(chunks: list[Prices]) -> Prices:
    joined = {
        name: np.concatenate([getattr(chunk, name) for chunk in chunks])
        for name in Prices.__dataclass_fields__
        if name != "parts_s"
    }
    parts = {name: np.concatenate([chunk.parts_s[name] for chunk in chunks]) for name in PARTS}
    return Prices(parts_s=parts, **joined)


def _price_chunk(pool: Pool, setting: Setting, coefficients: Coefficients) -> Prices:
    account = find_account(setting.framework)
    layout = layout_of(pool, setting)
    ranks = ranks_of(layout)
    flow = flow_of(layout, ranks)
    terms = memory_terms(layout, ranks, flow, account, coefficients)
    by_rank = np.where(ranks.exists, total(terms.values()), np.nan)
    worst = np.nanmax(by_rank, axis=1) if len(pool) else np.zeros(0)
    activations = (terms["activations"] + terms["recompute"]).max(axis=1, initial=0)
    fixed = coefficients.value("fixed_bytes")
    memory_sigma = (
        np.sqrt(
            (coefficients.sigma("activation_factor") * activations) ** 2
            + (coefficients.sigma("fixed_bytes") * fixed) ** 2
            + (coefficients.sigma("reserved_factor") * worst) ** 2
        )
        / worst
    )
    time = step_parts(layout, ranks, flow, account, coefficients)
    ideal = np.full(len(pool), setting.ideal_s)
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
        memory_low_bytes=worst / memory_spread,
        memory_high_bytes=worst * memory_spread,
        memory_by_rank_bytes=by_rank,
        log_sigma=sigma,
    )
