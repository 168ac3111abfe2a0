"""How long one ask takes on a large pool: ``python benchmarks/ask_rate.py [candidates] [told]`` prints one JSON line.

A study in SQLite, as `tune start` keeps it, with so many told trials; then asks are timed one by one. Memory is the
peak of the process over what it held before the pool was made.
"""

from __future__ import annotations

import json
from pathlib import Path
import resource
import sys
import tempfile
import time

import numpy as np

from search_space.pool import DTYPES
from search_space.pool import NAMES
from search_space.pool import Pool
from search_space.sampler import Prior
from tuner.study.asking import Asker


ASKS = 5
"""Asks that are timed."""


def make_pool(n: int, rng: np.random.Generator) -> Pool:
    """A pool of ``n`` distinct candidates: degrees, micro-batches, schedules and switches crossed."""
    axes = {
        "tensor_parallel": [1, 2, 4, 8],
        "pipeline_parallel": [1, 2, 4, 8, 16],
        "virtual_stages": [1, 2, 3, 4],
        "schedule": [0, 1, 2, 3],
        "data_parallel_shard": [1, 2, 4, 8, 16, 32],
        "micro_batch": [1, 2, 4, 8, 16],
        "activation_checkpoint": [0, 1, 2],
        "compile": [0, 1],
        "reshard_after_forward": [0, 1, 2],
        "async_tp": [0, 1],
        "float8": [0, 1],
        "fsdp_bucket": [1, 2, 4],
    }
    sizes = [len(values) for values in axes.values()]
    chosen = rng.permutation(int(np.prod(sizes)))[:n]
    index = np.unravel_index(chosen, sizes)
    columns = {name: np.ones(n, dtype=DTYPES.get(name, np.int32)) for name in NAMES}
    columns["env"] = np.zeros(n, dtype=np.int32)
    columns["first_n"] = columns["forward_prefetch"] = np.zeros(n, dtype=np.int32)
    for (name, values), places in zip(axes.items(), index):
        columns[name] = np.array(values)[places].astype(DTYPES.get(name, np.int32))
    return Pool(columns)


def peak_gib() -> float:
    """Peak resident memory of this process, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    """Tell ``told`` trials, time asks, print one line."""
    n, told = (int(text) for text in (sys.argv[1:] + ["100000", "100"][len(sys.argv) - 1 :])[:2])
    before, rng = peak_gib(), np.random.default_rng(0)
    pool = make_pool(n, rng)
    prior = Prior(
        log_step_time=rng.normal(0, 0.5, n),
        sigma=np.full(n, 0.2),
        cost=rng.uniform(200, 400, n),
        allowed=np.ones(n, dtype=bool),
        chance=rng.uniform(0.3, 1, n),
    )
    with tempfile.TemporaryDirectory() as folder:
        asker = Asker(Path(folder) / "optuna.db", "rate", pool, lambda: prior, "ours", 0)
        for position in rng.permutation(n)[:told]:
            trial, _ = asker.ask(pool.candidate(int(position)))
            asker.tell_measured(trial, float(np.exp(prior.log_step_time[position] + rng.normal(0, 0.2))))
        seconds = []
        for _ in range(ASKS):
            start = time.perf_counter()
            trial, _ = asker.ask()
            seconds.append(time.perf_counter() - start)
            asker.tell_measured(trial, 1.0)
    facts = {
        "candidates": n,
        "told": told,
        "ask_median_s": round(float(np.median(seconds)), 4),
        "ask_worst_s": round(max(seconds), 4),
        "peak_gib": round(peak_gib(), 3),
        "peak_over_start_gib": round(peak_gib() - before, 3),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
