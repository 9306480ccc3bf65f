"""The table of all routes. The application is built from it, and a test walks it with every role.

The role is enforced in a wrapper around each handler, so that a row cannot be served without its check.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app import auth, health, templating
from app.access import Handler, Role, RouteRow
from app.admin.routes import ROUTES as ADMIN_ROUTES
from app.auth import authorize
from app.openai_api.routes import ROUTES as OPENAI_ROUTES
from app.playground.routes import ROUTES as PLAYGROUND_ROUTES
from app.reference.routes import ROUTES as REFERENCE_ROUTES

ROUTES: tuple[RouteRow, ...] = (
    *health.ROUTES,
    *OPENAI_ROUTES,
    *auth.ROUTES,
    *ADMIN_ROUTES,
    *PLAYGROUND_ROUTES,
    *REFERENCE_ROUTES,
    *templating.ROUTES,
)


def route_table(*, is_loopback: bool) -> tuple[RouteRow, ...]:
    """The rows as they hold for this address: on a loopback one `/metrics` needs no key.

    Raises:
        ValueError: two rows have one name.
    """
    twice = [name for name, count in Counter(row.name for row in ROUTES).items() if count > 1]
    if twice:
        raise ValueError(f"routes with the same name: {', '.join(twice)}")
    return tuple(replace(row, role=Role.OPEN) if is_loopback and row.path == "/metrics" else row for row in ROUTES)


def guarded(row: RouteRow) -> Handler:
    """The row's handler behind its role."""

    async def endpoint(request: Request) -> Response:
        request.state.role, request.state.key = authorize(request, row.role)
        return await row.handler(request)

    return endpoint


def starlette_routes(rows: Iterable[RouteRow]) -> list[Route]:
    """Starlette's routes, in the order of the table."""
    return [Route(row.path, guarded(row), methods=list(row.methods), name=row.name) for row in rows]
