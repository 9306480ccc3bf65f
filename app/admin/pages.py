"""The pages of the console and their fragments. What moves on them comes from the event stream, not from here."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from app.access import Role
from app.admin.api import history_of
from app.admin.keys import listing
from app.admin.limits import limits_table
from app.admin.timeline import timeline
from app.audit import utc_text
from app.context import context

AUDIT_ROWS = 100


async def engine_page(request: Request) -> Response:
    """GET /engine: the live engine."""
    return context(request).templates.render(request, "engine/engine.html", "Engine", "engine")


async def request_page(request: Request) -> Response:
    """GET /engine/requests/ID: the life of one request."""
    return _request_page(request, "engine/request.html")


async def request_fragment(request: Request) -> Response:
    """GET /engine/fragments/requests/ID: the same without the frame of the page, for as long as it lives."""
    return _request_page(request, "engine/_request.html")


def _request_page(request: Request, template: str) -> Response:
    history: dict[str, Any] = history_of(request)
    drawn = [timeline(sequence, history["server_time"]) for sequence in history["sequences"]]
    return context(request).templates.render(request, template, "Request", "engine", history=history, timelines=drawn)


async def admin_page(request: Request) -> Response:
    """GET /admin: limits, controls and, for admins, keys and the audit log."""
    ctx = context(request)
    may_act = request.state.role is Role.ADMIN
    return ctx.templates.render(
        request,
        "admin/admin.html",
        "Admin",
        "admin",
        limits=limits_table(ctx.async_engine, ctx.settings),
        limits_version=ctx.async_engine.state.limits_version,
        model=ctx.async_engine.info,
        flags=ctx.settings.describe(),
        entries=ctx.console.audit.latest(AUDIT_ROWS) if may_act else [],
        keys=_key_rows(request) if may_act else {"is_authentication_on": True, "is_kept": True, "keys": []},
        may_act=may_act,
    )


async def key_rows(request: Request) -> Response:
    """GET /admin/fragments/keys: the rows of the table of keys."""
    rows = _key_rows(request)["keys"]
    return context(request).templates.render(request, "admin/_key_rows.html", "Keys", "admin", keys=rows)


def _key_rows(request: Request) -> dict[str, Any]:
    """The keys with their times in words."""
    found = listing(request)
    rows = [
        {**row, "created_text": utc_text(row["created_at"]), "last_used_text": utc_text(row["last_used_at"])}
        for row in found["keys"]
    ]
    return {**found, "keys": rows}


async def audit_rows(request: Request) -> Response:
    """GET /admin/fragments/audit: the rows of the audit table."""
    ctx = context(request)
    return ctx.templates.render(
        request, "admin/_audit_rows.html", "Audit log", "admin", entries=ctx.console.audit.latest(AUDIT_ROWS)
    )
