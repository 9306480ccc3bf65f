"""Keys that are created and revoked while the server runs."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from app.access import Role
from app.auth import COOKIE
from app.keys import WRITE_INTERVAL_S, KeyRing, fingerprint_of
from app.settings import ApiKey, Settings
from app.sse import ABORT_EXTENSION
from app.store import FILE_NAME, MIGRATIONS, Store
from engine.errors import StartupError
from tests.helpers.live_app import ADMIN, KEYS, Exchange, request, running_app

WITH_KEYS = Settings(api_key=KEYS)
AS_ADMIN = {"authorization": f"Bearer {ADMIN}"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def create(app: Starlette, label: str, role: str, **headers: str) -> Any:
    exchange = await request(app, "POST", "/admin/api/keys", {"label": label, "role": role}, **headers)
    assert exchange.status == 201, exchange.body
    return exchange.json()


async def listed(app: Starlette, **headers: str) -> Any:
    return (await request(app, "GET", "/admin/api/keys", **headers)).json()


async def revoke(app: Starlette, key_id: str, **headers: str) -> Exchange:
    return await request(app, "DELETE", f"/admin/api/keys/{key_id}", **headers)


def test_a_created_key_works_with_its_role_until_it_is_revoked() -> None:
    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            made = await create(app, "notebook", "inference", **AS_ADMIN)
            key = made["key"]
            assert re.fullmatch(r"pd-[A-Za-z0-9_-]{43}", key)
            assert (await request(app, "GET", "/v1/models", **bearer(key))).status == 200
            assert (await request(app, "GET", "/admin/api/state", **bearer(key))).status == 403
            revoked = await revoke(app, made["id"], **AS_ADMIN)
            assert revoked.status == 200
            assert revoked.json()["is_authentication_on"] is True
            assert (await request(app, "GET", "/v1/models", **bearer(key))).status == 401
            again = await revoke(app, made["id"], **AS_ADMIN)
            assert again.status == 404
            assert again.json()["error"]["param"] == "key_id"

    asyncio.run(scenario())


def test_a_keys_text_is_in_the_answer_that_made_it_and_nowhere_else(tmp_path: Path) -> None:
    async def scenario() -> str:
        settings = Settings(api_key=KEYS, data_dir=str(tmp_path))
        async with running_app(settings) as app:
            made = await create(app, "notebook", "read-only", **AS_ADMIN)
            key: str = made["key"]
            for path in ("/admin/api/keys", "/admin/api/audit", "/admin/api/info", "/admin", "/metrics"):
                answer = await request(app, "GET", path, **AS_ADMIN)
                assert answer.status == 200
                assert key.encode() not in answer.body, path
            return key

    key = asyncio.run(scenario())
    files = [path for path in tmp_path.iterdir() if path.is_file()]
    assert {path.name for path in files} >= {FILE_NAME}
    assert all(key.encode() not in path.read_bytes() for path in files)
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o077 == 0


def test_keys_survive_a_restart_with_a_data_directory(tmp_path: Path) -> None:
    async def first() -> Any:
        async with running_app(Settings(api_key=KEYS, data_dir=str(tmp_path))) as app:
            made = await create(app, "notebook", "admin", **AS_ADMIN)
            assert (await request(app, "GET", "/v1/models", **bearer(made["key"]))).status == 200
            return made

    async def second(made: Any) -> None:
        async with running_app(Settings(data_dir=str(tmp_path))) as app:
            assert (await request(app, "GET", "/v1/models")).status == 401, "its key asks for a key"
            (row,) = (await listed(app, **bearer(made["key"])))["keys"]
            assert row["last_used_at"] is not None
            assert (row["label"], row["role"], row["source"], row["is_yours"]) == (
                "notebook", "admin", "created", True,
            )  # fmt: skip
            assert row["created_at"] == made["created_at"]

    made = asyncio.run(first())
    asyncio.run(second(made))


def test_without_a_data_directory_keys_last_as_long_as_the_process() -> None:
    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            assert (await listed(app, **AS_ADMIN))["is_kept"] is False
            key = (await create(app, "x", "inference", **AS_ADMIN))["key"]
        async with running_app(WITH_KEYS) as app:
            assert (await request(app, "GET", "/v1/models", **bearer(key))).status == 401

    asyncio.run(scenario())


def test_keys_of_flags_are_listed_and_not_revocable() -> None:
    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            rows = (await listed(app, **AS_ADMIN))["keys"]
            assert [(row["source"], row["role"]) for row in rows] == [
                ("flag", "inference"), ("flag", "read-only"), ("flag", "admin"),
            ]  # fmt: skip
            assert [row["is_yours"] for row in rows] == [False, False, True]
            refused = await revoke(app, rows[0]["id"], **AS_ADMIN)
            assert refused.status == 409
            assert refused.json()["error"]["code"] == "key_from_flag"

    asyncio.run(scenario())


def test_the_first_key_turns_authentication_on_and_must_be_an_admins() -> None:
    async def scenario() -> None:
        async with running_app() as app:
            refused = await request(app, "POST", "/admin/api/keys", {"label": "x", "role": "inference"})
            assert refused.status == 409
            assert refused.json()["error"]["code"] == "first_key_must_be_admin"
            assert refused.json()["error"]["param"] == "role"
            assert (await listed(app))["is_authentication_on"] is False
            first = await create(app, "me", "admin")
            assert (await request(app, "GET", "/admin/api/state")).status == 401
            assert (await listed(app, **bearer(first["key"])))["is_authentication_on"] is True
            other = await create(app, "program", "inference", **bearer(first["key"]))
            last_admin = await revoke(app, first["id"], **bearer(first["key"]))
            assert last_admin.status == 409
            assert last_admin.json()["error"]["code"] == "last_admin_key"
            assert (await revoke(app, other["id"], **bearer(first["key"]))).status == 200
            gone = await revoke(app, first["id"], **bearer(first["key"]))
            assert gone.json()["is_authentication_on"] is False
            assert (await request(app, "GET", "/admin/api/state")).status == 200, "as before the first key"

    asyncio.run(scenario())


def test_the_browser_that_makes_the_first_key_is_logged_in_with_it() -> None:
    async def scenario() -> None:
        async with running_app() as app:
            body = {"label": "me", "role": "admin"}
            made = await request(app, "POST", "/admin/api/keys", body, sec_fetch_site="same-origin")
            cookie = SimpleCookie(made.response_headers["set-cookie"])[COOKIE]
            assert cookie["httponly"]
            assert cookie["samesite"] == "strict"
            page = await request(app, "GET", "/admin", accept="text/html", cookie=f"{COOKIE}={cookie.value}")
            assert page.status == 200
            second = await request(
                app, "POST", "/admin/api/keys", body,
                sec_fetch_site="same-origin", cookie=f"{COOKIE}={cookie.value}",
            )  # fmt: skip
            assert second.status == 201
            assert "set-cookie" not in second.response_headers

    asyncio.run(scenario())


def test_a_login_with_a_created_key_ends_with_the_key() -> None:
    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            made = await create(app, "browser", "read-only", **AS_ADMIN)
            form = {"content_type": "application/x-www-form-urlencoded", "sec_fetch_site": "same-origin"}
            login = await request(app, "POST", "/admin/login", body=f"key={made['key']}".encode(), **form)
            assert login.status == 303
            cookie = f"{COOKIE}={SimpleCookie(login.response_headers['set-cookie'])[COOKIE].value}"
            assert (await request(app, "GET", "/admin/api/state", cookie=cookie)).status == 200
            await revoke(app, made["id"], **AS_ADMIN)
            assert (await request(app, "GET", "/admin/api/state", cookie=cookie)).status == 401

    asyncio.run(scenario())


async def stream(app: Starlette, key: str, cut: list[str]) -> Exchange:
    exchange = Exchange(app, "GET", "/admin/api/events", bearer(key) if key else {})

    async def with_abort(scope: Any, receive: Any, send: Any) -> None:
        def abort() -> None:
            cut.append(key)
            exchange.leave()

        await app({**scope, "extensions": {ABORT_EXTENSION: {"abort": abort}}}, receive, send)

    exchange.app = with_abort  # type: ignore[assignment]
    exchange.start().send_body(b"")
    await exchange.sent.get()
    return exchange


def test_revoking_a_key_cuts_the_streams_it_opened_and_no_others() -> None:
    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            cut: list[str] = []
            one = await create(app, "one", "read-only", **AS_ADMIN)
            two = await create(app, "two", "read-only", **AS_ADMIN)
            first, second = await stream(app, one["key"], cut), await stream(app, two["key"], cut)
            await revoke(app, one["id"], **AS_ADMIN)
            await first.end()
            assert cut == [one["key"]]
            assert second.task is not None
            assert not second.task.done()
            second.leave()
            await second.end()

    asyncio.run(scenario())


def test_the_first_key_cuts_what_is_streamed_without_one() -> None:
    async def scenario() -> None:
        async with running_app() as app:
            cut: list[str] = []
            anonymous = await stream(app, "", cut)
            first = await create(app, "me", "admin")
            await anonymous.end()
            assert cut == [""]
            with_key = await stream(app, first["key"], cut)
            await create(app, "another", "inference", **bearer(first["key"]))
            assert cut == [""]
            with_key.leave()
            await with_key.end()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "label"), ({"label": "x"}, "role"), ({"label": "", "role": "admin"}, "label"),
        ({"label": "   ", "role": "admin"}, "label"), ({"label": "x" * 65, "role": "admin"}, "label"),
        ({"label": 1, "role": "admin"}, "label"), ({"label": "x", "role": "root"}, "role"),
        ({"label": "x", "role": "any"}, "role"), ({"label": "x", "role": None}, "role"),
    ],
)  # fmt: skip
def test_a_wrong_body_names_its_field(body: dict[str, object], param: str) -> None:
    async def scenario() -> None:
        async with running_app() as app:
            refused = await request(app, "POST", "/admin/api/keys", body)
            assert refused.status == 400
            assert refused.json()["error"]["param"] == param
            assert (await listed(app))["keys"] == []

    asyncio.run(scenario())


def test_what_is_done_with_keys_is_in_the_audit_log_with_the_key_that_did_it() -> None:
    async def scenario() -> None:
        async with running_app(WITH_KEYS) as app:
            made = await create(app, "second admin", "admin", **AS_ADMIN)
            await revoke(app, "flag-1", **bearer(made["key"]))
            await revoke(app, made["id"], **AS_ADMIN)
            entries = (await request(app, "GET", "/admin/api/audit", **AS_ADMIN)).json()["entries"]
            assert [(e["action"], e["detail"], e["key_label"], e["outcome"][:12]) for e in entries] == [
                ("key revoked", "second admin (admin)", "--api-key 3", "ok"),
                ("key revoked", "--api-key 1 (inference)", "second admin", "refused (409"),
                ("key created", "second admin (admin)", "--api-key 3", "ok"),
            ]

    asyncio.run(scenario())


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


def test_the_last_use_is_shown_at_once_and_written_at_most_once_a_minute(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock, store = Clock(), Store(str(tmp_path))
        ring = KeyRing((), store, clock)
        ring.load(store.open())
        key, text = await ring.create("x", Role.ADMIN)

        async def written() -> float | None:
            (value,) = await store.run(lambda db: db.execute("SELECT last_used_at FROM api_keys").fetchone())
            return value  # type: ignore[no-any-return]

        assert ring.find(fingerprint_of(text)) is key
        assert await written() is None
        ring.used(key)
        assert await written() == 1_000
        clock.now += WRITE_INTERVAL_S - 1
        ring.used(key)
        assert key.last_used_at == clock.now
        assert await written() == 1_000
        ring.write_last_uses()
        assert await written() == clock.now
        clock.now += WRITE_INTERVAL_S
        ring.used(key)
        assert await written() == clock.now
        await store.close()

    asyncio.run(scenario())


def test_a_key_that_could_not_be_written_does_not_exist(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running_app(Settings(api_key=KEYS, data_dir=str(tmp_path))) as app:
            await app.state.ctx.console.store.run(lambda db: db.execute("DROP TABLE api_keys"))
            refused = await request(app, "POST", "/admin/api/keys", {"label": "x", "role": "admin"}, **AS_ADMIN)
            assert refused.status == 500
            assert len((await listed(app, **AS_ADMIN))["keys"]) == len(KEYS)
            (entry, *_) = (await request(app, "GET", "/admin/api/audit", **AS_ADMIN)).json()["entries"]
            assert entry["outcome"] == "failed: OperationalError"

    asyncio.run(scenario())


def test_a_file_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / FILE_NAME)
    database.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    database.close()
    with pytest.raises(StartupError, match="newer"):
        Store(str(tmp_path)).open()


def test_a_file_that_is_no_database_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"not a database, whatever its name says" * 100)
    with pytest.raises(StartupError, match="--data-dir"):
        Store(str(tmp_path)).open()


def test_a_key_given_twice_as_flags_counts_once_for_the_caller() -> None:
    ring = KeyRing([("k", Role.INFERENCE), ("k", Role.ADMIN)])
    found = ring.find(fingerprint_of("k"))
    assert found is not None
    assert found.id == "flag-2"


def test_keys_of_flags_alone_sign_cookies(tmp_path: Path) -> None:
    async def cookie_works_after_restart(settings: Settings) -> bool:
        async with running_app(settings) as app:
            auth = app.state.authenticator
            _, text = await app.state.ctx.console.keys.create("x", Role.ADMIN)
            cookie = auth.issue_cookie(text)
            assert auth.key_of_cookie(cookie) is not None
        async with running_app(settings) as app:
            return app.state.authenticator.key_of_cookie(cookie) is not None

    with_flag = Settings(api_key=(ApiKey(ADMIN, "admin"),), data_dir=str(tmp_path / "a"))
    assert asyncio.run(cookie_works_after_restart(with_flag)) is True
    assert asyncio.run(cookie_works_after_restart(Settings(data_dir=str(tmp_path / "b")))) is False


def test_a_data_directory_that_cannot_be_used_is_one_line_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")

    async def start() -> None:
        async with running_app(Settings(data_dir=str(tmp_path / "file" / "below"))):
            pass

    with pytest.raises(StartupError, match="--data-dir"):
        asyncio.run(start())
