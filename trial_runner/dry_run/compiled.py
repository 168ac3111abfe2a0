"""What one compiled transformer block keeps for its backward pass: the saved set of the AOT partitioner.

The dry run itself is eager. A compiled block recomputes what is cheap (norms, activation functions), so it keeps less;
how much less is asked of PyTorch's own min-cut partitioner over the block's joint graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trial_runner.dry_run import kernels
from trial_runner.dry_run import patches


class _OneOutput(torch.nn.Module):
    """The block as the partitioner wants it: hidden states and positions in, a tuple out."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.block(hidden, None, positions),)


def _bytes(tensors: list[torch.Tensor], without: list[torch.Tensor]) -> int:
    """Bytes of the distinct storages of tensors, those of ``without`` left out."""
    left_out = {tensor.untyped_storage()._cdata for tensor in without}
    sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for key, size in sizes.items() if key not in left_out)


def block_sets(layer: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, int]:
    """Bytes that one block keeps, its input included and parameters left out.

    Args:
        layer: torchtitan's config of the block, not split over tensor-parallel ranks.
        shape: sequences, tokens in each, hidden width.
        dtype: compute precision.

    Returns:
        ``compiled_bytes``, and ``eager_bytes`` with the CUDA kernels' saved-tensor rules.
    """
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    captured: list[tuple[Any, list[Any]]] = []

    def forward_compiler(graph: Any, inputs: list[Any]) -> Any:
        captured.append((graph, inputs))
        return graph

    kernels.substitute_attention()
    with FakeTensorMode(allow_non_fake_inputs=True):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            block = layer.build()
        finally:
            torch.set_default_dtype(before)
        hidden = torch.empty(shape, dtype=dtype, requires_grad=True)
        positions = torch.zeros(shape[:2], dtype=torch.int64)
        aot_module_simplified(
            _OneOutput(block),
            [hidden, positions],
            fw_compiler=forward_compiler,
            bw_compiler=lambda graph, inputs: graph,
            partition_fn=min_cut_rematerialization_partition,
            decompositions=select_decomp_table(),
        )
        graph, inputs = captured[0]
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        outputs = [value for value in graph(*inputs) if isinstance(value, torch.Tensor)]
        parameters = [value for value in tensors if value.shape != hidden.shape]
        compiled = _bytes(outputs[1:], parameters)
        patches.keep_what_gpus_keep()
        saved: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            block(hidden, None, positions)
        eager = _bytes([*saved, hidden], [*block.parameters(), *block.buffers()])
    return {"compiled_bytes": compiled, "eager_bytes": eager}
