"""Knobs that no torchtitan 0.3.0 config field holds: the code that a config file carries for them.

Each piece is plain torchtitan and PyTorch, so a committed file runs without this product. It wraps the model's own
parallelize function, which torchtitan calls once for every pipeline stage.
"""

from __future__ import annotations

from dataclasses import dataclass
import textwrap

from search_space.candidate import Candidate


GROUPED = '''
@contextlib.contextmanager
def blocks_in_groups(model, size):
    """Shard `size` consecutive blocks as one FSDP group: larger and fewer collectives."""
    original, waiting = fsdp.fully_shard, []

    def fully_shard(module, **kwargs):
        blocks = list(model.layers.values())  # as they are now, wrapped for checkpointing or not
        if not any(module is block for block in blocks):
            return original(module, **kwargs)
        if "shard_placement_fn" in kwargs:
            raise ValueError("blocks with experts of their own placement cannot share an FSDP group")
        waiting.append(module)
        if len(waiting) == size or module is blocks[-1]:
            original(list(waiting), **kwargs)
            waiting.clear()
        return module

    fsdp.fully_shard = fully_shard
    try:
        yield
    finally:
        fsdp.fully_shard = original
'''

FIRST_BLOCKS = '''
class FirstBlocksAC:
    """Full activation checkpointing of the first blocks of each stage."""

    def __init__(self, count):
        self.count = count

    def build(self, dump_folder=""):
        return self

    def apply(self, model):
        policy = FullAC(FullAC.Config())
        for name, block in list(model.layers.named_children())[: self.count]:
            model.layers.register_module(name, policy._wrap_block(block, base_fqn=f"layers.{name}"))
'''

PREFETCH = '''
def prefetch_forward(model, depth, size):
    """Gather the parameters of the next `depth` FSDP groups ahead; a group is `size` blocks."""
    blocks = list(model.layers.values())
    for at, block in enumerate(blocks):
        group = at // size
        ahead = [blocks[i] for i in range((group + 1) * size, min(len(blocks), (group + 1 + depth) * size), size)]
        if ahead:
            block.set_modules_to_forward_prefetch(ahead)
'''

NO_SYNC = '''
def sync_last_only(model, steps):
    """Reduce gradients, and free gathered parameters, in the last of `steps` accumulation steps only."""
    done = 0

    def before_forward(module, *unused):
        nonlocal done
        if not (module.training and torch.is_grad_enabled()):
            return
        done += 1
        last = done % steps == 0
        module.set_requires_gradient_sync(last)
        module.set_reshard_after_backward(last)
        module.set_is_last_backward(last)

    model.register_forward_pre_hook(before_forward)
'''


@dataclass(frozen=True)
class Extra:
    """What a config file carries besides assignments."""

    imports: tuple[str, ...]
    """Import lines, sorted."""

    code: str
    """Definitions before the config function; empty when there are none."""

    lines: tuple[str, ...]
    """Lines inside the config function."""


def extra_code(candidate: Candidate, accumulation_steps: int) -> Extra:
    """The code for a candidate's knobs that have no config field; empty when it uses none.

    Args:
        candidate: the knobs.
        accumulation_steps: gradient accumulation steps of one optimizer step, without a pipeline.
    """
    imports: set[str] = set()
    pieces: list[str] = []
    before: list[str] = []
    after: list[str] = []
    call = "parallelize(model, **kwargs)"
    size = candidate.fsdp_bucket
    if candidate.activation_checkpoint == "first_n":
        imports.add("from torchtitan.distributed.activation_checkpoint import FullAC")
        pieces.append(FIRST_BLOCKS)
        before.append(f'kwargs["ac_config"] = FirstBlocksAC({candidate.first_n})')
    if size > 1:
        imports |= {"import contextlib", "from torchtitan.distributed import fsdp"}
        pieces.append(GROUPED)
        call = f"with blocks_in_groups(model, {size}):\n    model = {call}"
    else:
        call = f"model = {call}"
    if candidate.forward_prefetch:
        pieces.append(PREFETCH)
        after.append(f"prefetch_forward(model, {candidate.forward_prefetch}, {size})")
    lines: list[str] = []
    if candidate.accumulate_without_sync and candidate.pipeline_parallel == 1 and accumulation_steps > 1:
        imports.add("import torch")
        pieces.append(NO_SYNC)
        after.append(f"sync_last_only(model, {accumulation_steps})")
        lines.append("config.training.disable_cuda_graphs = True  # a replayed graph would not see the last step")
    if not pieces:
        return Extra((), "", ())
    imports |= {"import dataclasses", "import functools"}
    body = "\n".join([*before, call, *after, "return model"])
    wrapper = (
        "def parallelize_with_knobs(parallelize, model, **kwargs):\n"
        '    """The model\'s own parallelize function, with knobs that have no config field."""\n'
        + textwrap.indent(body, "    ")
        + "\n"
    )
    lines += [
        "parallelize = functools.partial(parallelize_with_knobs, config.model_spec.parallelize_fn)",
        "config.model_spec = dataclasses.replace(config.model_spec, parallelize_fn=parallelize)",
    ]
    code = "\n\n".join(piece.strip("\n") + "\n" for piece in [*pieces, wrapper])
    return Extra(tuple(sorted(imports, key=_import_order)), code, tuple(lines))


def _import_order(line: str) -> tuple[bool, bool, str]:
    """Standard library first, plain imports before from-imports."""
    return ("torch" in line, line.startswith("from"), line)
