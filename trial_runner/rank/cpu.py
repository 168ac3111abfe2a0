"""The CPU shim: lets torchtitan 0.3.0 train on a machine without an accelerator, with gloo.

``install`` must run before anything of torchtitan is imported; ``adapt`` takes a loaded config.
Nothing here changes what a candidate asks for, only what a CPU cannot do.
"""

from __future__ import annotations

import functools
import resource
from types import SimpleNamespace
from typing import Any

import psutil
import torch


def install(threads: int = 1) -> None:
    """Make torchtitan see the CPU as its device.

    Args:
        threads: intra-operator threads of this process.
    """
    torch.set_num_threads(threads)
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    memory = psutil.virtual_memory().total
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.get_device_properties = lambda device=None: SimpleNamespace(name="cpu", total_memory=memory)
    cpu.memory_stats = _memory_stats
    cpu.reset_peak_memory_stats = lambda device=None: None
    cpu.empty_cache = lambda: None
    cpu.set_device = lambda device: None
    cpu.current_device = lambda: 0
    _sum_reduction_in_fsdp()


def _memory_stats(device: Any = None) -> dict[str, int]:
    """Resident memory in the keys of ``torch.cuda.memory_stats``, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    now = psutil.Process().memory_info().rss
    return {
        "active_bytes.all.peak": peak,
        "reserved_bytes.all.peak": peak,
        "active_bytes.all.current": now,
        "num_alloc_retries": 0,
        "num_ooms": 0,
    }


def _sum_reduction_in_fsdp() -> None:
    """gloo has no PREMUL_SUM, so every FSDP module is told to reduce by plain sums."""
    import torch.distributed.fsdp as fsdp

    original = fsdp.fully_shard

    @functools.wraps(original)
    def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = original(module, *args, **kwargs)
        for part in module if isinstance(module, (list, tuple)) else [module]:
            if isinstance(part, fsdp.FSDPModule):
                part.set_force_sum_reduction_for_comms(True)
        return sharded

    # torchtitan reaches attributes of the function (its per-module state), which functools.wraps keeps.
    fsdp.fully_shard = fully_shard


def adapt(config: Any) -> Any:
    """Replace in a loaded torchtitan config what has no CPU kernel; returns the same object.

    FlexAttention has no CPU backward, so each attention gets the scaled-dot-product kernel (causal over the
    whole packed sequence); CUDA graphs are turned off.
    """
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.tools import utils

    utils.get_peak_flops = lambda device_name: 1e12
    config.training.disable_cuda_graphs = True
    for layer in getattr(config.model_spec.model, "layers", None) or []:
        attention = getattr(layer, "attention", None)
        inner = getattr(attention, "inner_attention", None)
        if attention is not None and isinstance(inner, (FlexAttention.Config, VarlenAttention.Config)):
            attention.inner_attention = ScaledDotProductAttention.Config()
    return config
