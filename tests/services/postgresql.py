"""A private PostgreSQL server from Debian's packages: its own data, loopback only, a password, gone at the end."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
import time

from tests.services.mlflow_server import free_port


USER = "tuner"


def programs() -> Path:
    """Folder of Debian's newest PostgreSQL programs; a missing one fails the tests that need it."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    assert found, "PostgreSQL is missing: apt-get install postgresql"
    return found[-1].parent


def _owner() -> str | None:
    """PostgreSQL refuses to run as root: Debian's package makes a user for it."""
    return "postgres" if os.geteuid() == 0 else None


class Server:
    """One server; ``address`` holds its password."""

    def __init__(self) -> None:
        self._home = Path(tempfile.mkdtemp(prefix="ledgertune-postgresql-"))
        self.password = secrets.token_hex(12)
        self.port = free_port()
        self.address = f"postgresql://{USER}:{self.password}@127.0.0.1:{self.port}/postgres"
        self._process: subprocess.Popen[bytes] | None = None
        pwfile = self._home / "password"
        pwfile.write_text(self.password)
        owner = _owner()
        if owner is not None:
            for path in (self._home, pwfile):
                os.chown(path, pwd.getpwnam(owner).pw_uid, -1)
        command = [str(programs() / "initdb"), "-D", str(self._home / "data"), "-U", USER, "-A", "scram-sha-256"]
        command += [f"--pwfile={pwfile}", "-E", "UTF8", "--no-locale", "--no-sync"]
        done = subprocess.run(command, user=owner, cwd=self._home, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [str(programs() / "postgres"), "-D", str(self._home / "data"), "-p", str(self.port)]
        command += ["-c", "listen_addresses=127.0.0.1", "-k", str(self._home), "-c", "fsync=off"]
        with (self._home / "log").open("ab") as log:
            self._process = subprocess.Popen(command, user=_owner(), cwd=self._home, stdout=log, stderr=log)
        until = time.monotonic() + 60
        ready = [str(programs() / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready).returncode:
            assert self._process.poll() is None and time.monotonic() < until, (self._home / "log").read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        """Stop it at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(30)
            self._process = None

    def remove(self) -> None:
        """Remove its data."""
        shutil.rmtree(self._home, ignore_errors=True)


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A running server."""
    server = Server()
    try:
        server.start()
        yield server
    finally:
        server.stop()
        server.remove()
