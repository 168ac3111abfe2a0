"""A Kubernetes API server for tests: objects in a dictionary, faults on demand, every request on record."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
from dataclasses import dataclass
from dataclasses import field
from http.server import BaseHTTPRequestHandler
from http.server import ThreadingHTTPServer
import json
from pathlib import Path
import threading
from typing import Any
from urllib.parse import parse_qs
from urllib.parse import urlsplit


@dataclass
class Fake:
    """The server's state."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By path."""

    faults: list[tuple[str, str, int | str, str]] = field(default_factory=list)
    """Method, end of path, answer (a status, ``drop``: no answer, ``arrive``: done without an answer), message; each
    happens once."""

    requests: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of all."""

    crd: bool = True
    """Whether RayJobs are known."""

    log: str = ""

    def count(self, method: str, end: str) -> int:
        """Requests of a method whose path ends so."""
        return sum(m == method and path.endswith(end) for m, path in self.requests)

    def put(self, plural: str, manifest: dict[str, Any], namespace: str = "ledgertune") -> dict[str, Any]:
        """An object as if it were there."""
        group = "apis/ray.io/v1" if plural == "rayjobs" else "api/v1"
        path = f"/{group}/namespaces/{namespace}/{plural}/{manifest['metadata']['name']}"
        self.objects[path] = manifest
        return manifest

    def get(self, plural: str, name: str) -> dict[str, Any] | None:
        """An object of the namespace ledgertune."""
        return next((o for p, o in self.objects.items() if p.endswith(f"/ledgertune/{plural}/{name}")), None)


@contextlib.contextmanager
def serve(kubeconfig: Path) -> Iterator[Fake]:
    """A running server, and a kubeconfig that leads to it."""
    fake = Fake()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: Any) -> None:
            pass

        def answer(self, status: int, body: Any, plain: bool = False) -> None:
            data = body.encode() if plain else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if plain else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def fail(self, status: int, message: str, kind: str = "") -> None:
            details = {"kind": kind} if kind else None
            self.answer(status, {"kind": "Status", "status": "Failure", "message": message, "details": details})

        def handle_any(self) -> None:
            url = urlsplit(self.path)
            method, path = self.command, url.path
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            fake.requests.append((method, path))
            after = ""
            for fault in fake.faults:
                if fault[0] == method and path.endswith(fault[1]):
                    fake.faults.remove(fault)
                    if isinstance(fault[2], int):
                        return self.fail(fault[2], fault[3], "x" if fault[2] == 404 else "")
                    after = fault[2]
                    break
            if after == "drop":
                self.close_connection = True
                return None
            if after == "arrive":
                fake.objects[f"{path}/{body['metadata']['name']}"] = body
                self.close_connection = True
                return None
            if "ray.io" in path and not fake.crd:
                return self.answer(404, "404 page not found\n", plain=True)
            return self.serve_object(method, path, body, parse_qs(url.query))

        def serve_object(self, method: str, path: str, body: Any, query: dict[str, list[str]]) -> None:
            plural = path.rsplit("/", 1)[-1]
            if path.endswith("/log"):
                return self.answer(200, fake.log, plain=True)
            if method == "GET" and plural in ("pods", "events"):
                found = [o for p, o in fake.objects.items() if p.startswith(f"{path}/")]
                wanted = dict(pair.split("=") for pair in query.get("labelSelector", [""])[0].split(",") if pair)
                found = [o for o in found if wanted.items() <= o["metadata"].get("labels", {}).items()]
                return self.answer(200, {"kind": "List", "items": found})
            if method == "POST":
                key = f"{path}/{body['metadata']['name']}"
                if key in fake.objects:
                    return self.fail(409, f"{body['metadata']['name']} already exists", plural)
                fake.objects[key] = {
                    **body,
                    "metadata": {**body["metadata"], "creationTimestamp": "2026-01-01T00:00:00Z"},
                }
                return self.answer(201, fake.objects[key])
            if path not in fake.objects:
                return self.fail(404, f"{plural} not found", "rayjobs" if "ray.io" in path else "configmaps")
            if method == "DELETE":
                fake.objects.pop(path)
                return self.answer(200, {"kind": "Status", "status": "Success"})
            return self.answer(200, fake.objects[path])

        do_GET = do_POST = do_DELETE = handle_any

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "fake",
                "clusters": [{"name": "fake", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                "users": [{"name": "me", "user": {}}],
                "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me"}}],
            }
        )
    )
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
