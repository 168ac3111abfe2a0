"""A real MLflow server on loopback, that can be killed and started again on the same store."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
from pathlib import Path
import signal
import socket
import subprocess
import sys
import time
from typing import Any
import urllib.error
import urllib.request


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One server.

    Args:
        folder: its store and artifacts.
        password: of its only user, ``admin``; None for a server without users.
    """

    def __init__(self, folder: Path, password: str | None = None) -> None:
        self.folder, self.port, self._password = folder, free_port(), password
        self.uri = f"http://127.0.0.1:{self.port}"
        self.store = f"sqlite:///{folder}/server.db"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", self.store]
        command += ["--artifacts-destination", str(self.folder / "files")]
        environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
        if self._password is not None:
            config = self.folder / "auth.ini"
            config.write_text(
                "[mlflow]\ndefault_permission = READ\n"
                f"database_uri = sqlite:///{self.folder}/auth.db\nadmin_username = admin\n"
                f"admin_password = {self._password}\n"
                "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
            )
            command += ["--app-name", "basic-auth"]
            environment |= {"MLFLOW_AUTH_CONFIG_PATH": str(config), "MLFLOW_FLASK_SERVER_SECRET_KEY": "of-a-test"}
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + 240
        while not self._answers():
            assert self._process.poll() is None and time.monotonic() < until, (self.folder / "server.log").read_text()
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.uri}/health", timeout=5)
        except urllib.error.HTTPError as error:
            # A server with users asks everybody who they are.
            return error.code == 401
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """kill -9, workers included."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def serving(folder: Path, password: str | None = None) -> Iterator[Server]:
    """A running server."""
    folder.mkdir(parents=True, exist_ok=True)
    server = Server(folder, password)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def client(server: Server) -> Any:
    """A client of the server's store, past its HTTP."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=server.store)
