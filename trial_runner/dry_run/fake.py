"""A fake-tensor mode that spends less time on each operation."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import _BypassDispatchCache
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode


DEVICE = torch.ops.prim.device.default
"""The device of a tensor, asked through the dispatcher: two of three calls that reach a mode."""


class QuickFakeMode(FakeTensorMode):
    """Fake tensors of plain strided eager programs: no symbolic shapes, sparse layouts or graph captures.

    PyTorch caches each operation's output by the metadata of its inputs; building that key is most of the cost of a
    hit. This mode builds the same key from fewer calls and leaves out what such programs never have.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operation on metadata."""
        if func is DEVICE:
            return args[0].fake_device
        return self.dispatch(func, types, args, kwargs or {})

    def _prep_args_for_hash(self, result: list[Any], args: Any, state: Any, id_hashed_objects: list[Any]) -> None:
        if isinstance(args, dict):
            result += (dict, len(args), *args)
            args = args.values()
        else:
            result += (type(args), len(args))
        for arg in args:
            if isinstance(arg, FakeTensor):
                if arg.fake_mode is not self or arg.constant is not None:
                    raise _BypassDispatchCache("not our fake")
                result += (
                    arg.dtype,
                    arg.size(),
                    arg.stride(),
                    arg.storage_offset(),
                    arg.untyped_storage().nbytes(),
                    arg.fake_device,
                    arg.requires_grad,
                    arg.is_conj(),
                    arg.is_neg(),
                    arg.is_inference(),
                )
            elif isinstance(arg, torch.Tensor):
                raise _BypassDispatchCache("non-fake tensor")
            elif isinstance(arg, (list, tuple, dict)):
                self._prep_args_for_hash(result, arg, state, id_hashed_objects)
            elif isinstance(arg, (FunctionType, torch.SymInt, torch.SymFloat, torch.SymBool, torch.fx.GraphModule)):
                raise _BypassDispatchCache("symbolic or function argument")
            else:
                # The type too: 1 and 1.0 are equal, but what they make is not.
                result += (type(arg), arg)
