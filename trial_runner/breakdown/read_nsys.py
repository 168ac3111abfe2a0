"""Reading Nsight Systems' SQLite export (``nsys export --type sqlite``) into the same columns as a JSON trace.

Kernels, copies, fills, runtime calls and NVTX ranges are read. A range named ``ProfilerStep#3``, ``iteration 3``,
``step 3`` or the like is the mark of step 3; ranges of ``torch.autograd.profiler.emit_nvtx`` are operators.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
import re
import sqlite3
from typing import Any
from urllib.parse import quote

import numpy as np

from trial_runner.breakdown.read import find_rank
from trial_runner.breakdown.read import integer_column
from trial_runner.breakdown.read import MAX_EVENTS
from trial_runner.breakdown.read import MAX_NAME
from trial_runner.breakdown.read import MAX_NAMES
from trial_runner.breakdown.read import MAX_THREADS
from trial_runner.breakdown.stream import TraceError
from trial_runner.breakdown.trace import ANNOTATION
from trial_runner.breakdown.trace import KERNEL
from trial_runner.breakdown.trace import MEMORY
from trial_runner.breakdown.trace import OPERATOR
from trial_runner.breakdown.trace import RUNTIME
from trial_runner.breakdown.trace import Trace


_COPIES = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}
"""CUPTI's kinds of copies."""

_STEP = re.compile(r"^(?:profilerstep|train_?step|iteration|iter|step)[ _#:]*(\d{1,9})$", re.IGNORECASE)
_OPERATOR = re.compile(r"^([A-Za-z_][\w:.]*)(?:, op_id = \d+)?, seq = (\d+)")
_LAST = 1 << 61

_TABLES = {
    "CUPTI_ACTIVITY_KIND_KERNEL": ("start", "end", "streamId", "correlationId", "demangledName", "globalPid"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": ("start", "end", "streamId", "correlationId", "copyKind", "globalPid"),
    "CUPTI_ACTIVITY_KIND_MEMSET": ("start", "end", "streamId", "correlationId", "globalPid"),
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("start", "end", "globalTid", "correlationId", "nameId"),
    "NVTX_EVENTS": ("start", "end", "globalTid", "text", "textId"),
}
"""The columns that are read; an absent one reads as nothing."""


def read_nsys(path: Path) -> Trace:
    """Read one export; bounded like the JSON reader, and only plain tables are asked.

    Raises:
        TraceError: the file is damaged, is no such export, or holds the kernels of several processes.
    """
    reader = _Reader(path)
    try:
        connection = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1", uri=True)
        try:
            return reader.read(connection)
        finally:
            connection.close()
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        raise TraceError(f"trace {path}: damaged SQLite file ({error}); export the report again") from None


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[str, int] = {}
        self._threads: dict[Any, int] = {}
        self._parts: list[tuple[np.ndarray, ...]] = []
        self._count = 0
        self._processes: set[int] = set()
        self._broken = 0

    def read(self, connection: sqlite3.Connection) -> Trace:
        connection.execute("PRAGMA trusted_schema = OFF")
        tables = self._tables(connection)
        if "CUPTI_ACTIVITY_KIND_KERNEL" not in tables and "NVTX_EVENTS" not in tables:
            raise TraceError(
                f"trace {self._path}: a SQLite file without CUPTI_ACTIVITY_KIND_KERNEL and NVTX_EVENTS is no Nsight "
                "Systems export; make one with: nsys export --type sqlite"
            )
        strings = self._strings(connection) if "StringIds" in tables else {}
        for table, columns in _TABLES.items():
            if table in tables:
                present = [column if column in tables[table] else "NULL" for column in columns]
                for rows in self._rows(connection, table, present):
                    self._add(table, rows, strings)
        if len(self._processes) > 1:
            raise TraceError(
                f"trace {self._path}: it holds kernels of {len(self._processes)} processes; profile each rank into a "
                "report of its own (nsys profile -o rank%q{RANK})"
            )
        return self._finish(self._origin(connection, tables))

    def _tables(self, connection: sqlite3.Connection) -> dict[str, set[str]]:
        """Columns of the plain tables; views and virtual tables are left out."""
        found = {}
        for name, text in connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' LIMIT 10000"):
            wanted = name in _TABLES or name in ("StringIds", "TARGET_INFO_SESSION_START_TIME")
            if wanted and str(text).upper().startswith("CREATE TABLE"):
                found[name] = {row[1] for row in connection.execute(f'PRAGMA table_info("{name}")')}
        return found

    def _rows(self, connection: sqlite3.Connection, table: str, columns: list[str]) -> Iterator[list[tuple[Any, ...]]]:
        asked = ", ".join(column if column == "NULL" else f'"{column}"' for column in columns)
        cursor = connection.execute(f'SELECT {asked} FROM "{table}"')
        while rows := cursor.fetchmany(20_000):
            self._count += len(rows)
            if self._count > MAX_EVENTS:
                raise TraceError(f"trace {self._path}: more than {MAX_EVENTS:,} events; profile fewer steps")
            yield rows

    def _strings(self, connection: sqlite3.Connection) -> dict[Any, str]:
        query = f"SELECT id, substr(value, 1, {MAX_NAME}) FROM StringIds LIMIT {MAX_NAMES}"
        return {key: str(value) for key, value in connection.execute(query)}

    def _origin(self, connection: sqlite3.Connection, tables: dict[str, set[str]]) -> int:
        """Wall-clock time of time zero, ns; 0 when the export does not say it."""
        if "utcEpochNs" not in tables.get("TARGET_INFO_SESSION_START_TIME", ()):
            return 0
        row = connection.execute("SELECT utcEpochNs FROM TARGET_INFO_SESSION_START_TIME").fetchone()
        return row[0] if row and isinstance(row[0], int) and 0 <= row[0] < _LAST else 0

    def _add(self, table: str, rows: list[tuple[Any, ...]], strings: dict[Any, str]) -> None:
        columns = list(zip(*rows))
        start, end = integer_column(list(columns[0])), integer_column(list(columns[1]))
        keep = (start >= 0) & (end >= start) & (end < _LAST)
        self._broken += int((~keep).sum())
        count = len(rows)
        lanes, sequence = np.full(count, ANNOTATION, dtype=np.int8), np.full(count, -1, dtype=np.int64)
        correlation = np.full(count, -1, dtype=np.int64)
        if table == "NVTX_EVENTS":
            names = [strings.get(key, "") if text is None else str(text)[:MAX_NAME] for text, key in zip(*columns[3:5])]
            for index, name in enumerate(names):
                mark, operator = _STEP.match(name), _OPERATOR.match(name)
                if mark:
                    names[index] = f"ProfilerStep#{mark.group(1)}"
                elif operator:
                    names[index], lanes[index] = operator.group(1), OPERATOR
                    sequence[index] = int(operator.group(2)) if len(operator.group(2)) < 18 else -1
        else:
            correlation = integer_column(list(columns[3]))
            lanes[:] = {"KERNEL": KERNEL, "RUNTIME": RUNTIME}.get(table.rsplit("_", 1)[-1], MEMORY)
            if table.endswith("MEMCPY"):
                names = [_COPIES.get(kind, "Memcpy other") for kind in columns[4]]
            elif table.endswith("MEMSET"):
                names = ["Memset"] * count
            else:
                names = [strings.get(key, f"name {key}"[:MAX_NAME]) for key in columns[4]]
            if table.endswith("KERNEL"):
                self._processes |= {process for process in set(columns[5]) if process is not None}
        known, rows_ = self._names, self._threads
        if len(known) > MAX_NAMES or len(rows_) > MAX_THREADS:
            raise TraceError(f"trace {self._path}: more names or threads than any profile has")
        name_ids = np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int32)
        on_device = lanes[0] in (KERNEL, MEMORY)
        thread = np.array([rows_.setdefault((on_device, str(key)[:100]), len(rows_)) for key in columns[2]], np.int32)
        self._parts.append(tuple(c[keep] for c in (start, end, lanes, name_ids, thread, correlation, sequence)))

    def _finish(self, origin: int) -> Trace:
        if self._parts:
            start, end, lane, name, thread, correlation, sequence = map(np.concatenate, zip(*self._parts))
        else:
            start = end = lane = name = thread = correlation = sequence = np.empty(0, dtype=np.int64)
        order = np.lexsort((-end, start))
        nothing = np.full(len(order), -1, dtype=np.int64)
        return Trace(
            path=self._path,
            rank=find_rank(self._path),
            world_size=None,
            origin_ns=origin,
            start=start[order],
            end=end[order],
            lane=lane[order].astype(np.int8),
            name=name[order].astype(np.int32),
            thread=thread[order].astype(np.int32),
            correlation=correlation[order],
            external=nothing,
            sequence=sequence[order],
            forward_thread=nothing,
            names=list(self._names),
            comm={},
            shapes={},
            dtypes={},
            dropped={"impossible times": self._broken} if self._broken else {},
            num_events=self._count,
        )
