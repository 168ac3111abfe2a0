"""Studies in a SQLite file, and what is refused as a shared database."""

from __future__ import annotations

import importlib.util

import pytest

from search_space.errors import UserError
from tests.tuner.storage_contract import StorageContract
from tuner.study.storage import storage_address


class TestSqlite(StorageContract):
    @pytest.fixture
    def address(self) -> str | None:
        return None


@pytest.mark.parametrize("address", ["mysql://u:secretpass@h/d", "somewhere", "sqlite:///x.db"])
def test_only_postgresql_is_shared(address: str) -> None:
    with pytest.raises(UserError, match="postgresql://user@host/name") as refused:
        storage_address(address)
    assert "secretpass" not in str(refused.value)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"ledgertune\[postgresql\]"):
        storage_address("postgresql://u@h/d")


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("LEDGERTUNE_STORAGE", "postgres://u:p@other/d")
    assert storage_address("postgresql://u@h/d") == "postgresql+psycopg://u:p@other/d"
    monkeypatch.delenv("LEDGERTUNE_STORAGE")
    assert storage_address("postgresql://u@h/d") == "postgresql+psycopg://u@h/d"
    assert storage_address(None) is None
