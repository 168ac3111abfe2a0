"""`tune ui`: the MLflow pages of a study, on loopback."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from tuner.cli.sync import send_waiting


SYNC_S = 120.0
"""Longest time to send what waits before the pages open, seconds."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("ui", help="open the MLflow pages of a study")
    parser.add_argument("study", nargs="?", help="name or folder (default: the newest)")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: 5000 if free)")
    parser.add_argument("--json", action="store_true", help="print the URLs as one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start `mlflow ui` on the study's store, print every URL, and stay until Ctrl-C; a study with a server of its own
    sends what waits and prints that server's URLs.

    Raises:
        UserError: no such study, its server does not answer, or MLflow does not start.
    """
    from search_space.errors import UserError
    from trial_runner.gang import free_port
    from tuner.processes import stop_group
    from tuner.records.journal import read_journal
    from tuner.records.layout import find_folder
    from tuner.records.lease import is_held
    from tuner.records.tracking.state import read_state
    from tuner.records.tracking.tracker import local_uri
    from tuner.records.tracking.views import page_urls

    folder = find_folder(args.study)
    sending = is_held(folder)
    if not sending:
        send_waiting(folder, None, SYNC_S)
    state = read_state(folder)
    if state is None:
        raise UserError(f"study {folder.name} has no records for MLflow yet; `tune status {folder.handle}` shows it")
    trials = list(state.trials.values())
    if state.uri != "local":
        urls = page_urls(state.uri, state.experiment, state.parent, trials, state.study_id)
        print_urls(folder.name, urls, args.json)
        return 0
    port = args.port or free_port(prefer=5000)
    environment = os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, "-m", "mlflow", "ui", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", local_uri(folder), "--workers", "1"]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    log = (folder.root / "mlflow-ui.log").open("w")
    server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        _wait(port, server, folder.root / "mlflow-ui.log")
        base = f"http://127.0.0.1:{port}"
        urls = page_urls(base, state.experiment, state.parent, trials, state.study_id)
        dashboard = next((e["dashboard"] for e in reversed(read_journal(folder.journal)) if e["event"] == "ray"), None)
        if dashboard and sending:
            urls["ray_dashboard"] = dashboard
        print_urls(folder.name, urls, args.json)
        if not args.json:
            print("Ctrl-C to stop", flush=True)
        server.wait()
    finally:
        stop_group(server, 5.0)
        log.close()
    return 0


def print_urls(study: str, urls: dict[str, str], as_json: bool) -> None:
    """Print the addresses: one JSON document, or a line each."""
    if as_json:
        print(json.dumps({"study": study, "urls": urls}), flush=True)
        return
    for name, url in urls.items():
        print(f"{name.replace('_', ' '):14} {url}", flush=True)


def _wait(port: int, server: subprocess.Popen[bytes], log: Any) -> None:
    from search_space.errors import UserError

    until = time.monotonic() + 90
    while time.monotonic() < until:
        if server.poll() is not None:
            break
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.3)
    tail = "\n".join(log.read_text().splitlines()[-8:])
    raise UserError(f"mlflow ui did not start on 127.0.0.1:{port}:\n{tail}")
