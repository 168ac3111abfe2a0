"""Streaming a Chrome trace: the events in bounded batches, then the other keys of the file.

A file is never held whole. It is read in blocks; each block is cut after the last complete event and decoded with
typed fields, so that what the breakdown does not use is skipped without being built. A cut is right exactly when the
piece decodes: a piece that ends inside a string or a nested value is no valid list. Where the quick guess at a cut is
wrong, or a piece does not decode, an exact scan of its brackets finds the cut.
"""

from __future__ import annotations

from collections.abc import Iterator
import gzip
import json
from pathlib import Path
import re
from typing import Any
from typing import BinaryIO
import zlib

import msgspec
import numpy as np

from search_space.errors import UserError


BLOCK_BYTES = 1 << 20
"""Bytes read at once."""

MAX_ITEM_BYTES = 32 << 20
"""Largest single event, and largest head or tail of a file beside its events."""

MAX_BYTES = 16 << 30
"""Largest trace, unpacked."""

MAX_DEPTH = 64
"""Deepest nesting of brackets inside the list of events."""


class Args(msgspec.Struct, gc=False):
    """The arguments of an event that the breakdown reads."""

    correlation: Any = -1
    external: Any = msgspec.field(default=-1, name="External id")
    sequence: Any = msgspec.field(default=-1, name="Sequence number")
    forward_thread: Any = msgspec.field(default=-1, name="Fwd thread id")
    stream: Any = -1
    dims: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=msgspec.Raw(b""), name="Input type")
    collective: Any = msgspec.field(default=None, name="Collective name")
    nelems_in: Any = msgspec.field(default=None, name="In msg nelems")
    nelems_out: Any = msgspec.field(default=None, name="Out msg nelems")
    dtype: Any = None
    group_size: Any = msgspec.field(default=None, name="Group size")
    group_name: Any = msgspec.field(default=None, name="Process Group Name")
    group_text: Any = msgspec.field(default=None, name="Process Group Description")
    group_ranks: Any = msgspec.field(default=None, name="Process Group Ranks")
    label: Any = msgspec.field(default=None, name="name")


class Event(msgspec.Struct, gc=False):
    """One event of a Chrome trace; every field may be absent or of any type."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    args: Args | None = None


_DECODE = msgspec.json.Decoder(list[Event])
_EVENTS_KEY = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_COLON = re.compile(rb"\s*:\s*")


class TraceError(UserError):
    """A trace that cannot be read; the message names the file and what to do."""


def open_trace(path: Path) -> BinaryIO:
    """Open a trace, unpacking gzip by its first bytes and not by its name.

    Raises:
        TraceError: there is no such file.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise TraceError(f"trace {path}: it cannot be opened ({error.strerror}); give the path of a trace") from None
    magic = file.read(2)
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if magic == b"\x1f\x8b" else file  # type: ignore[return-value]


class EventStream:
    """The events of one file in batches, and, once they are through, the rest of the file in :attr:`header`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.header: dict[str, Any] = {}
        """Top-level keys beside the events; complete after the last batch."""
        self._bytes = 0
        self._events = 0
        self._quick: list[Event] = []
        self._quick_cut = 0

    def batches(self) -> Iterator[list[Event]]:
        """Lists of events, some thousands each.

        Raises:
            TraceError: no JSON trace, cut short, nested too deep, or larger than the bounds of this module.
        """
        with open_trace(self._path) as file:
            buffer, head = self._head(file)
            last = False
            while True:
                cut, end = self._scan(buffer) if last else self._cut(buffer)
                if cut:
                    events = self._decode(buffer[:cut])
                    self._events += len(events)
                    yield events
                if end is not None:
                    tail = buffer[end + 1 :]
                    break
                if last:
                    raise self._incomplete()
                if cut:
                    buffer = buffer[cut:].lstrip(b" \t\r\n,")
                block = self._read(file, max(BLOCK_BYTES, len(buffer)))
                last = not block
                buffer += block
                if len(buffer) > MAX_ITEM_BYTES:
                    raise TraceError(
                        f"trace {self._path}: a single event is larger than {MAX_ITEM_BYTES >> 20} MiB after event "
                        f"{self._events}; this is no profiler trace"
                    )
            self._tail(file, head, tail)

    def _read(self, file: BinaryIO, size: int = BLOCK_BYTES) -> bytes:
        try:
            block = file.read(size)
        except EOFError:
            raise self._incomplete() from None
        except (OSError, zlib.error) as error:
            raise TraceError(
                f"trace {self._path}: incomplete or damaged gzip data after event {self._events} ({error}); "
                "copy the file again or record the trace anew"
            ) from None
        self._bytes += len(block)
        if self._bytes > MAX_BYTES:
            raise TraceError(f"trace {self._path}: larger than {MAX_BYTES >> 30} GiB unpacked; profile fewer steps")
        return block

    def _incomplete(self) -> TraceError:
        return TraceError(
            f"trace {self._path}: incomplete trace, it ends after {self._bytes} bytes and {self._events} events "
            "without closing its list of events; the process was stopped while writing, or the copy was cut"
        )

    def _head(self, file: BinaryIO) -> tuple[bytes, bytes | None]:
        """Read up to the first event: (bytes after the opening bracket, head of the object or None for a bare list)."""
        buffer = self._read(file)
        start = buffer.removeprefix(b"\xef\xbb\xbf").lstrip()
        if start[:1] == b"[":
            return start[1:].lstrip(), None
        if start[:1] != b"{":
            what = "an empty file" if not buffer.strip() else f"a file that starts with {start[:12]!r}"
            raise TraceError(
                f"trace {self._path}: expected a Chrome trace (JSON, also .gz) or a SQLite export of Nsight Systems, "
                f"found {what}"
            )
        while True:
            found = _find_events(start)
            if found is not None:
                return start[found + 1 :].lstrip(), start[:found]
            block = self._read(file)
            if not block:
                raise TraceError(
                    f'trace {self._path}: no list "traceEvents" in it; is this another kind of JSON, or was it cut?'
                )
            if len(start) > MAX_ITEM_BYTES:
                raise TraceError(f"trace {self._path}: more than {MAX_ITEM_BYTES >> 20} MiB before the first event")
            start += block

    def _cut(self, buffer: bytes) -> tuple[int, int | None]:
        """Where the complete events end, and where the list of events closes (None: not in this buffer)."""
        guess = _last_boundary(buffer)
        if guess:
            try:
                self._quick, self._quick_cut = _DECODE.decode(b"[" + buffer[:guess] + b"]"), guess
                return guess, None
            except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
                pass
        return self._scan(buffer)

    def _decode(self, piece: bytes) -> list[Event]:
        if self._quick_cut == len(piece):
            events, self._quick, self._quick_cut = self._quick, [], 0
            return events
        try:
            return _DECODE.decode(b"[" + piece + b"]")
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            return self._leniently(piece)

    def _scan(self, buffer: bytes) -> tuple[int, int | None]:
        """:meth:`_cut` by the brackets outside strings, for any spelling of JSON."""
        position, depth = brackets(buffer)
        if len(depth) and int(depth.max()) > MAX_DEPTH:
            raise TraceError(
                f"trace {self._path}: values nested deeper than {MAX_DEPTH} after event {self._events}; "
                "this is no profiler trace"
            )
        closing = np.flatnonzero(depth < 0)
        end = None
        if len(closing):
            end = int(position[closing[0]])
            if buffer[end : end + 1] != b"]":
                raise TraceError(f"trace {self._path}: not valid JSON after event {self._events}: unbalanced brackets")
            depth, position = depth[: closing[0]], position[: closing[0]]
        ends = np.flatnonzero(depth == 0)
        cut = int(position[ends[-1]]) + 1 if len(ends) else 0
        if end is not None and buffer[cut:end].strip(b" \t\r\n,"):
            raise TraceError(f"trace {self._path}: not valid JSON after event {self._events}: text between events")
        return cut, end

    def _leniently(self, piece: bytes) -> list[Event]:
        """Decode event by event what is not strict JSON: NaN, infinities, broken UTF-8, arguments of a wrong type."""
        position, depth = brackets(piece)
        ends = position[np.flatnonzero(depth == 0)] + 1
        events: list[Event] = []
        start = 0
        for end in ends.tolist():
            text = piece[start:end].lstrip(b" \t\r\n,").decode("utf-8", errors="replace")
            start = end
            try:
                value = json.loads(text, strict=False)
            except (ValueError, RecursionError) as error:
                where = self._events + len(events)
                raise TraceError(f"trace {self._path}: not valid JSON in event {where}: {error}") from None
            events.append(_plain_event(value))
        return events

    def _tail(self, file: BinaryIO, head: bytes | None, tail: bytes) -> None:
        """Read what follows the events and decode the object around them."""
        while block := self._read(file):
            tail += block
            if len(tail) > MAX_ITEM_BYTES:
                raise TraceError(f"trace {self._path}: more than {MAX_ITEM_BYTES >> 20} MiB after the last event")
        if head is None:
            return
        try:
            self.header = msgspec.json.decode(head + b"null" + tail.rstrip(b"\x00 \t\r\n"), type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            try:
                self.header = dict(json.loads((head + b"null" + tail).decode("utf-8", "replace"), strict=False))
            except (ValueError, TypeError, RecursionError):
                if not tail.strip():
                    raise self._incomplete() from None
                raise TraceError(
                    f"trace {self._path}: not valid JSON after the last of {self._events} events"
                ) from None


def _find_events(head: bytes) -> int | None:
    """Position of the bracket that opens the top-level list ``traceEvents``."""
    depth = 0
    for token in _EVENTS_KEY.finditer(head):
        text = token.group()
        if text in (b"{", b"["):
            depth += 1
        elif text in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and text == b'"traceEvents"':
            colon = _COLON.match(head, token.end())
            if colon and head[colon.end() : colon.end() + 1] == b"[":
                return colon.end()
    return None


def _last_boundary(buffer: bytes) -> int:
    """A likely end of the last complete event: the last ``}`` that a comma and ``{`` follow; 0 when there is none."""
    end = len(buffer)
    for _ in range(64):
        opening = buffer.rfind(b"{", 0, end)
        if opening <= 0:
            return 0
        before = buffer[max(0, opening - 64) : opening].rstrip()
        if before.endswith(b","):
            closed = before[:-1].rstrip()
            if closed.endswith(b"}"):
                return opening - min(64, opening) + len(closed)
        end = opening
    return 0


_STEP = np.zeros(256, dtype=np.int8)
_STEP[[0x7B, 0x5B]] = 1
_STEP[[0x7D, 0x5D]] = -1


def brackets(buffer: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the brackets outside strings and the nesting depth after each; both of shape (n,)."""
    text = np.frombuffer(buffer, dtype=np.uint8)
    quotes = np.flatnonzero(text == 0x22)
    if len(quotes) and b"\\" in buffer:
        plain = np.flatnonzero(text != 0x5C)
        before = np.searchsorted(plain, quotes) - 1
        run = quotes - 1 - np.where(before >= 0, plain[np.maximum(before, 0)], -1)
        quotes = quotes[run % 2 == 0]
    position = np.flatnonzero(_STEP[text])
    position = position[np.searchsorted(quotes, position) % 2 == 0]
    return position, np.cumsum(_STEP[text[position]], dtype=np.int32)


def _plain_event(value: Any) -> Event:
    """An event of any JSON value; what has no meaning stays absent."""
    if not isinstance(value, dict):
        return Event()
    event = Event(*(value.get(key) for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur")))
    given = value.get("args")
    if isinstance(given, dict):
        known = {}
        for field in msgspec.structs.fields(Args):
            if field.encode_name in given:
                found = given[field.encode_name]
                if field.name in ("dims", "types"):
                    found = msgspec.Raw(json.dumps(found).encode())
                known[field.name] = found
        event.args = Args(**known)
    return event
