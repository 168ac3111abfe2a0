"""How many distinct, shuffled candidates the ledger prices in full per second; prints one JSON line.

Priced in full: memory by pipeline rank, communication, pipeline and step time with its parts and interval. More than
half of the candidates have a pipeline, under five schedules. No cache is warmed: the process prices once, and the
simulated schedules are forgotten before.

    python benchmarks/ledger_rate.py [--candidates N]
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import numpy as np

from pruning.ledger.prices import price
from pruning.ledger.schedule import simulate
from search_space.candidate import ACTIVATION_CHECKPOINT
from search_space.candidate import SCHEDULES
from search_space.hardware import find_hardware
from search_space.model_torchtitan import preset_shape
from search_space.pool import DTYPES
from search_space.pool import NAMES
from search_space.pool import Pool
from search_space.setting import Setting


UNPIPED = 8
"""Weight of candidates without a pipeline among the drawn ones."""


def shuffled_pool(count: int, seed: int = 0) -> tuple[Pool, Setting]:
    """Distinct candidates of Llama-3 70B on 1,024 H100 in random order: knobs drawn by mixed-radix numbers."""
    shape = preset_shape("llama3:llama3_70b")
    assert shape is not None
    setting = Setting(
        shape=shape,
        hardware=find_hardware("H100-SXM"),
        devices_per_node=8,
        nodes=128,
        seq_len=8192,
        global_batch_seqs=1024,
    )
    pipelines = [(1, "1F1B", 1)] * UNPIPED
    for pp in (2, 4, 8, 16):
        pipelines += [(pp, "1F1B", 1), (pp, "GPipe", 1), (pp, "ZBVZeroBubble", 2), (pp, "Interleaved1F1B", 2)]
    pipelines += [(4, "InterleavedZeroBubble", 4), (8, "Interleaved1F1B", 4)]
    axes = {
        "tp": np.array([1, 2, 4, 8]),
        "pipeline": np.arange(len(pipelines)),
        "replicate": np.array([1, 2, 4, 8]),
        "micro_batch": np.array([1, 2, 4, 8]),
        "kind": np.arange(5),
        "reshard": np.arange(3),
        "compile": np.array([0, 1]),
        "nosync": np.array([0, 1]),
        "bucket": np.array([1, 2, 3, 4, 5]),
        "prefetch": np.array([0, 1, 2, 3]),
        "loss_chunks": np.array([1, 2, 4, 8, 16]),
        "memory_budget": np.linspace(0.1, 0.9, 9),
        "first_n": np.arange(1, 4),
    }
    sizes = [len(values) for values in axes.values()]
    total = int(np.prod(sizes, dtype=np.int64))
    rng = np.random.default_rng(seed)
    kinds = {"memory_budget": "memory_budget", "first_n": "first_n"}
    where = list(np.unravel_index(rng.integers(0, total, size=int(count * 1.5)), sizes))
    names_of = list(axes)
    for axis, kind in kinds.items():
        # A knob without effect takes one value, so that every candidate is another program.
        used = where[names_of.index("kind")] == ACTIVATION_CHECKPOINT.index(kind)
        where[names_of.index(axis)] = np.where(used, where[names_of.index(axis)], 0)
    piece = where[names_of.index("pipeline")]
    where[names_of.index("pipeline")] = np.where(piece < UNPIPED, 0, piece)
    code = np.unique(np.ravel_multi_index(where, sizes))
    code = rng.permutation(code)[:count]
    drawn = {name: values[index] for (name, values), index in zip(axes.items(), np.unravel_index(code, sizes))}
    pp = np.array([entry[0] for entry in pipelines])[drawn["pipeline"]]
    names = [SCHEDULES.index(entry[1]) for entry in pipelines]
    columns = {
        "tensor_parallel": drawn["tp"],
        "pipeline_parallel": pp,
        "schedule": np.array(names)[drawn["pipeline"]],
        "virtual_stages": np.array([entry[2] for entry in pipelines])[drawn["pipeline"]],
        "data_parallel_replicate": drawn["replicate"],
        "data_parallel_shard": 1024 // (drawn["tp"] * pp * drawn["replicate"]),
        "micro_batch": drawn["micro_batch"],
        "activation_checkpoint": drawn["kind"],
        "memory_budget": np.where(
            drawn["kind"] == ACTIVATION_CHECKPOINT.index("memory_budget"), drawn["memory_budget"], 1
        ),
        "first_n": np.where(drawn["kind"] == ACTIVATION_CHECKPOINT.index("first_n"), drawn["first_n"], 0),
        "reshard_after_forward": drawn["reshard"],
        "compile": drawn["compile"],
        "accumulate_without_sync": drawn["nosync"],
        "fsdp_bucket": drawn["bucket"],
        "forward_prefetch": drawn["prefetch"],
        "loss_chunks": drawn["loss_chunks"],
    }
    ones = {"context_parallel", "expert_parallel"}
    arrays = {}
    for name in NAMES:
        values = columns.get(name, np.full(len(code), 1 if name in ones else 3 if name == "zero_stage" else 0))
        arrays[name] = values.astype(DTYPES.get(name, np.int32))
    return Pool(arrays), setting


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--candidates", type=int, default=2_000_000)
    args = parser.parse_args()
    pool, setting = shuffled_pool(args.candidates)
    simulate.cache_clear()
    started = time.perf_counter()
    prices = price(pool, setting)
    elapsed = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps(
            {
                "candidates": len(pool),
                "pipelined_share": float((pool["pipeline_parallel"] > 1).mean()),
                "schedules": len(np.unique(pool["schedule"])),
                "elapsed_s": elapsed,
                "candidates_per_s": len(pool) / elapsed,
                "process_peak_bytes_per_million": peak / len(pool) * 1e6,
                "result_bytes_per_million": prices.nbytes / len(pool) * 1e6,
            }
        )
    )


if __name__ == "__main__":
    main()
