"""A Prometheus that scrapes one page, for the tests of what Grafana asks it."""

from __future__ import annotations

import json
from pathlib import Path
import signal
import subprocess
import time
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

from tests.services.mlflow_server import free_port


CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: ray
    static_configs: [{{targets: ["{target}"]}}]
"""


class Prometheus:
    """One server on loopback.

    Args:
        folder: where its data and log go.
        target: host and port of the page to scrape.
    """

    def __init__(self, folder: Path, target: str) -> None:
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.format(target=target))
        address = f"127.0.0.1:{free_port()}"
        self._url, self._log = f"http://{address}/api/v1", folder / "prometheus.log"
        command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, f"--web.listen-address={address}"], cwd=folder, stdout=log, stderr=log
            )

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)

    def ask(self, path: str, **values: str) -> Any:
        """The data of one answer of its HTTP API."""
        with urlopen(f"{self._url}/{path}?{urlencode(values)}", timeout=10) as answer:
            found = json.load(answer)
        assert found["status"] == "success", found
        return found["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now: labels and value each."""
        result: list[dict[str, Any]] = self.ask("query", query=expression)["result"]
        return [{**series["metric"], "value": float(series["value"][1])} for series in result]

    def wait_for(self, expression: str, seconds: float = 60.0) -> None:
        """Wait until an expression has a series."""
        until = time.monotonic() + seconds
        while True:
            assert self._process.poll() is None and time.monotonic() < until, self._log.read_text()
            try:
                if self.query(expression):
                    return
            except OSError:
                pass
            time.sleep(0.3)
