"""What outlives a restart: one SQLite file under `--data-dir`, and the one thread that touches it.

Without a directory the same tables are in memory and last as long as the process. Knows how a database is opened,
brought up to date and called without holding up the event loop; what the tables mean is told by those who use them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from engine.errors import StartupError

logger = logging.getLogger(__name__)

FILE_NAME = "pagedeck.sqlite3"

# Step i brings a database of version i to version i + 1; a step that was released is never changed.
MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE api_keys (
        id TEXT PRIMARY KEY, label TEXT NOT NULL, role TEXT NOT NULL, fingerprint BLOB NOT NULL UNIQUE,
        created_at REAL NOT NULL, last_used_at REAL
    )
    """,
)

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


class Store:
    """A database that is used from the event loop and read or written on a thread of its own.

    Args:
        data_dir: where the file lies; None: in memory.
    """

    def __init__(self, data_dir: str | None = None) -> None:
        self.path = None if data_dir is None else Path(data_dir) / FILE_NAME
        self._database: sqlite3.Connection | None = None
        self._worker: ThreadPoolExecutor | None = None

    @property
    def is_kept(self) -> bool:
        """Whether what is written is there after a restart."""
        return self.path is not None

    def open(self) -> sqlite3.Connection:
        """Open it and bring it up to date; called once, before anything is served.

        The connection may be used until this thread hands over to the event loop, for what must be read at the start.

        Raises:
            StartupError: the file cannot be used, or a newer pagedeck has written it.
        """
        try:
            database = self._connect()
            _migrate(database)
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"--data-dir: {self.path} cannot be used: {error}") from None
        self._database = database
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="store")
        return database

    def _connect(self) -> sqlite3.Connection:
        if self.path is None:
            return sqlite3.connect(":memory:", check_same_thread=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))  # nobody else reads it
        # Used by one thread at a time: this one now, the worker from then on.
        database = sqlite3.connect(self.path, check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL")
        return database

    async def run(self, work: Work[T]) -> T:
        """The result of `work`, done as one transaction.

        Raises:
            sqlite3.Error: nothing of it was done.
        """
        return await asyncio.wrap_future(self._submit(work))

    def run_soon(self, work: Work[None]) -> None:
        """The same without waiting; what fails is logged."""
        self._submit(work).add_done_callback(_log_failure)

    def _submit(self, work: Work[T]) -> Future[T]:
        worker, database = self._worker, self._database
        if worker is None or database is None:
            raise sqlite3.ProgrammingError("the store is not open")

        def transaction() -> T:
            with database:
                return work(database)

        return worker.submit(transaction)

    async def close(self) -> None:
        """Finish writing. Idempotent."""
        worker, database = self._worker, self._database
        self._worker = self._database = None
        if worker is not None and database is not None:
            await asyncio.get_running_loop().run_in_executor(worker, database.close)
            worker.shutdown(wait=False)


def _migrate(database: sqlite3.Connection) -> None:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise sqlite3.DatabaseError(
            f"a newer pagedeck has written it (version {version}; this one reads up to {len(MIGRATIONS)})"
        )
    for number, step in enumerate(MIGRATIONS[version:], version + 1):
        with database:
            database.execute("BEGIN")  # so that the step and its number are there together or not at all
            database.execute(step)
            database.execute(f"PRAGMA user_version = {number}")


def _log_failure(done: Future[None]) -> None:
    if not done.cancelled() and done.exception() is not None:
        logger.error("the store could not be written", exc_info=done.exception())
