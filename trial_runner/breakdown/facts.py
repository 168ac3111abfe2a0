"""What the arguments of an event say about communication."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from trial_runner.breakdown import names
from trial_runner.breakdown.stream import Args
from trial_runner.breakdown.trace import CommFacts


_ELEMENT_BYTES = {
    "float": 4, "float32": 4, "int": 4, "int32": 4, "double": 8, "float64": 8, "long": 8, "long int": 8, "int64": 8,
    "half": 2, "float16": 2, "bfloat16": 2, "c10::bfloat16": 2, "c10::half": 2, "short": 2, "int16": 2, "byte": 1,
    "char": 1, "bool": 1, "int8": 1, "uint8": 1, "unsigned char": 1, "signed char": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1,
}  # fmt: skip


def element_bytes(dtype: object) -> int | None:
    """Bytes of one element of a type as traces write it (``c10::BFloat16``, ``float``); None when it is not known."""
    return _ELEMENT_BYTES.get(str(dtype).lower())


def comm_facts(arg: Args) -> CommFacts:
    """Facts from the arguments of ``record_param_comms`` or of an NCCL kernel."""
    sizes = [n for n in (_whole_number(arg.nelems_in), _whole_number(arg.nelems_out)) if n is not None]
    element = element_bytes(arg.dtype)
    text = arg.group_text if isinstance(arg.group_text, str) and arg.group_text != "undefined" else ""
    name = str(arg.group_name) if isinstance(arg.group_name, (str, int)) else ""
    return CommFacts(
        kind=names.collective_kind(str(arg.collective)) if arg.collective else "",
        size_bytes=max(sizes) * element if sizes and element else None,
        group=name or text,
        members=rank_list(arg.group_ranks),
        group_size=whole(arg.group_size),
    )


def rank_list(value: Any) -> tuple[int, ...]:
    """Ranks from a list or its text; empty when cut short (``[0, 1, ...]``) or absent."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value[:100_000])
        except (msgspec.MsgspecError, RecursionError):
            return ()
    if isinstance(value, list) and len(value) <= 1 << 20 and all(isinstance(rank, int) for rank in value):
        return tuple(value)
    return ()


def _whole_number(value: Any) -> int | None:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else None


def input_bytes(arg: Args) -> int | None:
    """Bytes of the inputs that an annotation lists, from ``Input Dims`` and ``Input type``."""
    try:
        dims = msgspec.json.decode(arg.dims)
        types = msgspec.json.decode(arg.types) if len(arg.types) else []
    except (msgspec.MsgspecError, RecursionError):
        return None
    if not isinstance(dims, list) or not isinstance(types, list):
        return None
    total, known = 0, False
    for shape, kind in zip(dims, types):
        element = element_bytes(kind)
        if element and isinstance(shape, list) and all(isinstance(n, int) and 0 <= n < 1 << 40 for n in shape):
            total, known = total + math.prod(shape) * element, True
    return total if known and total < 1 << 62 else None


def whole(value: Any) -> int | None:
    """A count as the trace says it; None when it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None
