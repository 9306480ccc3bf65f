"""The console's pages: rendered for each role, with nothing on them that the role may not see."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.settings import Settings
from tests.helpers.live_app import ADMIN, INFERENCE, KEYS, READ_ONLY, Exchange, request, running_app

SECRET_REASON = "a reason <b>only</b> for admins"


def get(*paths: str, key: str | None = None, act: bool = False) -> list[Exchange]:
    """GET each path with `key`; with `act` an admin has paused the engine before."""

    async def main() -> list[Exchange]:
        settings = Settings(api_key=KEYS) if key else Settings()
        async with running_app(settings) as app:
            if act:
                body, admin = {"reason": SECRET_REASON}, {"authorization": f"Bearer {ADMIN}"} if key else {}
                assert (await request(app, "POST", "/admin/api/engine/pause", body, **admin)).status == 200
            headers: dict[str, Any] = {"accept": "text/html"}
            if key:
                headers["authorization"] = f"Bearer {key}"
            return [await request(app, "GET", path, **headers) for path in paths]

    return asyncio.run(main())


@pytest.mark.parametrize("path", ["/", "/engine", "/admin", "/api"])
def test_a_page_is_html_and_kept_by_no_cache(path: str) -> None:
    (page,) = get(path)
    assert page.status == 200
    assert page.response_headers["content-type"].startswith("text/html")
    assert page.response_headers["cache-control"] == "no-store"
    assert "fake" in page.body.decode()


def test_the_limits_are_on_the_admin_page_for_who_may_read_and_the_audit_log_for_admins_only() -> None:
    (page,) = get("/admin", key=READ_ONLY, act=True)
    assert page.status == 200
    assert "max_num_batched_tokens" in page.body.decode()
    assert "only</b>" not in page.body.decode()
    assert "only&lt;/b&gt;" not in page.body.decode()
    (page,) = get("/admin", key=ADMIN, act=True)
    assert "a reason &lt;b&gt;only&lt;/b&gt; for admins" in page.body.decode()


def test_the_audit_rows_are_a_fragment_for_admins() -> None:
    (rows,) = get("/admin/fragments/audit", act=True)
    text = rows.body.decode()
    assert "<html" not in text
    assert text.count("<tr") == 1
    assert "a reason &lt;b&gt;only&lt;/b&gt; for admins" in text
    assert [r.status for r in get("/admin/fragments/audit", key=READ_ONLY)] == [403]


def test_each_role_sees_its_pages() -> None:
    assert [page.status for page in get("/", "/engine", "/admin", "/api", key=INFERENCE)] == [200, 403, 403, 200]
    assert [page.status for page in get("/", "/engine", "/admin", "/api", key=READ_ONLY)] == [403, 200, 200, 200]
    assert [page.status for page in get("/", "/engine", "/admin", "/api", key=ADMIN)] == [200, 200, 200, 200]


def test_keys_are_on_the_admin_page_for_admins_only_and_labels_are_escaped() -> None:
    async def scenario() -> tuple[str, str]:
        async with running_app(Settings(api_key=KEYS)) as app:
            admin = {"authorization": f"Bearer {ADMIN}"}
            body = {"label": "<i>notebook</i>", "role": "inference"}
            assert (await request(app, "POST", "/admin/api/keys", body, **admin)).status == 201
            pages = [
                await request(app, "GET", "/admin", accept="text/html", authorization=f"Bearer {key}")
                for key in (ADMIN, READ_ONLY)
            ]
            fragment = await request(app, "GET", "/admin/fragments/keys", **admin)
            assert b"&lt;i&gt;notebook&lt;/i&gt;" in fragment.body
            assert b"<html" not in fragment.body
            return pages[0].body.decode(), pages[1].body.decode()

    for_admin, for_reader = asyncio.run(scenario())
    assert "&lt;i&gt;notebook&lt;/i&gt;" in for_admin
    assert "notebook" not in for_reader
    assert "<i>notebook" not in for_admin


def test_the_api_page_tells_each_role_what_it_may_run() -> None:
    (page,) = get("/api", key=INFERENCE)
    html = page.body.decode()
    assert "Needs the role read-only; this browser has inference." in html
    (page,) = get("/api", key=ADMIN)
    assert "Needs the role" not in page.body.decode()
