"""What of `static/` and of the libraries is served, and how long browsers may keep it."""

from __future__ import annotations

import asyncio
import re

import pytest

from app.templating import STATIC_DIR, VENDOR, asset_path, static_file
from tests.helpers.live_app import request, running_app


@pytest.mark.parametrize(
    "path",
    ["package.json", "package-lock.json", "node_modules/htmx.org/dist/htmx.js", "vendor/nothing.js", "vendor/",
     "vendor/../../pyproject.toml", "../pyproject.toml", "css/../../app/auth.py", ".hidden.css", "css/.x.css", "",
     "css", "css/", "//etc/passwd", "css/base.css\0.js", "css\\base.css", "README.md"],
)  # fmt: skip
def test_nothing_else_is_served(path: str) -> None:
    async def scenario() -> None:
        async with running_app() as app:
            exchange = await request(app, "GET", f"/static/{path}")
            assert exchange.status == 404
            assert exchange.json()["error"]["code"] == "not_found"

    asyncio.run(scenario())


def test_an_address_with_a_hash_may_be_kept_for_ever_and_one_without_is_asked_for_again() -> None:
    async def scenario() -> None:
        async with running_app() as app:
            address = asset_path("css/base.css")
            assert re.fullmatch(r"/static/css/base\.css\?v=[0-9a-f]{12}", address)
            hashed = await request(app, "GET", address)
            assert hashed.status == 200
            assert "immutable" in hashed.response_headers["cache-control"]
            plain = await request(app, "GET", "/static/css/base.css")
            assert plain.response_headers["cache-control"] == "no-cache"
            again = await request(app, "GET", "/static/css/base.css", if_none_match=plain.response_headers["etag"])
            assert again.status == 304

    asyncio.run(scenario())


def test_scripts_and_styles_have_types_that_nosniff_accepts() -> None:
    async def scenario() -> None:
        async with running_app() as app:
            for path, kind in (("css/base.css", "text/css"), ("js/theme.js", "text/javascript")):
                answer = await request(app, "GET", f"/static/{path}")
                assert answer.response_headers["content-type"].startswith(kind)

    asyncio.run(scenario())


def test_a_missing_asset_still_has_an_address() -> None:
    assert asset_path("css/no-such.css") == "/static/css/no-such.css"
    assert asset_path("../secret.css") == "/static/../secret.css"
    assert static_file("../secret.css") is None


@pytest.mark.skipif(not (STATIC_DIR / "node_modules").is_dir(), reason="`make setup` installs the libraries")
@pytest.mark.parametrize("name", VENDOR)
def test_every_library_on_the_list_is_there(name: str) -> None:
    async def scenario() -> None:
        async with running_app() as app:
            answer = await request(app, "GET", f"/static/vendor/{name}")
            assert answer.status == 200
            assert len(answer.body) > 1000
            assert answer.response_headers["content-type"].startswith("text/")

    asyncio.run(scenario())
