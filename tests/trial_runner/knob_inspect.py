"""Builds real torchtitan trainers on a fake process group and says what they are made of; one JSON line a candidate.

Run as a program: ``python knob_inspect.py ORDERS.json``. torchtitan is imported once, each candidate builds in a fork.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
import sys
import traceback
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trial_runner.dry_run import child
from trial_runner.dry_run import patches


def groups(part: Any) -> list[list[str]]:
    """Names of the blocks that share an FSDP parameter group, in order."""
    from torch.distributed.fsdp import FSDPModule

    found: dict[int, list[str]] = {}
    for name, block in part.layers.named_children():
        if isinstance(block, FSDPModule):
            found.setdefault(id(block._get_fsdp_state()), []).append(name)
    return list(found.values())


def facts_of(trainer: Any) -> dict[str, Any]:
    """Structure of one rank's program."""
    from torch.distributed.fsdp import FSDPModule

    part = trainer.model_parts[0]
    blocks = dict(part.layers.named_children())
    names = {id(block._get_fsdp_state()): name for name, block in blocks.items() if isinstance(block, FSDPModule)}
    dims = trainer.parallel_dims
    reshard = {
        name: group.post_forward_mesh_info is not None
        for name, block in blocks.items()
        if isinstance(block, FSDPModule)
        for group in block._get_fsdp_state()._fsdp_param_groups
    }
    collectives = {
        type(one).__name__
        for block in blocks.values()
        if isinstance(block, FSDPModule)
        for group in block._get_fsdp_state()._fsdp_param_groups
        for one in (group._all_gather_comm, group._reduce_scatter_comm)
    }
    return {
        "collectives": sorted(collectives),
        "groups": groups(part),
        "wrapped": [name for name, block in blocks.items() if "Checkpoint" in str(list(block.named_modules()))],
        "compiled": [
            name
            for name, block in blocks.items()
            if any(getattr(module, "_compiled_call_impl", None) is not None for module in block.modules())
        ],
        "prefetch": {
            name: [names.get(id(state)) for state in block._get_fsdp_state()._states_to_forward_prefetch]
            for name, block in blocks.items()
            if isinstance(block, FSDPModule)
        },
        "reshard": reshard,
        "schedule": type(trainer.pp_schedule).__name__ if dims.pp_enabled else None,
        "stages": [list(dict(p.layers.named_children())) for p in trainer.model_parts],
        "mesh": {
            "tp": dims.tp,
            "pp": dims.pp,
            "dp_shard": dims.dp_shard,
            "dp_replicate": dims.dp_replicate,
            "ep": dims.ep,
            "cp": dims.cp,
        },
        "accumulation": trainer.gradient_accumulation_steps,
        "microbatches": trainer.num_pipeline_parallel_microbatches,
        "loss_chunks": getattr(trainer.config.loss, "num_chunks", 1),
        "memory_budget": torch._functorch.config.activation_memory_budget,
        "micro_pipeline_tp": torch._inductor.config._micro_pipeline_tp,
        "experts": any("expert" in name for name, _ in part.named_modules()),
        "pre_hooks": len(part._forward_pre_hooks),
    }


def reductions(trainer: Any) -> list[bool]:
    """Whether gradients are reduced in each accumulation step of one optimizer step."""
    from torch.distributed.fsdp import FSDPModule

    seen: list[bool] = []
    block = next(iter(trainer.model_parts[0].layers.values()))
    assert isinstance(block, FSDPModule)
    original = trainer.forward_backward_step

    def step(**kwargs: Any) -> Any:
        result = original(**kwargs)
        seen.append(all(group.reduce_grads for group in block._get_fsdp_state()._fsdp_param_groups))
        return result

    trainer.forward_backward_step = step
    child.one_step(trainer, trainer.gradient_accumulation_steps)
    return seen


def main() -> None:
    orders = json.loads(Path(sys.argv[1]).read_text())
    patches.prepare(real=False)
    import torchtitan.trainer  # noqa: F401  once for every fork

    for order in orders:
        reader, writer = os.pipe()
        if os.fork() == 0:
            try:
                os.environ |= {
                    "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(order["world_size"]),
                    "NGPU": str(order["world_size"]), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999",
                }  # fmt: skip
                patches.patch_torchtitan(order)
                # as for a real run, so that compilation stays as the file says; then on a fake group
                config = child.load(order | {"real": True, "layers": 0})
                config.comm.mode = "fake_backend"
                with FakeTensorMode(allow_non_fake_inputs=True):
                    trainer = config.build()
                    facts = facts_of(trainer)
                    if order.get("step"):
                        facts["reductions"] = reductions(trainer)
            except BaseException as error:
                facts = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-3000:]}
            os.write(writer, json.dumps(facts).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as answer:
            print("facts:" + answer.read().decode(), flush=True)
        os.wait()


if __name__ == "__main__":
    main()
