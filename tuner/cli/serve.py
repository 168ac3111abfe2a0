"""`tune serve`: the report page, live while a study runs."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
import signal
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser("serve", help="the report page, live while the study runs")
    parser.add_argument("study", nargs="?", help="name or folder, or a folder of studies (default: the newest study)")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="port (default: any free one)")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a further name in requests' Host header"
    )
    parser.add_argument(
        "--token", action="store_true", help="ask for a token on loopback too (a machine with other users)"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="write the token here (mode 0600) instead of printing it in the address"
    )
    parser.add_argument("--json", action="store_true", help="print the address as one JSON document")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM.

    Bound elsewhere than loopback, every request needs the random token that is printed once.

    Raises:
        UserError: no such study, or the address cannot be bound.
    """
    import secrets
    import socket

    from dashboards.serve import is_loopback
    from dashboards.serve import PageServer
    from search_space.errors import UserError

    find, single, name = _studies(args.study)
    token = None if is_loopback(args.host) and not args.token else secrets.token_urlsafe(32)
    if not 0 <= args.port <= 65535:
        raise UserError(f"--port {args.port}: needs a number from 0 to 65535")
    if args.token_file and token is None:
        raise UserError(f"--token-file: {args.host} is loopback, which needs no token; add --token, or leave it out")
    try:
        server = PageServer(
            args.host, args.port, find, single=single, token=token, allowed_hosts=tuple(args.allow_host)
        )
    except OSError as error:
        raise UserError(f"--host {args.host} --port {args.port}: cannot be bound: {error.strerror or error}") from None
    if args.token_file and token is not None:
        _write_secret(Path(args.token_file).expanduser(), token)
    shown_host = socket.gethostname() if args.host in ("0.0.0.0", "::", "") else args.host
    host = f"[{shown_host}]" if ":" in shown_host else shown_host
    address = f"http://{host}:{server.server_address[1]}/"
    shown = f"{address}?token={token}" if token and not args.token_file else address

    # Before the address is told: who reads it may end the server at once.
    def stop(*_: object) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, stop)
    try:
        if args.json:
            print(json.dumps({"study": name, "url": shown}), flush=True)
        else:
            print(f"{name}: {shown}", flush=True)
            if token:
                print(
                    "the address holds the key to the page; it is shown only once, and travels unencrypted", flush=True
                )
            print("Ctrl-C to stop", flush=True)
        server.serve_forever(poll_interval=0.2)
    except _Terminated:
        return 0
    finally:
        server.server_close()
    return 0


class _Terminated(Exception):
    """SIGTERM came: the orderly end of a server."""


def _studies(name: str | None) -> tuple[Any, bool, str]:
    """What is served: a finder of folders, whether it is a single study, and its name.

    Raises:
        UserError: neither a study nor a folder of studies.
    """
    from tuner.records.layout import find_folder
    from tuner.records.layout import list_folders

    if name is not None and Path(name).is_dir() and not (Path(name) / "study.json").exists():
        root = Path(name).resolve()
        if list_folders(root):
            return (lambda: list_folders(root)), False, str(root)
    folder = find_folder(name)
    return (lambda: [folder]), True, folder.name


def _write_secret(path: Path, text: str) -> None:
    """A new file that only its owner can read.

    Raises:
        UserError: it exists, or cannot be written.
    """
    from search_space.errors import UserError

    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text + "\n")
    except OSError as error:
        raise UserError(f"--token-file {path}: cannot be made: {error.strerror}") from None
