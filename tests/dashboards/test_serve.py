"""The live page's server: who may ask, what is answered, what follows the journal."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import fcntl
import http.client
import json
from pathlib import Path
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest

from dashboards.serve import is_loopback
from dashboards.serve import PageServer
from tests.dashboards.made_up import events
from tests.dashboards.made_up import write_study
from tests.dashboards.test_page import data_of
from tuner.records.layout import StudyFolder


@contextlib.contextmanager
def serving(folders: list[StudyFolder], single: bool = True, **more: Any) -> Iterator[PageServer]:
    """A server in a thread of the test's process."""
    server = PageServer("127.0.0.1", 0, lambda: folders, single=single, token=more.pop("token", None), **more)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(
    server: PageServer, path: str = "/", method: str = "GET", host: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """One request; the Host header is 127.0.0.1 unless another is given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host if host is not None else f"127.0.0.1:{server.server_address[1]}")
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    connection.close()
    return found


@pytest.fixture
def folder(tmp_path: Path) -> StudyFolder:
    """A finished study."""
    return write_study(tmp_path / "one", events(6), refused=3)


@contextlib.contextmanager
def held(folder: StudyFolder) -> Iterator[None]:
    """The study's lock, as its driver holds it."""
    with folder.lock.open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_page_and_headers(folder: StudyFolder) -> None:
    with serving([folder]) as server:
        status, headers, body = ask(server)
        assert status == 200 and data_of(body.decode())["live"]["url"] == "data.json"
        assert headers["cache-control"] == "no-store" and headers["x-content-type-options"] == "nosniff"
        assert "connect-src 'self'" in body.decode()
        assert ask(server, method="HEAD")[2] == b""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_only_get(folder: StudyFolder, method: str) -> None:
    with serving([folder]) as server:
        assert ask(server, method=method)[0] == 501


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "10.1.2.3", "localhost@evil", "[::1", "a b"]
)
def test_other_names_are_refused(folder: StudyFolder, host: str) -> None:
    with serving([folder]) as server:
        assert ask(server, host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9999", "LOCALHOST:80", "[::1]:80"])
def test_own_names_pass_also_through_a_tunnel(folder: StudyFolder, host: str) -> None:
    with serving([folder]) as server:
        assert ask(server, host=host)[0] == 200


def test_a_further_name(folder: StudyFolder) -> None:
    with serving([folder], allowed_hosts=("tuner.example",)) as server:
        assert ask(server, host="tuner.example")[0] == 200


def test_token(folder: StudyFolder) -> None:
    with serving([folder], token="right-one") as server:
        for path in ("/", "/data.json", "/?token=wrong", "/?token="):
            assert ask(server, path)[0] == 401
        assert ask(server, "/", Authorization="Bearer wrong")[0] == 401
        assert ask(server, "/", Cookie="ledgertune_token=wrong")[0] == 401
        assert ask(server, "/", Authorization="Bearer right-one")[0] == 200
        status, headers, body = ask(server, "/?token=right-one")
        assert status == 303 and headers["location"] == "/" and "right-one" not in body.decode()
        assert "HttpOnly" in headers["set-cookie"] and "SameSite=Strict" in headers["set-cookie"]
        assert ask(server, "/", Cookie=headers["set-cookie"].split(";")[0])[0] == 200
        assert ask(server, "//evil.example/?token=right-one")[1]["location"] == "/evil.example/"


@pytest.mark.parametrize(
    "path", ["/../etc/passwd", "/s/one/", "/study.json", "/s/..%2f..%2fetc/", "/x", "/data.json/x"]
)
def test_nothing_but_the_page(folder: StudyFolder, path: str) -> None:
    with serving([folder]) as server:
        assert ask(server, path)[0] == 404


def test_updates_hold_only_what_is_new(tmp_path: Path) -> None:
    whole = events(6, running=1)
    cut = next(i for i, line in enumerate(whole) if line.get("number") == 3 and line["event"] == "trial")
    folder = write_study(tmp_path / "one", whole[:cut], refused=3)
    with serving([folder]) as server, held(folder):
        page = data_of(ask(server)[2].decode())
        version, count = page["live"]["version"], len(page["document"]["trials"])
        assert count == 3 and page["document"]["state"] == "running"
        query = f"/data.json?version={version}&trials={count}&refused=3"
        assert ask(server, query)[0] == 204
        with folder.journal.open("a") as file:
            file.write("".join(json.dumps(line) + "\n" for line in whole[cut:]))
        status, _, body = ask(server, query)
        update = json.loads(body)
        assert status == 200 and update["document"]["trials_from"] == 3 and "refused" not in update
        assert [trial["number"] for trial in update["document"]["trials"]] == [3, 4, 5]
        assert update["document"]["state"] == "done" and update["version"] != version
        # Another server's version is no proof that the trials are the same.
        other = json.loads(ask(server, "/data.json?version=00000000.1-1&trials=3&refused=0")[2])
        assert other["document"]["trials_from"] == 0 and len(other["refused"]) == 3
        assert json.loads(ask(server, f"/data.json?version={version}&trials=99999")[2])["document"]["trials_from"] == 0


def test_a_killed_driver_shows(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "one", events(2, end=None, winner=False, running=1))
    with serving([folder]) as server:
        with held(folder):
            page = data_of(ask(server)[2].decode())
        update = json.loads(ask(server, f"/data.json?version={page['live']['version']}&trials=2")[2])
        assert (page["document"]["state"], update["document"]["state"]) == ("running", "interrupted")


def test_several_studies(tmp_path: Path) -> None:
    folders = [write_study(tmp_path / name, events(2)) for name in ("one", "two <b>")]
    with serving(folders, single=False) as server:
        text = ask(server)[2].decode()
        assert 'href="s/one/"' in text and 'href="s/two%20%3Cb%3E/"' in text and "<b>" not in text
        page = data_of(ask(server, "/s/two%20%3Cb%3E/")[2].decode())
        assert page["document"]["study"] == "two <b>" and page["live"]["back"] == "../../"
        assert ask(server, "/s/one/data.json")[0] == 200
        assert ask(server, "/s/three/")[0] == ask(server, "/s/../")[0] == 404
        folders[0].facts.unlink()
        assert ask(server, "/s/one/")[0] == 503
        assert ask(server)[0] == 200


def test_a_client_that_says_nothing_holds_up_nobody(folder: StudyFolder) -> None:
    with serving([folder]) as server, contextlib.ExitStack() as silent:
        for _ in range(8):
            silent.enter_context(socket.create_connection(server.server_address[:2]))
        assert ask(server)[0] == 200


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_verb_ends_in_order(folder: StudyFolder, number: int, code: int) -> None:
    command = [sys.executable, "-c", "import sys; from tuner.cli import main; sys.exit(main())"]
    command += ["serve", str(folder.root), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    told = json.loads(process.stdout.readline())
    assert told["url"].startswith("http://127.0.0.1:") and "token" not in told["url"]
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code and "Traceback" not in errors


def test_verb_elsewhere_needs_the_token(folder: StudyFolder, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from tuner.cli import main; sys.exit(main())"]
    secret = tmp_path / "token"
    command += ["serve", str(folder.root), "--json", "--host", "0.0.0.0", "--token-file", str(secret)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        told = json.loads(process.stdout.readline())
        assert secret.stat().st_mode & 0o777 == 0o600
        token = secret.read_text().strip()
        assert len(token) >= 40 and token not in told["url"]
        port = int(told["url"].rstrip("/").rpartition(":")[2])
        for headers, status in (({}, 401), ({"Authorization": f"Bearer {token}"}, 200)):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/", headers=headers)
            assert connection.getresponse().status == status
            connection.close()
    finally:
        process.kill()
        process.communicate()
