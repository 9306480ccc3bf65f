"""Every route with every role: the table is the truth, and what it doesn't grant is denied."""

from __future__ import annotations

import asyncio
import re

import pytest
from starlette.applications import Starlette

from app.access import Role, RouteRow
from app.routes import ROUTES, route_table, starlette_routes
from app.settings import ApiKey, Settings
from tests.helpers.live_app import ADMIN, INFERENCE, KEYS, READ_ONLY, Exchange, request, running_app

CALLERS: dict[str, tuple[Role, dict[str, str]]] = {
    "nobody": (Role.OPEN, {}),
    "a wrong key": (Role.OPEN, {"authorization": "Bearer wrong"}),
    "another scheme": (Role.OPEN, {"authorization": f"Basic {ADMIN}"}),
    "inference": (Role.INFERENCE, {"authorization": f"Bearer {INFERENCE}"}),
    "read-only": (Role.READ_ONLY, {"authorization": f"Bearer {READ_ONLY}"}),
    "inference as Anthropic's clients send it": (Role.INFERENCE, {"x-api-key": INFERENCE}),
    "a wrong key as they send it": (Role.OPEN, {"x-api-key": "wrong"}),
    "admin": (Role.ADMIN, {"authorization": f"bearer {ADMIN}"}),
}
GRANTS = {
    Role.OPEN: {Role.OPEN},
    Role.INFERENCE: {Role.OPEN, Role.INFERENCE, Role.ANY},
    Role.READ_ONLY: {Role.OPEN, Role.READ_ONLY, Role.ANY},
    Role.ADMIN: set(Role),
}
REACHABLE = Settings(host="192.0.2.7", api_key=KEYS, allowed_hosts=("127.0.0.1",))
STREAMS = {"/admin/api/events", "/chat/api/stream"}


def concrete(path: str) -> str:
    return re.sub(r"\{(\w+)(?::(\w+))?\}", lambda match: "7" if match[2] == "int" else "x", path)


async def status_of(app: Starlette, row: RouteRow, method: str, headers: dict[str, str]) -> Exchange:
    exchange = Exchange(app, method, concrete(row.path), {"content-type": "application/json", **headers})
    exchange.start().send_body(b"")
    if row.path in STREAMS:  # endless when allowed: the answer's first message tells
        await exchange.sent.get()
        exchange.leave()
    return await exchange.end()


@pytest.mark.parametrize("caller", CALLERS)
def test_every_route_asks_for_the_role_of_its_row(caller: str) -> None:
    role, headers = CALLERS[caller]

    async def scenario() -> None:
        async with running_app(REACHABLE) as app:
            for row in route_table(is_loopback=False):
                for method in row.methods:
                    exchange = await status_of(app, row, method, headers)
                    where = f"{method} {row.path}"
                    assert exchange.status is not None
                    assert exchange.status < 500, where
                    if row.role in GRANTS[role]:
                        # a login with a wrong key answers 401 of its own
                        assert exchange.status not in (401, 403) or row.name == "login", where
                    else:
                        assert exchange.status == (401 if role is Role.OPEN else 403), where
                        assert set(exchange.json()["error"]) == {"message", "type", "param", "code"}, where
                        assert ("www-authenticate" in exchange.response_headers) == (role is Role.OPEN), where

    asyncio.run(scenario())


def test_only_these_are_open() -> None:
    open_paths = {row.path for row in route_table(is_loopback=False) if row.role is Role.OPEN}
    assert open_paths == {
        "/healthz", "/health", "/readyz", "/admin/login", "/admin/logout", "/static/{path:path}", "/favicon.ico",
    }  # fmt: skip


def test_metrics_are_open_on_a_loopback_address_only() -> None:
    async def scenario(settings: Settings) -> int | None:
        async with running_app(settings) as app:
            return (await request(app, "GET", "/metrics")).status

    assert asyncio.run(scenario(REACHABLE)) == 401
    assert asyncio.run(scenario(Settings(host="127.0.0.1", api_key=KEYS))) == 200


def test_what_changes_something_needs_more_than_read_only() -> None:
    for row in ROUTES:
        if row.role is Role.READ_ONLY:
            assert row.methods == ("GET",), row.path


def test_without_keys_on_loopback_everyone_is_admin() -> None:
    async def scenario() -> None:
        async with running_app() as app:
            assert (await request(app, "GET", "/admin/api/audit")).status == 200
            assert (await request(app, "GET", "/admin/api/info")).json()["role"] == "admin"

    asyncio.run(scenario())


def test_the_application_has_no_route_outside_the_table() -> None:
    async def scenario() -> list[str]:
        async with running_app() as app:
            return [getattr(route, "path", "?") for route in app.routes]

    assert asyncio.run(scenario()) == [row.path for row in route_table(is_loopback=True)]


def test_two_rows_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.routes.ROUTES", (*ROUTES, ROUTES[0]))
    with pytest.raises(ValueError, match=ROUTES[0].name):
        route_table(is_loopback=True)


def test_a_row_cannot_be_served_without_its_check() -> None:
    called = []

    async def handler(request: object) -> None:
        called.append(request)

    row = RouteRow("/secret", ("GET",), handler, Role.ADMIN, "secret")  # type: ignore[arg-type]

    async def scenario() -> int | None:
        async with running_app(REACHABLE) as app:
            app.router.routes[:0] = starlette_routes([row])
            return (await request(app, "GET", "/secret", authorization=f"Bearer {READ_ONLY}")).status

    assert asyncio.run(scenario()) == 403
    assert not called


@pytest.mark.parametrize(
    ("label", "role"),
    [
        ("inference", Role.INFERENCE),
        ("read-only", Role.READ_ONLY),
        ("read_only", Role.READ_ONLY),
        ("admin", Role.ADMIN),
    ],
)
def test_roles_have_labels(label: str, role: Role) -> None:
    assert Role.from_label(label) is role
    assert Role.from_label(role.label) is role


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="root"):
        Role.from_label("root")
    with pytest.raises(ValueError, match="any"):
        Role.from_label("any")  # of a row, never of a key


def test_a_key_never_shows_in_the_settings() -> None:
    assert "hunter2" not in repr(Settings(api_key=(ApiKey("hunter2", "admin"),)))
