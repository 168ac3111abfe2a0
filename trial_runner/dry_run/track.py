"""Counts what a program on fake tensors holds, computes and sends: storages alive, FLOP, collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from typing import Any
import weakref

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trial_runner.dry_run import kernels  # noqa: F401 (its operators are counted by name)
from trial_runner.dry_run.fake import DEVICE


@dataclass
class Storage:
    """One storage that was seen."""

    kind: str
    """What it holds."""

    size: int
    """Bytes it holds now."""


@dataclass
class StepTrack:
    """What one step did."""

    changes: list[tuple[int, int]] = field(default_factory=list)
    """(storage number, change in bytes), in order."""

    start: dict[int, int] = field(default_factory=dict)
    """Bytes of each storage alive when the step began."""

    flop: float = 0.0
    """FLOP of matrix products and attention, forward and backward."""

    collectives: dict[tuple[str, str, int], list[int]] = field(default_factory=dict)
    """(operation, mesh dimension, ranks in its group) → [count, bytes that this rank puts in and takes out]."""


class Tracker(TorchDispatchMode):
    """A dispatch mode over fake tensors; enter it inside the fake mode.

    A storage counts from the first operation that returns it until its last reference goes, at the size it has
    then; FSDP's ``resize_(0)`` counts as freeing. Views share their base's storage and cost nothing.

    Args:
        real: whether tensors are real. Then a storage that first shows as a view is a library's own: gloo copies what
            it scatters and splits the copy, NCCL does not.
    """

    def __init__(self, real: bool = False) -> None:
        super().__init__()
        self._real = real
        self.storages: dict[int, Storage] = {}
        self._numbers: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._next = 0
        self.phase = "setup"
        self.step: StepTrack | None = None
        self.attention: set[int] = set()
        self._resize: Callable[..., Any] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __enter__(self) -> Tracker:
        self._resize = torch.UntypedStorage.resize_
        tracker, original = self, self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            number = tracker._numbers.get(storage._cdata)
            if number is None:
                tracker._see(storage)
            else:
                tracker._change(number, storage.nbytes())
                if size:
                    # FSDP frees and refills its gathered parameters this way; nothing else does.
                    tracker.storages[number].kind = "parameters"
            return result

        torch.UntypedStorage.resize_ = resize_
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        torch.UntypedStorage.resize_ = self._resize

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and count what it made, computed and sent."""
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        if any(issubclass(kind, DTensor) for kind in types):
            # Distributed tensors go first, so that what is seen here are operations on local shards.
            return NotImplemented
        keywords = kwargs or {}
        out = func(*args, **keywords)
        if not (self._real and func.is_view):
            self._see_all(out)
        if self.step is not None:
            self._count(func, args, keywords, out)
        return out

    def _see_all(self, out: Any) -> None:
        """See the storages that an operation returned."""
        if type(out) is FakeTensor:
            if out.fake_device.type != "meta":
                self._see(out.untyped_storage())
            return
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.device.type != "meta":
                self._see(leaf.untyped_storage())

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor's storage, if it was seen."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def see(self, tensor: torch.Tensor, kind: str) -> None:
        """Say what a tensor's storage holds."""
        self.storages[self._see(tensor.untyped_storage())].kind = kind

    def begin_step(self) -> None:
        """From here on changes are written down."""
        self.step = StepTrack(start={number: storage.size for number, storage in self.storages.items() if storage.size})

    def _see(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        number = self._numbers.get(key)
        if number is not None:
            return number
        number = self._next
        self._next += 1
        self._numbers[key] = number
        self.storages[number] = Storage(self.phase, 0)
        self._references[number] = weakref.ref(storage, lambda _: self._gone(key, number))
        self._change(number, storage.nbytes())
        return number

    def _gone(self, key: int, number: int) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        self._references.pop(number, None)
        self._change(number, 0)

    def _change(self, number: int, size: int) -> None:
        storage = self.storages[number]
        if size != storage.size:
            if self.step is not None:
                self.step.changes.append((number, size - storage.size))
            storage.size = size

    def _count(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        assert self.step is not None
        packet = func._overloadpacket if hasattr(func, "_overloadpacket") else None
        if packet in flop_registry:
            self.step.flop += flop_registry[packet](*args, **kwargs, out_val=out)
        elif packet in _GROUPED:
            self.step.flop += _grouped_flop(args)
        elif packet in _ATTENTION:
            if isinstance(out, tuple) and len(out) == 2:
                self.attention.add(self._see(out[0].untyped_storage()))
            self.step.flop += _attention_flop(packet, args)
        elif func.namespace in ("c10d", "_c10d_functional") and not func.__name__.lstrip("_").startswith(
            ("wait", "wrap")
        ):
            size = sum(
                leaf.numel() * leaf.element_size()
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor)
            )
            key = (func.__name__.split(".")[0].strip("_"), *_group(args))
            row = self.step.collectives.setdefault(key, [0, 0])
            row[0] += 1
            row[1] += size


_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (1.0, 1.0),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (3.0, 2.0),
    torch.ops.dry_run.fused_attention: (1.0, 1.0),
    torch.ops.dry_run.fused_attention_backward: (3.0, 2.0),
}
"""Matrix products of size s·s·d per head, d the width of queries and that of values: one of each forward, five
backward (scores are computed again)."""


_GROUPED = (torch.ops.aten._grouped_mm,)
"""Products of experts; PyTorch has no FLOP formula for them."""


def _grouped_flop(args: tuple[Any, ...]) -> float:
    """FLOP of products [rows, depth] × [experts, depth, width] by groups of rows, or of their weight gradients
    [depth, rows] × [rows, width]: every row goes through one expert."""
    left, right = args[0], args[1]
    return 2.0 * left.shape[-2] * left.shape[-1] * right.shape[-1]


def _attention_flop(packet: Any, args: tuple[Any, ...]) -> float:
    query, key, value = args[1:4] if packet.__name__.endswith("backward") else args[:3]
    batch, heads, length, width = query.shape
    of_queries, of_values = _ATTENTION[packet]
    products = of_queries * width + of_values * value.shape[3]
    return 2.0 * batch * heads * length * key.shape[2] * products


def _group(args: tuple[Any, ...]) -> tuple[str, int]:
    """What the process group of a collective calls itself (a mesh dimension such as ``tp``), and its ranks.

    ``("", 0)`` when the call does not say.
    """
    for value in args:
        found = None
        if isinstance(value, torch.ScriptObject):
            try:
                found = torch.distributed.ProcessGroup.unbox(value)
            except (RuntimeError, AttributeError):
                continue
        elif isinstance(value, str) and value not in _REDUCTIONS:
            try:
                found = torch.distributed.distributed_c10d._resolve_process_group(value)
            except (RuntimeError, LookupError):
                continue
        if found is not None:
            return str(found.group_desc).removeprefix("mesh_"), int(found.size())
    return "", 0


_REDUCTIONS = ("sum", "avg", "max", "min", "product")


def local(tensor: Any) -> torch.Tensor:
    """The local shard of a distributed tensor; a plain tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def _at_peak(track: StepTrack) -> tuple[int, dict[int, int]]:
    """Largest sum of storages alive during a step, and the size of each at that moment, bytes."""
    now = sum(track.start.values())
    best, best_at = now, 0
    for position, (_, change) in enumerate(track.changes, start=1):
        now += change
        if now > best:
            best, best_at = now, position
    sizes = dict(track.start)
    for number, change in track.changes[:best_at]:
        sizes[number] = sizes.get(number, 0) + change
    return best, sizes


def blocks_at_peak(track: StepTrack, attention: set[int]) -> int:
    """Block-micro-batches whose attention output is held at the peak."""
    _, sizes = _at_peak(track)
    return sum(sizes.get(number, 0) > 0 for number in attention)


def peak_by_kind(track: StepTrack, storages: dict[int, Storage]) -> tuple[int, dict[str, int]]:
    """Largest sum of storages alive during a step, and what they held at that moment, bytes."""
    best, sizes = _at_peak(track)
    kinds: dict[str, int] = defaultdict(int)
    for number, size in sizes.items():
        kinds[storages[number].kind] += size
    return best, dict(kinds)
