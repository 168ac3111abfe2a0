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
from trial_runner.breakdown.facts import comm_facts
from trial_runner.breakdown.facts import input_bytes
from trial_runner.breakdown.facts import rank_list
from trial_runner.breakdown.facts import whole
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


MAX_EVENTS = 10_000_000
"""Most events kept of one trace (about 60 bytes each, twice that for a moment while they are sorted)."""

MAX_NAME = 500
"""Characters of a name that are kept."""

MAX_NAMES = 50_000
"""Distinct names kept; later ones share one."""

MAX_THREADS = 20_000
"""Most threads and streams in one trace."""

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
        self._lanes = dict(_LANES)
        self._python: dict[str, bool] = {}
        self._names: dict[str, int] = {}
        self._clean: list[str] = []
        self._detailed: list[bool] = []
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
        known, wanted = self._lanes, self._python
        for event in batch:
            if event.ph == "X":
                try:
                    lane = known[event.cat]
                except (KeyError, TypeError):
                    lane = self._new_category(event.cat)
                if lane >= 0 and (lane != PYTHON or _asked(wanted, event.name)):
                    lanes.append(lane)
                    events.append(event)
        if not events:
            return
        args = [event.args or _NO_ARGS for event in events]
        start, length = _floats([e.ts for e in events]), _floats([e.dur for e in events])
        name = self._name_ids(events)
        columns: list[np.ndarray] = [
            np.array(lanes, dtype=np.int8),
            name,
            self._thread_ids(events),
            integer_column([a.correlation for a in args]),
            integer_column([a.external for a in args]),
            integer_column([a.sequence for a in args]),
            integer_column([a.forward_thread for a in args]),
        ]
        keep = self._sound(start, length)
        if self._base is None and keep.any():
            self._base = math.floor(float(start[keep].min()))
        base = self._base or 0.0
        start_ns = np.rint((start[keep] - base) * 1000).astype(np.int64)
        length_ns = np.rint(np.nan_to_num(length[keep]) * 1000).astype(np.int64)
        first = self._kept
        self._columns.append((start_ns, start_ns + length_ns, *(column[keep] for column in columns)))
        self._kept += len(start_ns)
        detailed = np.flatnonzero(keep & np.array(self._detailed, dtype=bool)[name])
        rows = first + np.cumsum(keep) - 1
        for index in detailed.tolist():
            if args[index] is not _NO_ARGS:
                self._details(lanes[index], self._clean[name[index]], args[index], int(rows[index]))

    def _new_category(self, category: Any) -> int:
        """Lane of a category seen for the first time; -1 when the breakdown has no use for it."""
        if type(category) is not str:
            return -1
        lowered = category.lower()
        lane = _LANES.get(lowered, RUNTIME if lowered.endswith(("runtime", "driver")) else -1)
        if len(self._lanes) < 1000:
            self._lanes[category] = lane
        return lane

    def _name_ids(self, events: list[Event]) -> np.ndarray:
        """Number of each event's name, shape (n,); new names are cleaned and looked at once."""
        ids = self._names
        try:
            found = [ids.get(event.name, -1) for event in events]
        except TypeError:
            for event in events:
                event.name = event.name if type(event.name) is str else str(event.name)
            found = [ids.get(event.name, -1) for event in events]
        for index, number in enumerate(found):
            if number < 0:
                found[index] = self._new_name(events[index].name)
        return np.array(found, dtype=np.int32)

    def _new_name(self, name: Any) -> int:
        if name in self._names:
            return self._names[name]
        text = name if type(name) is str else str(name)
        if len(self._clean) > MAX_NAMES:
            return len(self._clean) - 1
        clean = "(other names)" if len(self._clean) == MAX_NAMES else text[:MAX_NAME]
        clean = clean.encode("utf-8", "replace").decode()
        self._clean.append(clean)
        communicates = names.is_comm_operator(clean) or names.kernel_kind(clean) == names.COMMUNICATION
        self._detailed.append(communicates or bool(_SHAPED.match(clean)))
        if len(text) <= MAX_NAME:
            self._names[name] = len(self._clean) - 1
        return len(self._clean) - 1

    def _thread_ids(self, events: list[Event]) -> np.ndarray:
        """Number of each event's (process, thread), shape (n,)."""
        rows = self._threads
        try:
            found = [rows.setdefault((event.pid, event.tid), len(rows)) for event in events]
        except TypeError:
            keys = [(repr(event.pid)[:100], repr(event.tid)[:100]) for event in events]
            found = [rows.setdefault(key, len(rows)) for key in keys]
        if len(rows) > MAX_THREADS:
            raise TraceError(f"trace {self._path}: more than {MAX_THREADS:,} threads; this is no profiler trace")
        return np.array(found, dtype=np.int32)

    def _sound(self, start: np.ndarray, length: np.ndarray) -> np.ndarray:
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

    def _details(self, lane: int, name: str, arg: Args, row: int) -> None:
        """Keep the shapes of a matrix product, or what the trace says of a communication."""
        if arg.collective is not None or arg.nelems_in is not None:
            self._facts[row] = comm_facts(arg)
            if isinstance(arg.group_text, str) and len(self._group_text) < 10_000:
                self._group_text[str(arg.group_name)] = arg.group_text
        elif lane != KERNEL and len(arg.dims):
            if _SHAPED.match(name):
                self._shapes[row] = self._text(arg.dims)
                self._dtypes[row] = self._text(arg.types)
            else:
                self._facts[row] = CommFacts(kind=names.collective_kind(name), size_bytes=input_bytes(arg))

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
            rank=find_rank(self._path) if whole(info.get("rank")) is None else whole(info.get("rank")),
            world_size=whole(info.get("world_size")),
            backend=str(info.get("backend") or ""),
            group_names=_told({str(g.get("pg_name")): str(g.get("pg_desc") or "") for g in groups} | self._group_text),
            group_sizes={str(g.get("pg_name")): whole(g.get("pg_size")) or 0 for g in groups},
            group_ranks={str(g.get("pg_name")): rank_list(g.get("ranks")) for g in groups},
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
            names=self._clean,
            comm={int(place[row]): facts for row, facts in self._facts.items()},
            shapes={int(place[row]): text for row, text in self._shapes.items()},
            dtypes={int(place[row]): text for row, text in self._dtypes.items()},
            dropped=self._dropped,
            num_events=self._seen,
        )


def _asked(known: dict[str, bool], name: Any) -> bool:
    """Whether a Python frame says something that the breakdown uses."""
    try:
        return known[name]
    except (KeyError, TypeError):
        answer = type(name) is str and names.is_kept_python(name[:MAX_NAME])
        if type(name) is str and len(known) < MAX_NAMES and len(name) <= MAX_NAME:
            known[name] = answer
        return answer


def _floats(values: list[Any]) -> np.ndarray:
    """Microseconds as float64; what is no number becomes NaN. Text such as ``"1495175212670.754"`` is a number."""
    return _column(values, np.float64, lambda value: _one(value, float, math.nan))


def integer_column(values: list[Any]) -> np.ndarray:
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
