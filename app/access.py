"""Who may call what: the roles, and the type of a row in the one table of routes.

Knows nothing of sessions, keys or handlers. `app.routes` joins the rows of all parts into the table the application is
built from; `app.auth` finds the role of a caller; the wrapper in `app.routes` compares the two, per row.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum

from starlette.requests import Request
from starlette.responses import Response

Handler = Callable[[Request], Awaitable[Response]]


class Role(IntEnum):
    """What a caller may do. Not a ladder: whoever reads the state may not generate, and the other way round."""

    OPEN = 0  # no key: health checks, the login form, static files
    INFERENCE = 1  # /v1, tokenize, the chat page and its API
    READ_ONLY = 2  # pages, state, metrics
    ADMIN = 3  # everything: also limits, pause, aborts, keys, the audit log
    ANY = 4  # of a row only: whoever has a key; what is for users of either kind

    def may(self, needed: Role) -> bool:
        """Whether a caller of this role may call what needs `needed`; the only comparison of roles there is."""
        if needed is Role.ANY:
            return self is not Role.OPEN
        return needed is Role.OPEN or self is Role.ADMIN or self is needed

    @property
    def label(self) -> str:
        """The word of the flags, the JSON and the pages: "none", "inference", "read-only", "admin", "any"."""
        return _LABELS[self]

    @classmethod
    def from_label(cls, label: str) -> Role:
        """The role called `label`; "read_only" is taken too.

        Raises:
            ValueError: no such role.
        """
        for role, known in _LABELS.items():
            if known == label.strip().lower().replace("_", "-") and role is not Role.ANY:
                return role
        raise ValueError(f"unknown role {label!r}: one of inference, read-only, admin")


_LABELS = {
    Role.OPEN: "none",
    Role.INFERENCE: "inference",
    Role.READ_ONLY: "read-only",
    Role.ADMIN: "admin",
    Role.ANY: "any",
}


@dataclass(frozen=True, slots=True)
class RouteRow:
    """One route: a handler without its role does not exist."""

    path: str  # Starlette's path syntax, without the root path
    methods: tuple[str, ...]  # HEAD comes with GET
    handler: Handler
    role: Role  # the least role that may call it
    name: str  # unique; for url_for and for logs
