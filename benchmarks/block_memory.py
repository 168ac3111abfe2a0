"""Memory of one transformer block's forward and backward pass: the dry run's prediction against a CUDA device.

Both sides run the same block of torchtitan (bf16, scaled-dot-product attention) several times and look at the last:
what is kept between forward and backward, and the peak, both above what was held before (parameters, the input and the
output's gradient). The peak of one block is about the same under every checkpointing, since its backward pass computes
again what was not kept. The prediction is the dry run's own: fake tensors, its storage tracker, its rules of what CUDA
kernels keep, and for a compiled block the saved set of the AOT partitioner. Without a CUDA device the measured column
stays empty.

    python benchmarks/block_memory.py [--model llama3:llama3_8b] [--seq-len 8192] [--json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import importlib
import json
import multiprocessing
from typing import Any

import torch

from trial_runner.rank import cpu


MODELS = ("llama3:llama3_debugmodel", "llama3:llama3_8b")
KINDS = ("none", "selective", "full")
SEQ_LEN = {"llama3:llama3_debugmodel": 2048}
"""Tokens of one sequence where 8,192 are not the model's."""


def layer_of(model: str) -> tuple[Any, int]:
    """torchtitan's config of the model's last block, and its hidden width."""
    module, _, function = model.partition(":")
    config = getattr(importlib.import_module(f"torchtitan.models.{module}.config_registry"), function)()
    # FlexAttention runs fused only where it is compiled by itself; the kernel under test is the fused one.
    cpu.adapt(config)
    return config.model_spec.model.layers[-1], int(config.model_spec.model.dim)


def build(model: str, kind: str, seq_len: int) -> tuple[Any, list[torch.Tensor]]:
    """The block under torchtitan's own activation checkpointing, and hidden states, positions and output gradient, on
    the default device."""
    from torchtitan.distributed import activation_checkpoint

    layer, hidden = layer_of(model)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        block = layer.build()
    finally:
        torch.set_default_dtype(before)
    whole = torch.nn.Module()
    whole.add_module("layers", torch.nn.ModuleDict({"0": block}))
    policies = {"selective": activation_checkpoint.SelectiveAC, "full": activation_checkpoint.FullAC}
    if kind in policies:
        policies[kind].Config().build().apply(whole)
    x = torch.zeros((1, seq_len, hidden), dtype=torch.bfloat16, requires_grad=True)
    positions = torch.zeros((1, seq_len), dtype=torch.int64)
    return whole.get_submodule("layers")["0"], [x, positions, torch.zeros_like(x)]


def one_pass(block: Any, tensors: list[torch.Tensor], between: Callable[[], int] = lambda: 0) -> int:
    """Forward and backward; gradients are dropped again. Returns what ``between`` the two says."""
    x, positions, gradient = tensors
    out = block(x, None, positions)
    found = between()
    out.backward(gradient)
    x.grad = None
    block.zero_grad(set_to_none=True)
    return found


def predict(model: str, kind: str, compiled: bool, seq_len: int) -> tuple[int, int] | None:
    """Predicted bytes kept and at the peak above what was held before; None where the dry run has no figure.

    Patches PyTorch for good: call it in a process of its own.
    """
    from trial_runner.dry_run import patches

    patches.prepare(False)
    from trial_runner.dry_run.compiled import block_sets
    from trial_runner.dry_run.fake import QuickFakeMode
    from trial_runner.dry_run.track import blocks_at_peak
    from trial_runner.dry_run.track import peak_by_kind
    from trial_runner.dry_run.track import Tracker

    less = 0
    if compiled:
        if kind == "selective":
            return None
        layer, hidden = layer_of(model)
        sets = block_sets(layer, (1, seq_len, hidden), torch.bfloat16)
        less = sets["eager_bytes"] - sets["compiled_bytes"]
    else:
        patches.keep_what_gpus_keep()
    with QuickFakeMode(allow_non_fake_inputs=True), Tracker() as tracker:
        block, tensors = build(model, kind, seq_len)
        one_pass(block, tensors)
        tracker.begin_step()
        assert tracker.step is not None
        before = sum(tracker.step.start.values())

        def held() -> int:
            blocks = sum(tracker.storages[number].size > 0 for number in tracker.attention)
            return sum(storage.size for storage in tracker.storages.values()) - before - less * blocks

        kept = one_pass(block, tensors, held)
    peak = peak_by_kind(tracker.step, tracker.storages)[0] - before
    return kept, peak - less * blocks_at_peak(tracker.step, tracker.attention)


def measure(model: str, kind: str, compiled: bool, seq_len: int) -> tuple[int, int]:
    """The same two measured on this CUDA device; in a process of its own, too."""
    with torch.device("cuda"):
        block, tensors = build(model, kind, seq_len)
    for parameter in block.parameters():
        torch.nn.init.zeros_(parameter)
    if compiled:
        block.compile(fullgraph=True)
    # The second pass finds kernels compiled and workspaces there.
    for _ in range(2):
        one_pass(block, tensors)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = one_pass(block, tensors, lambda: torch.cuda.memory_allocated() - before)
    torch.cuda.synchronize()
    return kept, torch.cuda.max_memory_allocated() - before


def apart(function: Any, *args: Any) -> Any:
    """The function's result, from a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def compare(model: str, seq_len: int, on_cuda: bool) -> list[dict[str, Any]]:
    """One row for every kind of checkpointing, eager and compiled."""
    rows = []
    for compiled in (False, True):
        for kind in KINDS:
            sides = {"predicted": apart(predict, model, kind, compiled, seq_len)}
            sides["measured"] = apart(measure, model, kind, compiled, seq_len) if on_cuda else None
            row = {"model": model, "seq_len": seq_len, "compiled": compiled, "activation_checkpoint": kind}
            for index, what in enumerate(("kept", "peak")):
                sizes = {side: None if found is None else found[index] for side, found in sides.items()}
                row |= {f"{side}_{what}_bytes": size for side, size in sizes.items()}
                known = None not in sizes.values()
                row[f"{what}_difference_pct"] = 100 * (sizes["predicted"] / sizes["measured"] - 1) if known else None
            rows.append(row)
    return rows


def main() -> int:
    """Print the table, or one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, help="torchtitan function (default: both)")
    parser.add_argument("--seq-len", type=int, metavar="N", help="tokens of the sequence (default: 8192; debug 2048)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    on_cuda = torch.cuda.is_available()
    rows = []
    for model in [args.model] if args.model else MODELS:
        rows += compare(model, args.seq_len or SEQ_LEN.get(model, 8192), on_cuda)
    device = torch.cuda.get_device_name() if on_cuda else None
    if args.json:
        print(json.dumps({"device": device, "torch": torch.__version__, "rows": rows}))
        return 0
    print(f"device: {device}" if on_cuda else "no CUDA device: measured column is empty")
    heads = [f"{side} {what}" for what in ("kept", "peak") for side in ("predicted", "measured")]
    print(f"{'block, GiB':28}{'checkpointing':>14}" + "".join(f"{head:>16}" for head in heads))
    for row in rows:
        name = f"{row['model'].partition(':')[2]} {row['seq_len']}{' compiled' if row['compiled'] else ''}"
        sizes = [row[f"{head.replace(' ', '_')}_bytes"] for head in heads]
        cells = [f"{'' if size is None else f'{size / 2**30:.3f}':>16}" for size in sizes]
        print(f"{name:28}{row['activation_checkpoint']:>14}" + "".join(cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
