"""Matrix products of a step by shape: time, rate by 2·M·N·K, efficiency, and what is unfriendly about a shape."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trial_runner.breakdown import names
from trial_runner.breakdown.facts import element_bytes
from trial_runner.breakdown.links import Links
from trial_runner.breakdown.result import MatrixProduct


_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::_scaled_mm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operators that are one matrix product, and the position of its first factor among their inputs."""

FRIENDLY_MULTIPLE = 64
"""Lengths of N and K that are no multiple of this fall to slower kernels on tensor cores."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """One matrix product that ran."""

    place: int
    """Position among the asked rows."""

    shape: tuple[int, int, int]
    """(M, N, K), batches multiplied into M."""

    operator: str
    """Operator."""

    dtype: str
    """Element type of the first factor."""


def find_products(links: Links, rows: NDArray[np.intp]) -> list[Product]:
    """Matrix products among compute events ``rows``, by the shapes recorded with the operators that launched them."""
    trace = links.trace
    shaped = np.array(sorted(trace.shapes), dtype=np.intp)
    shaped = trace.named(shaped, lambda name: name in _PRODUCTS) if len(shaped) else shaped
    if not len(shaped) or not len(rows):
        return []
    if links.on_device:
        gemms = np.array([names.kernel_kind(trace.names[trace.name[row]]) == names.GEMM for row in rows.tolist()], bool)
        places = np.flatnonzero(gemms)
        operators = links.around(rows[places], shaped)
    else:
        places = np.flatnonzero(np.isin(rows, shaped))
        operators = rows[places]
    known: dict[tuple[str, str], tuple[int, int, int] | None] = {}
    products = []
    for place, operator in zip(places.tolist(), operators.tolist()):
        if operator < 0:
            continue
        name, text = trace.names[trace.name[operator]], trace.shapes[operator]
        if (name, text) not in known:
            known[name, text] = product_shape(name, text)
        shape = known[name, text]
        if shape is not None:
            dtype = _first_type(trace.dtypes.get(operator, ""), _PRODUCTS[name])
            products.append(Product(place=place, shape=shape, operator=name, dtype=dtype))
    return products


def product_shape(operator: str, dims: str) -> tuple[int, int, int] | None:
    """(M, N, K) of a product from its recorded input shapes, e.g. ``[[128, 64], [64, 32]]``; None when unreadable."""
    first = _PRODUCTS.get(operator)
    if first is None:
        return None
    try:
        shapes: Any = json.loads(dims)
    except ValueError:
        return None
    if not isinstance(shapes, list) or len(shapes) < first + 2:
        return None
    left, right = shapes[first], shapes[first + 1]
    for shape in (left, right):
        if not isinstance(shape, list) or not 2 <= len(shape) <= 8:
            return None
        if not all(type(n) is int and 0 < n < 1 << 40 for n in shape):
            return None
    if left[-1] != right[-2]:
        return None
    return math.prod(left[:-1]), right[-1], left[-1]


def _first_type(text: str, first: int) -> str:
    try:
        types = json.loads(text)
        return str(types[first])
    except (ValueError, IndexError, TypeError, KeyError):
        return ""


def attainable_flops(m: int, n: int, k: int, dtype: str, peak_flops: float, memory_bandwidth: float) -> float:
    """Roofline of one product, FLOP/s: min(peak, 2·M·N·K / (bytes of both factors and the result) × bandwidth).

    Williams, Waterman, Patterson, "Roofline" (2009). Factors and result are taken to cross memory once; a batch counts
    into M, so the second factor of a batched product is taken once only.

    Args:
        m: rows of the result.
        n: columns of the result.
        k: contracted length.
        dtype: element type as traces write it.
        peak_flops: peak, FLOP/s.
        memory_bandwidth: bytes/s.
    """
    size = element_bytes(dtype) or 4
    return min(peak_flops, 2.0 * m * n * k / (size * (m * k + k * n + m * n)) * memory_bandwidth)


def product_table(
    links: Links,
    rows: NDArray[np.intp],
    products: list[Product],
    peak_flops: float | None,
    memory_bandwidth: float | None = None,
    top: int = 20,
) -> tuple[MatrixProduct, ...]:
    """The products by shape, longest first.

    Args:
        links: the trace.
        rows: compute events of the step.
        products: the products among them.
        peak_flops: peak of the device at the products' precision, FLOP/s.
        memory_bandwidth: of the device, bytes/s.
        top: rows of the table.
    """
    trace = links.trace
    times: dict[tuple[str, tuple[int, int, int], str], list[int]] = defaultdict(list)
    for product in products:
        row = rows[product.place]
        times[product.operator, product.shape, product.dtype].append(int(trace.end[row] - trace.start[row]))
    table = []
    for (operator, (m, n, k), dtype), lengths in sorted(times.items(), key=lambda item: -sum(item[1]))[:top]:
        seconds = sum(lengths) / 1e9
        rate = 2.0 * m * n * k * len(lengths) / seconds if seconds else 0.0
        roof = None
        if peak_flops and memory_bandwidth:
            roof = 100 * rate / attainable_flops(m, n, k, dtype, peak_flops, memory_bandwidth)
        table.append(
            MatrixProduct(
                operator=operator,
                m=m,
                n=n,
                k=k,
                dtype=dtype,
                count=len(lengths),
                time_s=seconds,
                tflops=rate / 1e12,
                efficiency_pct=100 * rate / peak_flops if peak_flops else None,
                roofline_pct=roof,
                note=shape_note(m, n, k) if links.on_device else "",
            )
        )
    return tuple(table)


def shape_note(m: int, n: int, k: int) -> str:
    """What keeps a product of this shape below the peak of tensor cores; empty when nothing stands out."""
    notes = [
        f"{name} {length} is no multiple of {FRIENDLY_MULTIPLE}; pad to {-(-length // 128) * 128}"
        for name, length in (("N", n), ("K", k))
        if length % FRIENDLY_MULTIPLE and length > FRIENDLY_MULTIPLE
    ]
    if n % FRIENDLY_MULTIPLE == 0 and n % 128 and n > 4096:
        notes.append(f"N {n} is no multiple of 128; pad to {-(-n // 128) * 128}")
    if m < 512:
        notes.append(f"M {m} is small; a larger micro-batch or less tensor parallelism makes it longer")
    if 0 < n <= 128 and m >= 512:
        notes.append(f"N {n} is narrow; fuse it with its neighbours (QKV in one product)")
    return "; ".join(notes)
