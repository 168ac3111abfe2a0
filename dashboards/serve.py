"""A server of the report page that follows running studies; it reads records and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
import hmac
from http.cookies import CookieError
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler
from http.server import ThreadingHTTPServer
import ipaddress
import json
import re
import secrets
import socket
import threading
import time
from typing import Any
from urllib.parse import parse_qs
from urllib.parse import quote
from urllib.parse import unquote
from urllib.parse import urlsplit

from dashboards.page import list_page
from dashboards.page import render
from dashboards.page_data import page_document
from dashboards.page_data import refused_rows
from tuner.records.journal import JournalFollower
from tuner.records.layout import StudyFolder
from tuner.records.summary import summarise
from tuner.records.units import format_budget


COOKIE = "ledgertune_token"
"""Cookie that carries the token after the first request."""

IDLE_S = 20.0
"""A connection that sends no request for so long is closed, seconds."""

MOST_CONNECTIONS = 64
"""Connections served at once; more wait in the kernel's queue or are closed."""


class Followed:
    """One study and what the server has read of it."""

    def __init__(self, folder: StudyFolder) -> None:
        self.folder = folder
        self._follower = JournalFollower(folder.journal)
        self._lock = threading.Lock()
        self._held: tuple[str, int] = ("", 0)
        self._turn = 0
        # Turns of another server, or of another study of the same name, must not pass for this one's.
        self._boot = secrets.token_hex(4)

    def document(self, known: str = "", skip_trials: int = 0) -> tuple[str, dict[str, Any]]:
        """The page's document and its version.

        Args:
            known: version that the page has; its trials are left out only where they are surely the same.
            skip_trials: trials that the page has.
        """
        with self._lock:
            version = self._read()
            events = self._follower.events
            summary = summarise(self.folder, events)
            now = time.time() if summary.state == "running" else None
            same = known.rpartition("-")[0] == version.rpartition("-")[0] and skip_trials <= len(summary.trials)
            skip = skip_trials if same else 0
            return version, page_document(self.folder, events, summary, now_s=now, skip_trials=skip)

    def refused(self) -> list[dict[str, Any]]:
        """Refused candidates for the page."""
        with self._lock:
            self._follower.look()
            return refused_rows(self.folder, self._follower.events)

    def version(self) -> str:
        """Changes whenever a page would show something new."""
        with self._lock:
            return self._read()

    def _read(self) -> str:
        self._follower.look()
        # The state may change without a word in the journal: a killed driver writes none.
        state = (summarise(self.folder, self._follower.events).state, self._follower.version)
        if state != self._held:
            self._held = state
            self._turn += 1
        began = self._follower.events[0]["unix_s"] if self._follower.events else 0
        return f"{self._boot}.{began}-{self._turn}"


class PageServer(ThreadingHTTPServer):
    """The server.

    Args:
        host: address to bind.
        port: port; 0 lets the system choose.
        find: the studies to serve, asked anew at each request that needs them.
        single: whether there is exactly one study, whose page is the root.
        token: what every request must carry; None on loopback.
        allowed_hosts: further names that the Host header may carry.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        host: str,
        port: int,
        find: Callable[[], list[StudyFolder]],
        *,
        single: bool,
        token: str | None,
        allowed_hosts: tuple[str, ...] = (),
    ) -> None:
        if ":" in host:
            self.address_family = socket.AF_INET6
        self.find, self.single, self.token = find, single, token
        names = {"localhost", *(name.lower() for name in allowed_hosts)}
        self.host_names = names if is_loopback(host) else names | {socket.gethostname().lower(), host.lower()}
        self.loopback = is_loopback(host)
        self._studies: dict[str, Followed] = {}
        self._guard = threading.Lock()
        self._slots = threading.BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((host, port), Handler)

    def study(self, name: str | None) -> Followed | None:
        """A served study by name (the only one when no name is given), or None. Names are looked up, never joined."""
        for folder in self.find():
            if name is None or folder.name == name:
                with self._guard:
                    return self._studies.setdefault(folder.name, Followed(folder))
        return None

    def host_allowed(self, header: str | None) -> bool:
        """Whether a Host header names this server: an address (which no DNS answer can stand for), or a known name."""
        if not header:
            return False
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?", header)
        if not match:
            return False
        name = match[1].strip("[]").lower()
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self.host_names
        return address.is_loopback or not self.loopback

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve in a thread, not in more of them than there are slots."""
        if not self._slots.acquire(timeout=1.0):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Give the slot back in the end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD; everything else is refused by its absence."""

    server: PageServer
    # One request a connection: an open one would outlive a closed server, and hold one of its slots.
    protocol_version = "HTTP/1.0"
    server_version = "ledgertune"
    sys_version = ""
    timeout = IDLE_S

    def do_GET(self) -> None:
        """Check who asks, then find the page."""
        if not self.server.host_allowed(self.headers.get("Host")):
            return self._send(403, "text/plain", "this server is not called by that name; --allow-host adds one\n")
        try:
            url = urlsplit(self.path)
        except ValueError:
            return self._send(400, "text/plain", "not an address\n")
        query = parse_qs(url.query)
        if self.server.token is not None:
            offered = query.get("token", [""])[0]
            if offered and self._is_token(offered):
                where = quote(unquote(url.path).split("?")[0], safe="/") or "/"
                # A second slash in front would name another host.
                where = "/" + where.lstrip("/")
                cookie = f"{COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
                return self._send(303, "text/plain", "", {"Location": where, "Set-Cookie": cookie})
            if not self._may():
                return self._send(401, "text/plain", "open the address with its token, as `tune serve` printed it\n")
        return self._route(url.path, query)

    do_HEAD = do_GET

    def _route(self, path: str, query: dict[str, list[str]]) -> None:
        if path == "/" and not self.server.single:
            return self._send(200, "text/html", list_page(self._rows()))
        match = re.fullmatch(r"/(data\.json)?" if self.server.single else r"/s/([^/]+)/(data\.json)?", path)
        if not match:
            return self._send(404, "text/plain", "no such page\n")
        study = self.server.study(None if self.server.single else unquote(match[1]))
        if study is None:
            return self._send(404, "text/plain", "no such study\n")
        try:
            return self._update(study, query) if match[match.re.groups] else self._page(study)
        except (OSError, ValueError, KeyError) as error:
            # A folder that is being removed, or a record that is being written.
            return self._send(503, "text/plain", f"the study cannot be read now: {type(error).__name__}\n")

    def _page(self, study: Followed) -> None:
        version, document = study.document()
        live = {"url": "data.json", "version": version, "back": None if self.server.single else "../../"}
        self._send(200, "text/html", render(document, study.refused(), live))

    def _update(self, study: Followed, query: dict[str, list[str]]) -> None:
        def number(name: str) -> int:
            text = query.get(name, ["0"])[0]
            return int(text) if re.fullmatch(r"\d{1,9}", text) else 0

        known = query.get("version", [""])[0]
        if study.version() == known:
            return self._send(204, "application/json", "")
        version, document = study.document(known, number("trials"))
        answer: dict[str, Any] = {"version": version, "document": document}
        refused = study.refused()
        if len(refused) != number("refused"):
            answer["refused"] = refused
        return self._send(200, "application/json", json.dumps(answer, allow_nan=False))

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for folder in reversed(self.server.find()):
            try:
                summary = summarise(folder)
            except (OSError, ValueError, KeyError):
                continue
            winner = next((trial["label"] for trial in summary.trials if trial["number"] == summary.winner), "")
            change = summary.comparison["step_time_change_pct"] if summary.comparison and winner else None
            spent, budget = format_budget(summary.spent_device_s), format_budget(summary.budget_device_s)
            rows.append(
                {
                    "href": f"s/{quote(folder.name, safe='')}/",
                    "study": folder.name,
                    "state": summary.state,
                    "winner": winner,
                    "gain": "" if change is None else f"{change:+.1f}%",
                    "budget": f"{spent} of {budget}",
                }
            )
        return rows

    def _may(self) -> bool:
        bearer = self.headers.get("Authorization", "")
        if bearer.startswith("Bearer ") and self._is_token(bearer.removeprefix("Bearer ").strip()):
            return True
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and self._is_token(cookie.value)

    def _is_token(self, offered: str) -> bool:
        return hmac.compare_digest(offered.encode(), str(self.server.token).encode())

    def _send(self, status: int, kind: str, text: str, headers: dict[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        for name, value in {**GUARDS, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """No log: a request's line may hold the token."""


GUARDS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
"""Headers of every answer; the page carries its own content policy."""


def is_loopback(host: str) -> bool:
    """Whether an address to bind is this machine's own alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
