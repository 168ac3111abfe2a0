"""Prices: memory, communication and step time of every candidate of a pool, with intervals."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from pruning.accounts.account import Account
from pruning.accounts.account import find_account
from pruning.coefficients import Coefficients
from pruning.coefficients import prior
from pruning.ledger.layout import distinct
from pruning.ledger.layout import Layout
from pruning.ledger.layout import layout_of
from pruning.ledger.layout import Links
from pruning.ledger.layout import Ranks
from pruning.ledger.layout import ranks_of
from pruning.ledger.memory import Memory
from pruning.ledger.memory import peak_memory
from pruning.ledger.memory import rank_parts
from pruning.ledger.memory import RankParts
from pruning.ledger.pipeline import Flow
from pruning.ledger.pipeline import flow_of
from pruning.ledger.step_time import combine
from pruning.ledger.step_time import Compute
from pruning.ledger.step_time import compute_time
from pruning.ledger.step_time import data_time
from pruning.ledger.step_time import DataTime
from pruning.ledger.step_time import StepTime
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

OTHER_SPREAD = 2.0
"""Relative spread of host, link and waiting time over that of kernel time."""

MEMORY_ERROR = 0.04
"""Log standard deviation of a peak memory that no coefficient explains."""

Z90 = 1.6449
"""Half-width of a 90% interval in standard deviations."""

CHUNK = 1 << 16
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

    memory_sigma: np.ndarray
    """Standard deviation of the logarithm of that memory."""

    memory_by_rank_bytes: np.ndarray
    """Device memory by pipeline rank, shape (n, ranks); NaN where there is no such rank."""

    log_sigma: np.ndarray
    """Standard deviation of the logarithm of the step time."""

    error_scale: np.ndarray
    """Factor on ``model_error`` that went into it."""

    def __len__(self) -> int:
        return len(self.step_time_s)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = [getattr(self, name) for name in self.__dataclass_fields__ if name != "parts_s"]
        return sum(array.nbytes for array in (*arrays, *self.parts_s.values()))

    @property
    def memory_surely_bytes(self) -> np.ndarray:
        """Device memory that a candidate needs at least, one standard deviation below the median, shape (n,).

        A verdict is final, so it takes this: refusing on the median would lose every second candidate that just fits.
        """
        return np.asarray(self.memory_bytes * np.exp(-self.memory_sigma))

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


COMPUTE_KNOBS = (
    "tensor_parallel",
    "pipeline_parallel",
    "schedule",
    "virtual_stages",
    "context_parallel",
    "expert_parallel",
    "data_parallel_replicate",
    "data_parallel_shard",
    "micro_batch",
    "activation_checkpoint",
    "memory_budget",
    "first_n",
    "compile",
    "async_tp",
    "float8",
    "zero_stage",
)
"""Knobs that compute, activations and pipeline depend on."""

DATA_KNOBS = (
    "tensor_parallel",
    "pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "data_parallel_replicate",
    "data_parallel_shard",
    "micro_batch",
    "reshard_after_forward",
    "fsdp_bucket",
    "accumulate_without_sync",
    "zero_stage",
)
"""Knobs that data-parallel communication depends on."""


MEMORY_KNOBS = (
    *DATA_KNOBS,
    "virtual_stages",
    "forward_prefetch",
    "loss_chunks",
)
"""Knobs that sharding habits and the loss depend on."""

MANY = 1 << 17
"""Candidates from which pricing runs on two threads."""


@dataclass(frozen=True)
class Prepared:
    """What of a pool's prices does not depend on coefficients."""

    pool: Pool
    """The candidates."""

    setting: Setting
    """What is fixed for all of them."""

    account: Account
    """The framework's habits."""

    compute: list[tuple[Layout, Ranks, Flow]]
    """Distinct combinations of :data:`COMPUTE_KNOBS`, in pieces that are cut alike when there are many."""

    compute_of: list[np.ndarray]
    """Positions in the pool of the candidates of each piece."""

    row_of: list[np.ndarray]
    """For each of those candidates its row in the piece."""

    data: Layout
    """Distinct combinations of :data:`DATA_KNOBS`."""

    data_of: np.ndarray
    """Each candidate's row of ``data``."""

    width: int
    """Most pipeline ranks of any candidate."""


def prepare(pool: Pool, setting: Setting, account: Account, links: Links | None = None) -> Prepared:
    """Degrees, ranks and simulated pipelines of a pool, one row for each distinct combination of knobs that matter.

    Candidates that are cut alike go together: arrays by rank are no wider than needed, and one row serves all.
    """
    n, pp = len(pool), pool["pipeline_parallel"]
    width = int(pp.max(initial=1))
    few = n * width <= CHUNK or links is not None
    if few:
        groups = [np.arange(n)]
    else:
        cut = (pp.astype(np.int64) * 64 + pool["schedule"]) * 1024 + pool["virtual_stages"]
        groups = [np.flatnonzero(cut == code) for code in np.unique(cut)]
    pieces, rows = [], []
    for index in groups:
        mine = pool if few else Pool({knob: pool[knob][index] for knob in COMPUTE_KNOBS})
        if links is None:
            positions, inverse = distinct(*(mine[knob] for knob in COMPUTE_KNOBS))
        else:
            positions = inverse = np.arange(n)
        layout = layout_of(mine.take(positions), setting, links)
        ranks = ranks_of(layout, account.balances_head)
        pieces.append((layout, ranks, flow_of(layout, ranks)))
        rows.append(inverse)
    if links is None:
        positions, data_of = distinct(*(pool[knob] for knob in DATA_KNOBS))
        needed = (*DATA_KNOBS, "virtual_stages")
        data = layout_of(Pool({knob: pool[knob][positions] for knob in needed}), setting)
    else:
        data, data_of = pieces[0][0], np.arange(n)
    return Prepared(pool, setting, account, pieces, groups, rows, data, data_of, width)


def price_prepared(prepared: Prepared, coefficients: Coefficients) -> Prices:
    """Prices of a prepared pool under some coefficients."""
    account = prepared.account
    out = _empty(len(prepared.pool), prepared.width)
    data = data_time(prepared.data, account, coefficients)
    jobs = []
    for (layout, ranks, flow), index, row in zip(prepared.compute, prepared.compute_of, prepared.row_of):
        compute = compute_time(layout, flow, account, coefficients)
        parts = rank_parts(layout, ranks, flow, account, coefficients)
        size = max(256, CHUNK // max(1, ranks.layers.shape[1]))
        for at in range(0, len(index), size):
            rows = index[at : at + size], row[at : at + size]
            jobs.append(partial(_finish, out, prepared, compute, parts, data, coefficients, *rows))
    if len(prepared.pool) < MANY:
        for job in jobs:
            job()
    else:
        # Array arithmetic runs without the interpreter's lock, so two threads keep two cores busy.
        with ThreadPoolExecutor(max_workers=2) as threads:
            for done in [threads.submit(job) for job in jobs]:
                done.result()
    return out


def _finish(
    out: Prices,
    prepared: Prepared,
    compute: Compute,
    parts: RankParts,
    data: DataTime,
    coefficients: Coefficients,
    index: np.ndarray,
    row: np.ndarray,
) -> None:
    """Price the candidates at ``index``, whose compute and memory parts are in rows ``row``."""
    own = layout_of(Pool({name: prepared.pool[name][index] for name in MEMORY_KNOBS}), prepared.setting)
    time = combine(compute.take(row), data.take(prepared.data_of[index]), coefficients)
    memory = peak_memory(parts.take(row), own, prepared.account, coefficients)
    _fill(out, index, _priced(own, time, memory, coefficients))


def _empty(n: int, width: int) -> Prices:
    names = [name for name in Prices.__dataclass_fields__ if name not in ("parts_s", "memory_by_rank_bytes")]
    by_rank = np.full((n, width), np.nan, dtype=np.float32)
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


def error_scale(time: StepTime) -> np.ndarray:
    """How much less a step is predictable than one of kernels only, a factor on ``model_error``, shape (n,).

    Kernel time repeats well; what hosts, links and waiting take spreads :data:`OTHER_SPREAD` times as much.
    """
    parts = time.parts
    other = parts["exposed_communication"] + parts["cpu_launch"] + parts["straggler"] + parts["data_wait"]
    share = np.clip(other / time.total, 0.0, 1.0)
    return np.asarray(np.sqrt((1 - share) ** 2 + (OTHER_SPREAD * share) ** 2))


def _priced(layout: Layout, time: StepTime, memory: Memory, coefficients: Coefficients) -> Prices:
    by_rank = memory.device
    worst = by_rank.max(axis=1, initial=0.0)
    reserved = memory.reserved.max(axis=1, initial=0.0)
    spread = (
        (coefficients.sigma("activation_factor") * memory.activations) ** 2
        + (coefficients.sigma("fixed_bytes") * coefficients.value("fixed_bytes")) ** 2
        + (coefficients.sigma("reserved_factor") * reserved) ** 2
    )
    memory_sigma = np.sqrt(spread / np.maximum(worst, 1.0) ** 2 + MEMORY_ERROR**2)
    memory_spread = np.exp(Z90 * memory_sigma)
    sigma = np.sqrt(time.variance + (coefficients.value("model_error") * error_scale(time)) ** 2)
    step_spread = np.exp(Z90 * sigma)
    return Prices(
        ideal_s=np.full(len(layout), layout.setting.ideal_s),
        parts_s=time.parts,
        step_time_s=time.total,
        step_time_low_s=time.total / step_spread,
        step_time_high_s=time.total * step_spread,
        memory_bytes=worst,
        reserved_bytes=reserved,
        memory_low_bytes=worst / memory_spread,
        memory_high_bytes=worst * memory_spread,
        memory_sigma=memory_sigma,
        memory_by_rank_bytes=np.where(by_rank > 0, by_rank, np.nan),
        log_sigma=sigma,
        error_scale=error_scale(time),
    )
