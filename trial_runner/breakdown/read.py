"""Reading one profiler trace into columns: any JSON trace of torch.profiler, or Nsight Systems' SQLite export."""

from __future__ import annotations

from collections.abc import Callable
import math
from pathlib import Path
import re
from typing import Any

import msgspec
import numpy as np

from trial_runner.breakdown import names
from trial_runner.breakdown.stream import Args
from trial_runner.breakdown.stream import Event
from trial_runner.breakdown.stream import EventStream
from trial_runner.breakdown.stream import TraceError
from trial_runner.breakdown.trace import ANNOTATION
from trial_runner.breakdown.trace import CommFacts
from trial_runner.breakdown.trace import KERNEL
from trial_runner.breakdown.trace import MEMORY
from trial_runner.breakdown.trace import OPERATOR
from trial_runner.breakdown.trace import PYTHON
from trial_runner.breakdown.trace import RUNTIME
from trial_runner.breakdown.trace import Trace


MAX_EVENTS = 20_000_000
"""Most events kept of one trace (about 60 bytes each)."""

MAX_NAME = 1000
"""Characters of a name that are kept."""

MAX_NAMES = 500_000
"""Distinct names kept; later ones share one."""

_LANES = {
    "kernel": KERNEL,
    "gpu_memcpy": MEMORY,
    "gpu_memset": MEMORY,
    "memcpy": MEMORY,
    "memset": MEMORY,
    "cpu_op": OPERATOR,
    "operator": OPERATOR,
    "user_annotation": ANNOTATION,
    "python_function": PYTHON,
}
_SHAPED = re.compile(
    r"^(aten::(_?scaled_)?(mm|addmm|bmm|baddbmm|linear|matmul|_scaled_mm|_grouped_mm|_scaled_grouped_mm|convolution)$|"
    r"aten::_?(scaled_dot_product|flash_attention|efficient_attention|cudnn_attention))"
)
_ELEMENT_BYTES = {
    "float": 4, "float32": 4, "int": 4, "int32": 4, "double": 8, "float64": 8, "long": 8, "long int": 8, "int64": 8,
    "half": 2, "float16": 2, "bfloat16": 2, "c10::bfloat16": 2, "c10::half": 2, "short": 2, "int16": 2, "byte": 1,
    "char": 1, "bool": 1, "int8": 1, "uint8": 1, "unsigned char": 1, "signed char": 1, "float8_e4m3fn": 1,
    "float8_e5m2": 1, "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1,
}  # fmt: skip
_NO_ARGS = Args()


def read_trace(path: Path) -> Trace:
    """Read one trace.

    JSON is streamed in blocks of 1 MiB and only the columns of :class:`Trace` are kept (about 60 bytes an event, flow
    arrows and Python frames not among them), so a file of 1 GB needs well under 1 GiB of memory. Nothing is unpickled.

    Raises:
        TraceError: the file is missing, cut short, hostile or no trace.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            magic = file.read(16)
    except OSError as error:
        raise TraceError(f"trace {path}: it cannot be opened ({error.strerror}); give the path of a trace") from None
    if magic.startswith(b"SQLite format 3\x00"):
        from trial_runner.breakdown.read_nsys import read_nsys

        return read_nsys(path)
    return _Reader(path).read()


def find_rank(path: Path) -> int | None:
    """Rank from a file name such as ``rank3_trace.json`` or ``worker_rank-12.pt.trace.json.gz``."""
    found = re.search(r"rank[-_.]?(\d{1,7})(?!\d)", path.name, re.IGNORECASE)
    return int(found.group(1)) if found else None


class _Reader:
    """Collects columns batch by batch."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        self._columns: list[tuple[np.ndarray, ...]] = []
        self._kept = self._seen = 0
        self._base: float | None = None
        self._facts: dict[int, CommFacts] = {}
        self._shapes: dict[int, str] = {}
        self._dtypes: dict[int, str] = {}
        self._texts: dict[bytes, str] = {}
        self._dropped: dict[str, int] = {}
        self._group_text: dict[str, str] = {}

    def read(self) -> Trace:
        stream = EventStream(self._path)
        for batch in stream.batches():
            self._seen += len(batch)
            self._add(batch)
            if self._kept > MAX_EVENTS:
                raise TraceError(f"trace {self._path}: more than {MAX_EVENTS:,} events; profile fewer steps")
        return self._finish(stream.header)

    def _add(self, batch: list[Event]) -> None:
        lanes: list[int] = []
        events: list[Event] = []
        for event in batch:
            if event.ph == "X":
                lane = self._lane(event)
                if lane is not None:
                    lanes.append(lane)
                    events.append(event)
        if not events:
            return
        args = [event.args or _NO_ARGS for event in events]
        start, length = _floats([e.ts for e in events]), _floats([e.dur for e in events])
        known = self._names
        name = [known.setdefault(e.name, len(known)) for e in events]
        rows = self._threads
        thread = [rows.setdefault((e.pid, e.tid), len(rows)) for e in events]
        columns: list[np.ndarray] = [
            np.array(lanes, dtype=np.int8),
            np.array(name, dtype=np.int32),
            np.array(thread, dtype=np.int32),
            _integers([a.correlation for a in args]),
            _integers([a.external for a in args]),
            _integers([a.sequence for a in args]),
            _integers([a.forward_thread for a in args]),
        ]
        keep = self._sound(start, length, np.array(lanes))
        if self._base is None and keep.any():
            self._base = math.floor(float(start[keep].min()))
        base = self._base or 0.0
        start_ns = np.rint((start[keep] - base) * 1000).astype(np.int64)
        length_ns = np.rint(np.nan_to_num(length[keep]) * 1000).astype(np.int64)
        first = self._kept
        self._columns.append((start_ns, start_ns + length_ns, *(column[keep] for column in columns)))
        self._kept += len(start_ns)
        self._details(events, args, first, keep)

    def _lane(self, event: Event) -> int | None:
        """Lane of a complete event, or None when the breakdown has no use for it."""
        category, name = event.cat, event.name
        if type(category) is not str:
            return None
        lane = _LANES.get(category)
        if lane is None:
            lowered = category.lower()
            lane = _LANES.get(lowered)
            if lane is None:
                if not lowered.endswith(("runtime", "driver")):
                    return None
                lane = RUNTIME
        if type(name) is not str:
            event.name = name = str(name)
        if len(name) > MAX_NAME:
            event.name = name = name[:MAX_NAME]
        if lane == PYTHON and not names.is_kept_python(name):
            return None
        if len(self._names) >= MAX_NAMES and name not in self._names:
            event.name = "(other names)"
        if type(event.pid) not in _KEYS or type(event.tid) not in _KEYS or len(self._threads) > 100_000:
            event.pid = event.tid = None
        return lane

    def _sound(self, start: np.ndarray, length: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """Which events have times that can be: finite, not before 1970, no negative or endless durations."""
        no_time = ~np.isfinite(start) | (np.abs(start) > 8e15)
        zero = ~no_time & (start == 0) & (np.nan_to_num(length) == 0)
        missing = np.isnan(length)
        endless = ~missing & (~np.isfinite(length) | (length > 1e14) | (length < 0))
        far = np.zeros(len(start), dtype=bool)
        if self._base is not None:
            far = ~no_time & ~zero & (np.abs(start - self._base) > 4e15)
        for reason, flags in (
            ("no time", no_time),
            ("time zero and no duration", zero),
            ("negative or endless duration", endless & ~no_time & ~zero),
            ("far from all other events", far),
        ):
            self._count(reason, int(flags.sum()))
        self._count("duration missing, taken as 0", int((missing & ~no_time & ~zero).sum()))
        return ~(no_time | zero | endless | far)

    def _count(self, reason: str, number: int) -> None:
        if number:
            self._dropped[reason] = self._dropped.get(reason, 0) + number

    def _details(self, events: list[Event], args: list[Args], first: int, keep: np.ndarray) -> None:
        """Shapes of matrix products and what the trace says of communication."""
        rows = first + np.cumsum(keep) - 1
        for index, (event, arg) in enumerate(zip(events, args)):
            if arg is _NO_ARGS or not keep[index]:
                continue
            row = int(rows[index])
            if arg.collective is not None or arg.nelems_in is not None:
                self._facts[row] = _comm_facts(arg)
                if isinstance(arg.group_text, str) and len(self._group_text) < 10_000:
                    self._group_text[str(arg.group_name)] = arg.group_text
            elif event.cat != "kernel" and len(arg.dims):
                name = event.name
                if _is_shaped(name):
                    self._shapes[row] = self._text(arg.dims)
                    self._dtypes[row] = self._text(arg.types)
                elif names.is_comm_operator(name):
                    size = _input_bytes(arg)
                    self._facts[row] = CommFacts(kind=names.collective_kind(name), size_bytes=size)

    def _text(self, raw: msgspec.Raw) -> str:
        data = bytes(raw)
        found = self._texts.get(data)
        if found is None:
            found = data[:2000].decode("utf-8", "replace")
            if len(self._texts) < 100_000:
                self._texts[data] = found
        return found

    def _finish(self, header: dict[str, Any]) -> Trace:
        if self._columns:
            merged = [np.concatenate(parts) for parts in zip(*self._columns)]
        else:
            merged = [np.empty(0, dtype=np.int64) for _ in range(9)]
        self._columns.clear()
        start, end, lane, name, thread, correlation, external, sequence, forward = merged
        order = np.lexsort((-end, start))
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        info = header.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        groups = [g for g in info.get("pg_config") or [] if isinstance(g, dict)] if info else []
        base = header.get("baseTimeNanoseconds")
        base_ns = base if isinstance(base, int) and 0 <= base < 1 << 62 else 0
        devices = header.get("deviceProperties")
        return Trace(
            path=self._path,
            rank=_whole(info.get("rank")) if "rank" in info else find_rank(self._path),
            world_size=_whole(info.get("world_size")),
            backend=str(info.get("backend") or ""),
            group_names=_told({str(g.get("pg_name")): str(g.get("pg_desc") or "") for g in groups} | self._group_text),
            group_sizes={str(g.get("pg_name")): _whole(g.get("pg_size")) or 0 for g in groups},
            group_ranks={str(g.get("pg_name")): _ranks(g.get("ranks")) for g in groups},
            devices=tuple(str(d.get("name")) for d in devices or () if isinstance(d, dict)),
            origin_ns=base_ns + int(self._base or 0) * 1000,
            start=start[order],
            end=end[order],
            lane=lane[order].astype(np.int8),
            name=name[order].astype(np.int32),
            thread=thread[order].astype(np.int32),
            correlation=correlation[order],
            external=external[order],
            sequence=sequence[order],
            forward_thread=forward[order],
            names=list(self._names),
            comm={int(place[row]): facts for row, facts in self._facts.items()},
            shapes={int(place[row]): text for row, text in self._shapes.items()},
            dtypes={int(place[row]): text for row, text in self._dtypes.items()},
            dropped=self._dropped,
            num_events=self._seen,
        )


_KEYS = (int, str, type(None), float)
_shaped_cache: dict[str, bool] = {}


def _is_shaped(name: str) -> bool:
    known = _shaped_cache.get(name)
    if known is None:
        known = bool(_SHAPED.match(name))
        if len(_shaped_cache) < 100_000:
            _shaped_cache[name] = known
    return known


def _floats(values: list[Any]) -> np.ndarray:
    """Microseconds as float64; what is no number becomes NaN. Text such as ``"1495175212670.754"`` is a number."""
    return _column(values, np.float64, lambda value: _one(value, float, math.nan))


def _integers(values: list[Any]) -> np.ndarray:
    """Identifiers as int64; what is none becomes -1."""
    return _column(values, np.int64, _identifier)


def _column(values: list[Any], dtype: type, mend: Callable[[Any], Any]) -> np.ndarray:
    """All values at once where they are plain numbers, else one by one through ``mend``."""
    try:
        found: np.ndarray = np.array(values, dtype=dtype)
        if found.shape == (len(values),):
            return found
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([mend(value) for value in values], dtype=dtype)


def _identifier(value: Any) -> int:
    number = _one(value, int, -1)
    return int(number) if -(1 << 62) < number < 1 << 62 else -1


def _one(value: Any, convert: Callable[[Any], Any], missing: Any) -> Any:
    if isinstance(value, (int, float, str)):
        try:
            return convert(value)
        except (ValueError, OverflowError):
            return missing
    return missing


def _told(texts: dict[str, str]) -> dict[str, str]:
    """Descriptions of groups that say something."""
    return {name: text for name, text in texts.items() if text and text != "undefined"}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else None


def _comm_facts(arg: Args) -> CommFacts:
    """Facts from the arguments of ``record_param_comms`` or of an NCCL kernel."""
    sizes = [n for n in (_whole_number(arg.nelems_in), _whole_number(arg.nelems_out)) if n is not None]
    element = _ELEMENT_BYTES.get(str(arg.dtype).lower())
    text = arg.group_text if isinstance(arg.group_text, str) and arg.group_text != "undefined" else ""
    name = str(arg.group_name) if isinstance(arg.group_name, (str, int)) else ""
    return CommFacts(
        kind=names.collective_kind(str(arg.collective)) if arg.collective else "",
        size_bytes=max(sizes) * element if sizes and element else None,
        group=name or text,
        members=_ranks(arg.group_ranks),
        group_size=_whole(arg.group_size),
    )


def _ranks(value: Any) -> tuple[int, ...]:
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


def _input_bytes(arg: Args) -> int | None:
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
        element = _ELEMENT_BYTES.get(str(kind).lower())
        if element and isinstance(shape, list) and all(isinstance(n, int) and 0 <= n < 1 << 40 for n in shape):
            total, known = total + math.prod(shape) * element, True
    return total if known else None
