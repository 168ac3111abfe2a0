"""Watches the head of a joined cluster, so that a study ends in order when it has gone.

Unwatched, every call to Ray's control store blocks until Ray ends the process itself, a minute later and by a line of
its own log.
"""

from __future__ import annotations

from collections.abc import Callable
import os
import socket
import sys
import threading
import time


LOOK_S = 2.0
"""Time between two looks, seconds."""

PATIENCE_S = 20.0
"""How long the head may be away: one with a store of its own comes back in that time."""

LEAVE_S = 25.0
"""How long an orderly end may take after that; Ray would end the process after about a minute in all."""

LEFT = 2
"""Exit code of a process that had to leave at once."""


class HeadWatch:
    """A thread that looks whether the head's control store takes connections; use it as a context.

    Args:
        address: the store's address, ``host:port``.
        leave: called when the process does not end in order; None: say why and leave at once.
        look_s: see :data:`LOOK_S`.
        patience_s: see :data:`PATIENCE_S`.
        leave_s: see :data:`LEAVE_S`.
    """

    def __init__(
        self,
        address: str,
        leave: Callable[[str], None] | None = None,
        *,
        look_s: float = LOOK_S,
        patience_s: float = PATIENCE_S,
        leave_s: float = LEAVE_S,
    ) -> None:
        host, _, port = address.rpartition(":")
        self.address, self._target = address, (host.strip("[]"), int(port) if port.isdecimal() else 0)
        self._look_s, self._patience_s, self._leave_s = look_s, patience_s, leave_s
        self._leave = leave or _leave
        self._tell: Callable[[], None] | None = None
        self._end = threading.Event()
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="head watch", daemon=True)

    def __enter__(self) -> HeadWatch:
        # An address that cannot be reached from here, as through Ray's client, says nothing about the head.
        if self.answers():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    @property
    def lost(self) -> bool:
        """Whether the head was away for longer than patience."""
        return self._lost.is_set()

    @property
    def text(self) -> str:
        """What is said of a lost head."""
        return (
            f"Ray's head at {self.address} is gone (no connection for {self._patience_s:g} s). What was measured is "
            "kept. Start the head again, then `tune resume` goes on"
        )

    def on_lost(self, tell: Callable[[], None]) -> None:
        """Have something called, in the watch's thread, once the head is lost; at once if it is."""
        self._tell = tell
        if self.lost:
            tell()

    def steady(self) -> bool:
        """Wait while the head is away; whether it is there in the end. Asked before a call to it, which would hang."""
        while self._thread.is_alive() and not self.lost and not self.answers():
            time.sleep(self._look_s / 4)
        return not self.lost

    def answers(self) -> bool:
        """Whether the store takes a connection now."""
        try:
            with socket.create_connection(self._target, timeout=self._look_s):
                return True
        except OSError:
            return False

    def _watch(self) -> None:
        seen = time.monotonic()
        while not self._end.wait(self._look_s):
            if self.answers():
                seen = time.monotonic()
            elif time.monotonic() - seen > self._patience_s:
                break
        else:
            return
        self._lost.set()
        if self._tell is not None:
            self._tell()
        if not self._end.wait(self._leave_s):
            self._leave(self.text)


def _leave(text: str) -> None:
    print(f"tune: {text}", file=sys.stderr, flush=True)
    os._exit(LEFT)
