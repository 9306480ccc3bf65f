"""Keys for programs, a signed cookie for browsers."""

from __future__ import annotations

import asyncio
import base64
from http.cookies import SimpleCookie
from urllib.parse import urlencode

import pytest
from starlette.applications import Starlette

from app.access import Role
from app.auth import COOKIE, COOKIE_AGE_S, Authenticator, is_local_path
from app.keys import KeyRing
from app.settings import Settings
from tests.helpers.live_app import ADMIN, INFERENCE, KEYS, READ_ONLY, Exchange, request, running_app

WITH_KEYS = Settings(api_key=KEYS)
FORM = {"content_type": "application/x-www-form-urlencoded", "sec_fetch_site": "same-origin"}


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def authenticator(*keys: tuple[str, Role], clock: Clock | None = None) -> Authenticator:
    return Authenticator(KeyRing(keys or ((ADMIN, Role.ADMIN), (INFERENCE, Role.INFERENCE))), clock or Clock())


def role_of_cookie(auth: Authenticator, cookie: str) -> Role | None:
    key = auth.key_of_cookie(cookie)
    return None if key is None else key.role


async def log_in(app: Starlette, key: str, next_path: str = "/engine") -> Exchange:
    body = urlencode({"key": key, "next": next_path}).encode()
    return await request(app, "POST", "/admin/login", body=body, **FORM)


def cookie_of(exchange: Exchange) -> str:
    return SimpleCookie(exchange.response_headers["set-cookie"])[COOKIE].value


def test_a_cookie_stands_for_the_role_of_its_key() -> None:
    auth = authenticator()
    assert role_of_cookie(auth, auth.issue_cookie(ADMIN)) is Role.ADMIN
    assert role_of_cookie(auth, auth.issue_cookie(INFERENCE)) is Role.INFERENCE


def test_a_cookie_survives_a_restart_with_the_same_keys_only() -> None:
    cookie = authenticator().issue_cookie(ADMIN)
    assert role_of_cookie(authenticator(), cookie) is Role.ADMIN
    assert role_of_cookie(authenticator((ADMIN, Role.ADMIN)), cookie) is None
    assert role_of_cookie(Authenticator(KeyRing(())), cookie) is None


def test_a_cookie_ends() -> None:
    clock = Clock()
    auth = authenticator(clock=clock)
    cookie = auth.issue_cookie(ADMIN)
    clock.now += COOKIE_AGE_S - 1
    assert role_of_cookie(auth, cookie) is Role.ADMIN
    clock.now += 2
    assert role_of_cookie(auth, cookie) is None


def test_a_forged_cookie_is_worth_nothing() -> None:
    auth = authenticator()
    cookie = auth.issue_cookie(INFERENCE)
    data = bytearray(base64.urlsafe_b64decode(cookie))
    for position in range(len(data)):
        changed = bytes(byte ^ (position == i) for i, byte in enumerate(data))
        assert role_of_cookie(auth, base64.urlsafe_b64encode(changed).decode()) is None
    for text in ("", "x", "=", cookie[:-4], cookie + "AAAA", "ä", "\0", base64.urlsafe_b64encode(b"\0" * 72).decode()):
        assert role_of_cookie(auth, text) is None


def test_keys_are_told_apart() -> None:
    auth = authenticator()
    assert auth.find(ADMIN) is not None
    for wrong in ("", ADMIN[:-1], ADMIN + "x", ADMIN.upper(), "\udcff"):
        assert auth.find(wrong) is None


def test_a_login_gives_a_cookie_that_scripts_and_other_sites_cannot_use() -> None:
    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            exchange = await log_in(app, READ_ONLY)
            assert exchange.status == 303
            assert exchange.response_headers["location"] == "/engine"
            attributes = exchange.response_headers["set-cookie"].lower()
            for attribute in ("httponly", "samesite=strict", "path=/"):
                assert attribute in attributes
            headers = {"cookie": f"{COOKIE}={cookie_of(exchange)}"}
            info = await request(app, "GET", "/admin/api/info", **headers)
            assert info.json()["role"] == "read-only"
            assert (await request(app, "POST", "/admin/api/engine/resume", {}, **headers)).status == 403

    asyncio.run(scenario())


def test_a_wrong_key_shows_the_form_again_without_a_cookie() -> None:
    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            exchange = await log_in(app, "wrong<script>")
            assert exchange.status == 401
            assert "set-cookie" not in exchange.response_headers
            assert b"not known" in exchange.body
            assert b"wrong<script>" not in exchange.body
            assert b'value="/engine"' in exchange.body

    asyncio.run(scenario())


def test_a_foreign_page_cannot_log_anyone_in() -> None:
    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            body = urlencode({"key": ADMIN}).encode()
            foreign = {**FORM, "sec_fetch_site": "cross-site"}
            assert (await request(app, "POST", "/admin/login", body=body, **foreign)).status == 403

    asyncio.run(scenario())


def test_a_logout_takes_the_cookie_back() -> None:
    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            exchange = await request(app, "POST", "/admin/logout", body=b"", **FORM)
            assert exchange.status == 303
            assert "max-age=0" in exchange.response_headers["set-cookie"].lower()

    asyncio.run(scenario())


def test_a_person_without_a_login_gets_the_form_and_a_program_gets_json() -> None:
    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            person = await request(app, "GET", "/engine", accept="text/html,*/*", sec_fetch_mode="navigate")
            assert person.status == 401
            assert person.response_headers["content-type"].startswith("text/html")
            assert b'name="next" value="/engine"' in person.body
            program = await request(app, "GET", "/engine")
            assert program.status == 401
            assert program.json()["error"]["code"] == "missing_api_key"
            script = await request(app, "GET", "/admin/api/state", accept="text/html")
            assert script.json()["error"]["code"] == "missing_api_key"

    asyncio.run(scenario())


def test_a_person_with_another_role_is_told_so_on_a_page() -> None:
    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            headers = {"authorization": f"Bearer {INFERENCE}", "accept": "text/html"}
            exchange = await request(app, "GET", "/engine", **headers)
            assert exchange.status == 403
            assert b"<h1>Forbidden</h1>" in exchange.body
            assert b"read-only" in exchange.body

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["//evil.com", "/\\evil.com", "http://evil.com", "evil", "", "/a\r\nset-cookie: x=1"])
def test_a_login_never_leads_away(path: str) -> None:
    assert not is_local_path(path)

    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            assert (await log_in(app, ADMIN, path)).response_headers["location"] == "/"

    asyncio.run(scenario())


def test_a_health_check_is_answered_whatever_key_it_carries() -> None:
    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            assert (await request(app, "GET", "/healthz", authorization="Bearer wrong")).status == 200

    asyncio.run(scenario())
