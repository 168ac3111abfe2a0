"""The watch over a cluster's head: away for a moment is not gone, gone ends the study in order or at once."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from search_space.errors import UserError
from tuner.cluster.head import HeadWatch
from tuner.cluster.session import ClusterSession


def store(port: int = 0) -> socket.socket:
    """Something that takes connections, as a head's store does."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("127.0.0.1", port))
    server.listen(64)
    return server


def address(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_lost_head_is_told_once_and_raises() -> None:
    server, told, left = store(), threading.Event(), threading.Event()
    watch = HeadWatch(address(server), lambda _: left.set(), look_s=0.05, patience_s=0.3, leave_s=30)
    with watch:
        session = ClusterSession("GPU", None, False, watch)
        session.on_lost(told.set)
        time.sleep(0.3)
        assert session.steady()
        session.check()
        server.close()
        assert told.wait(10)
        assert not session.steady()
        late = threading.Event()
        session.on_lost(late.set)
        assert late.is_set()
        with pytest.raises(UserError, match=r"Ray's head at 127\.0\.0\.1:[0-9]+ is gone .* `tune resume` goes on"):
            session.check()
    assert not left.wait(0.2), "an orderly end needs no other"


def test_a_process_that_does_not_end_is_left() -> None:
    server, left = store(), threading.Event()
    with HeadWatch(address(server), lambda _: left.set(), look_s=0.05, patience_s=0.2, leave_s=0.2) as watch:
        server.close()
        assert left.wait(10) and watch.lost


def test_a_head_that_comes_back_in_time_is_not_lost() -> None:
    server = store()
    where, port = address(server), server.getsockname()[1]
    with HeadWatch(where, pytest.fail, look_s=0.05, patience_s=3.0, leave_s=0.1) as watch:
        server.close()
        time.sleep(0.5)
        with store(port):
            assert watch.steady()
            time.sleep(3.2)
            assert not watch.lost


def test_an_address_that_never_answered_is_not_watched() -> None:
    server = store()
    where = address(server)
    server.close()
    with HeadWatch(where, pytest.fail, look_s=0.05, patience_s=0.1, leave_s=0.1) as watch:
        time.sleep(0.6)
        assert watch.steady() and not watch.lost
    ClusterSession("GPU", None, True).check()
