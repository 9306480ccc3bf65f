"""Who changed what and when: an append-only log of every action that is not a read.

The latest entries are held in memory; with a data directory each is also written to SQLite before its action is
answered, on a thread of its own, and they are there again after a restart.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, astuple, dataclass
from datetime import UTC, datetime
from pathlib import Path

from engine.errors import StartupError

logger = logging.getLogger(__name__)

KEPT_ENTRIES = 1000
FILE_NAME = "audit.sqlite3"

_SCHEMA = """
CREATE TABLE IF NOT EXISTS audit (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, role TEXT NOT NULL, action TEXT NOT NULL, detail TEXT NOT NULL,
    outcome TEXT NOT NULL, step INTEGER NOT NULL, key_label TEXT NOT NULL DEFAULT ''
)
"""
# Files from before keys had labels.
_ADD_LABEL = "ALTER TABLE audit ADD COLUMN key_label TEXT NOT NULL DEFAULT ''"
_COLUMNS = "at, role, action, detail, outcome, step, key_label"


def utc_text(at: float | None) -> str:
    """A Unix time in UTC, for people; a dash where it never was."""
    return "–" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """One action."""

    at: float  # Unix time
    role: str  # of the caller
    action: str  # e.g. "pause", "limits", "abort"
    detail: str  # what exactly, in words
    outcome: str  # "ok", or why not
    step: int  # the last executed step when it was answered
    key_label: str = ""  # of the caller's key; empty where no key is asked for

    @property
    def time_text(self) -> str:
        """`at` in UTC, for people."""
        return utc_text(self.at)

    def as_json(self) -> dict[str, object]:
        """With names."""
        return asdict(self)


class AuditLog:
    """Append, and read the latest.

    Args:
        data_dir: where to keep it; None: in memory only.
        now: Unix time.
    """

    def __init__(self, data_dir: str | None = None, now: Callable[[], float] = time.time) -> None:
        self._path = None if data_dir is None else Path(data_dir) / FILE_NAME
        self._now = now
        self._entries: deque[AuditEntry] = deque(maxlen=KEPT_ENTRIES)
        self._worker: ThreadPoolExecutor | None = None
        self._database: sqlite3.Connection | None = None

    def open(self) -> None:
        """Read what was kept; called once, before anything is served.

        Raises:
            StartupError: the directory cannot be used.
        """
        if self._path is None:
            return
        try:
            self._open(self._path)
        except (OSError, sqlite3.Error) as error:
            raise StartupError(f"--data-dir: {self._path} cannot be used: {error}") from None

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Used by one thread at a time: this one now, the worker from then on.
        database = sqlite3.connect(path, check_same_thread=False)
        with database:
            database.execute("PRAGMA journal_mode=WAL")
            database.execute(_SCHEMA)
            if "key_label" not in {column[1] for column in database.execute("PRAGMA table_info(audit)")}:
                database.execute(_ADD_LABEL)
        rows = database.execute(f"SELECT {_COLUMNS} FROM audit ORDER BY id DESC LIMIT ?", (KEPT_ENTRIES,)).fetchall()
        self._entries.extend(AuditEntry(*row) for row in reversed(rows))
        self._database = database
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="audit")

    async def close(self) -> None:
        """Finish writing."""
        if self._worker is None or self._database is None:
            return
        worker, database = self._worker, self._database
        self._worker = self._database = None
        await asyncio.get_running_loop().run_in_executor(worker, database.close)
        worker.shutdown(wait=False)

    async def add(
        self, role: str, action: str, detail: str, outcome: str, step: int, *, key_label: str = ""
    ) -> AuditEntry:
        """Append an entry; returns when it is on disk, if it is kept there."""
        entry = AuditEntry(round(self._now(), 3), role, action, detail, outcome, step, key_label)
        self._entries.append(entry)
        if self._worker is not None and self._database is not None:
            loop = asyncio.get_running_loop()
            try:
                await loop.run_in_executor(self._worker, _insert, self._database, entry)
            except sqlite3.Error:
                # The action has happened: that it could not be noted is the operator's problem, not the caller's.
                logger.exception("the audit log could not be written to %s", self._path)
        return entry

    def latest(self, limit: int) -> list[AuditEntry]:
        """At most `limit` entries, newest first."""
        entries = list(self._entries)
        return entries[: -limit - 1 : -1] if limit > 0 else []


def _insert(database: sqlite3.Connection, entry: AuditEntry) -> None:
    with database:
        database.execute(f"INSERT INTO audit ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(entry))
