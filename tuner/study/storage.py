"""Where Optuna keeps a study: memory, a file in its folder, or a PostgreSQL database that many studies share."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
from pathlib import Path
import secrets

import optuna
from optuna.storages.journal import JournalFileBackend
from optuna.storages.journal import JournalFileOpenLock

from search_space.errors import UserError
from search_space.redact import redact
from search_space.redact import without_password
from tuner.records.layout import network_mount


VARIABLE = "LEDGERTUNE_STORAGE"
"""Environment variable that names the database, password included; it wins over the job file."""

LOCK_TIMEOUT_S = 60.0
"""Longest wait for a locked database, seconds; SQLite tries again with growing pauses until then."""

CONNECT_TIMEOUT_S = 10
"""Longest wait for a PostgreSQL server's first answer, seconds."""


def storage_address(job_storage: str | None) -> str | None:
    """Address of the shared database; None: a file in the study's folder.

    Args:
        job_storage: ``[records] storage`` of the job.

    Raises:
        UserError: it is no PostgreSQL address, or its driver is not installed.
    """
    address = os.environ.get(VARIABLE) or job_storage
    if not address:
        return None
    scheme, separator, rest = address.partition("://")
    if not separator or scheme.partition("+")[0] not in ("postgresql", "postgres"):
        raise UserError(
            f"storage {without_password(address)!r}: needs postgresql://user@host/name, or nothing for a SQLite file "
            "in the study's folder"
        )
    if importlib.util.find_spec("psycopg") is None:
        raise UserError("storage postgresql://…: its driver is missing; pip install 'ledgertune[postgresql]'")
    return f"postgresql+psycopg://{rest}"


class StudyStorage:
    """Optuna's storage of one study, with a lock that keeps two workers from asking at once.

    Args:
        path: file in the study's folder; None: memory.
        address: shared database from :func:`storage_address`; None: the file.

    Raises:
        UserError: the database does not answer, or refuses the user.
    """

    def __init__(self, path: Path | None, address: str | None = None) -> None:
        self._path, self._shared = path, address is not None and path is not None
        self.optuna: optuna.storages.BaseStorage = (
            _postgresql(address) if self._shared and address is not None else _file(path)
        )

    def name(self, study: str) -> str:
        """The study's name in the storage. A shared database holds studies of many folders, some of the same name, so
        there it ends in a word of this folder's own, kept in ``optuna.json``."""
        if not self._shared or self._path is None:
            return study
        note = self._path.with_suffix(".json")
        if note.exists():
            return str(json.loads(note.read_text())["name"])
        name = f"{study}-{secrets.token_hex(4)}"
        note.write_text(json.dumps({"name": name}))
        return name

    @contextlib.contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Keep other workers on the same storage from asking between a proposal and its record.

        Args:
            name: the study's name in the storage.
        """
        if self._path is None:
            yield
        elif self._shared:
            from sqlalchemy import text

            key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
            # Held by the connection: a worker that dies lets go of it.
            with self.optuna.engine.connect() as connection:  # type: ignore[attr-defined]
                connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": key})
                try:
                    yield
                finally:
                    connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": key})
        else:
            with self._path.with_suffix(".lock").open("a") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield


def _file(path: Path | None) -> optuna.storages.BaseStorage:
    """Memory, SQLite, or a journal file where SQLite's locks cannot be trusted."""
    if path is None:
        return optuna.storages.InMemoryStorage()
    if network_mount(path) is not None:
        file = str(path.with_suffix(".journal"))
        return optuna.storages.JournalStorage(JournalFileBackend(file, lock_obj=JournalFileOpenLock(file)))
    # A reader (a dashboard, a copy) may hold the file for a while: wait, do not lose the trial.
    engine = {"connect_args": {"timeout": LOCK_TIMEOUT_S}}
    return optuna.storages.RDBStorage(f"sqlite:///{path}", engine_kwargs=engine)


def _postgresql(address: str) -> optuna.storages.BaseStorage:
    from sqlalchemy.exc import SQLAlchemyError

    # A server that was restarted meanwhile is connected to anew, before a query is lost.
    engine = {"pool_pre_ping": True, "connect_args": {"connect_timeout": CONNECT_TIMEOUT_S}}
    try:
        return optuna.storages.RDBStorage(address, engine_kwargs=engine)
    except SQLAlchemyError as error:
        why = redact(str(getattr(error, "orig", None) or error).strip().split("\n")[0])[:300]
        raise UserError(
            f"storage {without_password(address)}: {why}; check address and user (password: PGPASSWORD, ~/.pgpass or "
            f"{VARIABLE}), or leave it out for a SQLite file"
        ) from None
