"""Studies in PostgreSQL: the same tests as in a SQLite file, and what only a server can do wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from search_space.errors import UserError
from tests.services.postgresql import Server
from tests.services.postgresql import serving
from tests.tuner import pretend
from tests.tuner.storage_contract import StorageContract
from tuner.study.storage import storage_address
from tuner.study.storage import StudyStorage


pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for all tests; each has a study of its own."""
    with serving() as found:
        yield found


class TestPostgresql(StorageContract):
    @pytest.fixture
    def address(self, server: Server) -> str | None:
        return storage_address(server.address)


def test_a_wrong_password_is_refused_without_showing_it(server: Server, tmp_path: Path) -> None:
    address = storage_address(server.address.replace(server.password, "quite-wrong-password"))
    with pytest.raises(UserError, match="password authentication failed") as refused:
        StudyStorage(tmp_path / "optuna.db", address)
    assert "quite-wrong-password" not in str(refused.value) and server.password not in str(refused.value)


def test_a_server_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leave it out for a SQLite file"):
        StudyStorage(tmp_path / "optuna.db", storage_address("postgresql://u@127.0.0.1:9/d"))


def test_the_password_is_in_no_file(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEDGERTUNE_STORAGE", server.address)
    plan = pretend.make_plan(search={"max_trials": 2}, records={"storage": server.address})
    root = tmp_path / "s"
    root.mkdir()
    (root / "job.json").write_text(plan.job.model_dump_json())
    code, _ = pretend.run(monkeypatch, root, plan, lambda candidate, number: pretend.Behaviour(), 1e5)
    assert code == 0
    held = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert len(held) > 5
    assert [path for path, data in held.items() if server.password.encode() in data] == []


def test_a_restart_between_two_trials_loses_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = pretend.make_plan(search={"max_trials": 5}, records={"storage": server.address})

    def restart(event: dict[str, Any]) -> None:
        if event["event"] == "trial" and event["number"] == 1:
            server.stop()
            server.start()

    code, end = pretend.run(
        monkeypatch, tmp_path / "s", plan, lambda c, n: pretend.Behaviour(), 1e5, listeners=[restart]
    )
    assert code == 0 and sum(trial["role"] in ("baseline", "search") for trial in end["trials"]) == 5
