"""The keys there are: those of the flags, and those that admins create and revoke while the server runs.

A created key is 256 random bits. What is kept of it is its SHA-256: a slow hash protects secrets that can be guessed,
and nobody guesses 256 bits, while each request has to be looked up. A key's text is shown once and kept nowhere.
Keys of flags are texts of the operator's, held in memory only.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from app.access import Role
from app.store import Store

KEY_PREFIX = "pd-"
KEY_BYTES = 32
MAX_CREATED_KEYS = 1000
MAX_LABEL = 64
WRITE_INTERVAL_S = 60.0  # a key's last use is written at most this often

_COLUMNS = "id, label, role, fingerprint, created_at, last_used_at"


class KeyRefusedError(Exception):
    """What is asked for would lock somebody out or cannot be done; `code` is for programs."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(slots=True)
class Key:
    """One key; never its text."""

    id: str
    label: str
    role: Role
    fingerprint: bytes
    created_at: float | None  # None: from a flag
    last_used_at: float | None = None
    written_at: float = float("-inf")  # when `last_used_at` was last written

    @property
    def is_from_flag(self) -> bool:
        """Whether it was given at the start, so that only another start takes it away."""
        return self.created_at is None

    def as_json(self) -> dict[str, object]:
        """For the page and for programs."""
        return {
            "id": self.id,
            "label": self.label,
            "role": self.role.label,
            "source": "flag" if self.is_from_flag else "created",
            "created_at": self.created_at,
            "last_used_at": self.last_used_at,
        }


def fingerprint_of(key: str) -> bytes:
    """SHA-256 of a key's text, 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyRing:
    """All keys in memory, the created ones also in the store. No keys: everyone is admin.

    Args:
        flag_keys: (key, role) pairs, in the order of the flags.
        store: where created keys are; opened before `load`.
        now: Unix time.
    """

    def __init__(
        self, flag_keys: Iterable[tuple[str, Role]], store: Store | None = None, now: Callable[[], float] = time.time
    ) -> None:
        self._flags = [
            Key(f"flag-{number}", f"--api-key {number}", role, fingerprint_of(key), None)
            for number, (key, role) in enumerate(flag_keys, 1)
        ]
        self._created: dict[bytes, Key] = {}
        self._store = store
        self._now = now
        self._changing = asyncio.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether there is no key at all."""
        return not self._flags and not self._created

    @property
    def flag_fingerprints(self) -> bytes:
        """Of all keys of flags, one after the other; they are in no file."""
        return b"".join(key.fingerprint for key in self._flags)

    def load(self, database: sqlite3.Connection) -> None:
        """Read the created keys; called once, at the start."""
        for key_id, label, role, fingerprint, created_at, last_used_at in database.execute(
            f"SELECT {_COLUMNS} FROM api_keys ORDER BY created_at, id"
        ):
            key = Key(key_id, label, Role.from_label(role), fingerprint, created_at, last_used_at)
            self._created[fingerprint] = key

    def all(self) -> list[Key]:
        """Keys of flags, then created ones, oldest first."""
        return [*self._flags, *self._created.values()]

    def find(self, fingerprint: bytes) -> Key | None:
        """The key with this fingerprint."""
        found = self._created.get(fingerprint)  # of 256 random bits: how long a look-up takes tells nothing
        for key in self._flags:
            if hmac.compare_digest(key.fingerprint, fingerprint):
                found = key
        return found

    def used(self, key: Key) -> None:
        """Note that a key is used now."""
        key.last_used_at = now = round(self._now(), 3)
        if not key.is_from_flag and now - key.written_at >= WRITE_INTERVAL_S:
            self._write_use(key)

    def _write_use(self, key: Key) -> None:
        assert self._store is not None
        assert key.last_used_at is not None
        key.written_at = key.last_used_at
        values = (key.last_used_at, key.id)

        def update(database: sqlite3.Connection) -> None:
            database.execute("UPDATE api_keys SET last_used_at = ? WHERE id = ?", values)

        self._store.run_soon(update)

    def write_last_uses(self) -> None:
        """Write what was not written yet; at the end of the process."""
        for key in self._created.values():
            if key.last_used_at is not None and key.last_used_at > key.written_at > float("-inf"):
                self._write_use(key)

    async def create(self, label: str, role: Role) -> tuple[Key, str]:
        """A new key and its text, which nobody will see again.

        Raises:
            KeyRefusedError: the first key is no admin's, or there are too many.
            sqlite3.Error: it could not be written, so there is no such key.
        """
        assert self._store is not None
        async with self._changing:
            if self.is_empty and role is not Role.ADMIN:
                raise KeyRefusedError(
                    "first_key_must_be_admin",
                    "the first key turns authentication on, so it must be an admin's: nobody could create another one",
                    "role",
                )
            if len(self._created) >= MAX_CREATED_KEYS:
                raise KeyRefusedError("too_many_keys", f"there are {MAX_CREATED_KEYS} keys already: revoke some first")
            text = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
            key = Key(secrets.token_hex(8), label, role, fingerprint_of(text), round(self._now(), 3))
            values = (key.id, key.label, key.role.label, key.fingerprint, key.created_at)

            def insert(database: sqlite3.Connection) -> None:
                database.execute(f"INSERT INTO api_keys ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, NULL)", values)

            await self._store.run(insert)
            self._created[key.fingerprint] = key
            return key, text

    async def revoke(self, key_id: str) -> Key | None:
        """Take a key away; returns it as it was, or None where there is no such key.

        Raises:
            KeyRefusedError: it is from a flag, or the last admin's while there are other keys.
            sqlite3.Error: it could not be written, so the key still holds.
        """
        assert self._store is not None
        async with self._changing:
            keys = self.all()
            key = next((key for key in keys if key.id == key_id), None)
            if key is None:
                return None
            if key.is_from_flag:
                raise KeyRefusedError(
                    "key_from_flag", f"{key.label} was given when the server was started: start it without that key"
                )
            others = [other for other in keys if other is not key]
            if others and key.role is Role.ADMIN and not any(other.role is Role.ADMIN for other in others):
                raise KeyRefusedError(
                    "last_admin_key",
                    "this is the last admin key: create another one first, or revoke the keys of other roles before it",
                )

            def delete(database: sqlite3.Connection) -> None:
                database.execute("DELETE FROM api_keys WHERE id = ?", (key_id,))

            await self._store.run(delete)
            del self._created[key.fingerprint]
            return replace(key)
