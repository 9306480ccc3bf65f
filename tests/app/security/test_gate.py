"""Hosts, origins, bodies, headers: what is refused before a handler sees it, and what every answer carries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.security import Boundary, Gate, HostAllowList, is_same_origin
from app.settings import Settings
from tests.helpers.live_app import Exchange, request, running_app

HOST = "127.0.0.1:8000"


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "[::1]", "localhost.:80"]
)
def test_loopback_names_are_allowed_with_any_port(host: str) -> None:
    assert HostAllowList(Settings().host_allow_list()).allows(host)


@pytest.mark.parametrize(
    "host",
    ["", "evil.com", "localhost.evil.com", "evil-localhost", "127.0.0.1.nip.io", "127.0.0.1@evil.com", "localhost:x",
     "localhost:80:80", "localhost/x", "[::1", "::1", "localhost evil.com", "127.0.0.2", "localhost:"],
)  # fmt: skip
def test_any_other_host_is_not(host: str) -> None:
    assert not HostAllowList(Settings().host_allow_list()).allows(host)


def test_a_listed_port_is_the_only_one() -> None:
    hosts = HostAllowList(["chat.example:8443"])
    assert hosts.allows("chat.example:8443")
    assert not hosts.allows("chat.example")
    assert not hosts.allows("chat.example:8000")
    assert not hosts.allows("localhost:8443")


@pytest.mark.parametrize("hosts", [[], [""], ["/"]])
def test_an_empty_list_is_refused(hosts: list[str]) -> None:
    with pytest.raises(ValueError, match="empty"):
        HostAllowList(hosts)


@pytest.mark.parametrize("path", ["/", "/healthz", "/v1/models", "/static/css/base.css", "/no/such/page"])
@pytest.mark.parametrize("host", ["evil.com", ""])
def test_another_host_gets_nothing_at_all(path: str, host: str) -> None:
    async def scenario() -> None:
        async with running_app() as app:
            exchange = await request(app, "GET", path, host=host)
            assert exchange.status == 403
            assert exchange.json()["error"]["code"] == "host_not_allowed"

    asyncio.run(scenario())


def test_two_host_headers_are_one_too_many() -> None:
    async def scenario() -> int:
        async with running_app() as app:
            messages: list[Any] = []
            scope = {
                "type": "http", "method": "GET", "path": "/healthz", "raw_path": b"/healthz", "query_string": b"",
                "headers": [(b"host", HOST.encode()), (b"host", b"evil.com")], "scheme": "http", "root_path": "",
                "http_version": "1.1", "server": None, "client": None, "asgi": {"version": "3.0"},
            }  # fmt: skip

            async def send(message: Any) -> None:
                messages.append(message)

            async def receive() -> Any:
                return {"type": "http.request", "body": b"", "more_body": False}

            await app(scope, receive, send)
            return int(messages[0]["status"])

    assert asyncio.run(scenario()) == 403


@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"sec-fetch-site": "same-origin"}, True),
        ({"sec-fetch-site": "same-origin", "origin": "http://evil.com"}, True),  # the browser's word is the stronger
        ({"sec-fetch-site": "same-site"}, False),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "none"}, False),
        ({"sec-fetch-site": ""}, False),
        ({"sec-fetch-site": "cross-site", "origin": f"http://{HOST}"}, False),
        ({"origin": f"http://{HOST}"}, True),
        ({"origin": f"http://{HOST.upper()}"}, True),
        ({"origin": "http://127.0.0.1:3000"}, False),
        ({"origin": "http://127.0.0.1"}, False),
        ({"origin": "http://evil.com"}, False),
        ({"origin": "null"}, False),
        ({"origin": ""}, False),
        ({"origin": f"ftp://{HOST}"}, False),
        ({"origin": f"http://{HOST}/"}, False),
        ({"origin": f"http://x@{HOST}"}, False),
        ({"origin": "http://[bad"}, False),
    ],
)
def test_only_pages_of_this_origin_and_programs_may_have_effects(headers: dict[str, str], allowed: bool) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert is_same_origin(method, Headers({"host": HOST, **headers})) is allowed
    for method in ("GET", "HEAD", "OPTIONS"):
        assert is_same_origin(method, Headers({"host": HOST, **headers}))


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("https://chat.example", "chat.example", True),
        ("https://chat.example", "chat.example:443", True),
        ("http://chat.example:80", "chat.example", True),
        ("https://chat.example", "chat.example:80", False),
    ],
)
def test_default_ports_are_the_same_origin(origin: str, host: str, allowed: bool) -> None:
    assert is_same_origin("POST", Headers({"host": host, "origin": origin})) is allowed


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/admin/api/engine/pause",
        "/admin/api/prefix-cache/reset",
        "/admin/login",
        "/chat/api/tokenize",
    ],
)
def test_a_foreign_page_cannot_post(path: str) -> None:
    async def scenario() -> None:
        async with running_app() as app:
            exchange = await request(app, "POST", path, {}, sec_fetch_site="cross-site")
            assert exchange.status == 403
            assert exchange.json()["error"]["code"] == "cross_origin"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/healthz"), ("GET", "/none"), ("POST", "/v1/completions"), ("GET", "/static/icon.svg")],
)
def test_every_answer_has_the_security_headers(method: str, path: str) -> None:
    async def scenario() -> None:
        async with running_app() as app:
            for host in ("127.0.0.1", "evil.com"):
                headers = (await request(app, method, path, host=host)).response_headers
                policy = headers["content-security-policy"]
                assert "default-src 'self'" in policy
                assert "unsafe" not in policy
                for directive in (
                    "frame-ancestors 'none'",
                    "base-uri 'none'",
                    "object-src 'none'",
                    "form-action 'self'",
                ):
                    assert directive in policy
                assert headers["x-content-type-options"] == "nosniff"
                assert headers["referrer-policy"] == "no-referrer"
                assert headers["x-request-id"]

    asyncio.run(scenario())


# ---- bodies ------------------------------------------------------------------------------------------------------


async def _echo(request: Request) -> Response:
    return JSONResponse(len(await request.body()))


async def _fail(request: Request) -> Response:
    raise RuntimeError("a secret of the server")


def guarded(*, max_body_bytes: int = 10, body_timeout_s: float = 60.0) -> Starlette:
    from app.errors import ApiError, handle_error

    app = Starlette(
        routes=[Route("/echo", _echo, methods=["POST"]), Route("/fail", _fail)],
        exception_handlers={ApiError: handle_error},
    )
    app.add_middleware(Gate, allowed_hosts=["127.0.0.1"], max_body_bytes=max_body_bytes, body_timeout_s=body_timeout_s)
    app.add_middleware(Boundary)
    return app


def test_a_body_up_to_the_limit_is_taken() -> None:
    async def scenario() -> None:
        exchange = await request(guarded(), "POST", "/echo", body=b"0123456789")
        assert (exchange.status, exchange.body) == (200, b"10")

    asyncio.run(scenario())


def test_a_body_that_announces_too_much_is_refused_unread() -> None:
    async def scenario() -> None:
        exchange = Exchange(guarded(), "POST", "/echo", {"content-length": "11"}).start()
        await exchange.end()
        assert exchange.status == 413
        assert exchange.json()["error"]["code"] == "body_too_large"

    asyncio.run(scenario())


def test_a_body_that_grows_too_large_is_refused_as_it_comes() -> None:
    async def scenario() -> None:
        exchange = Exchange(guarded(), "POST", "/echo").start()
        for _ in range(3):
            exchange.send_body(b"0123", more=True)  # and it would go on for ever
        await exchange.end()
        assert exchange.status == 413

    asyncio.run(scenario())


def test_a_body_that_never_ends_costs_its_own_request_only() -> None:
    async def scenario() -> None:
        app = guarded(body_timeout_s=0.05)
        slow = Exchange(app, "POST", "/echo").start().send_body(b"0", more=True)
        other = await request(app, "POST", "/echo", body=b"12")
        assert other.body == b"2"
        await slow.end()
        assert slow.status == 408
        assert slow.response_headers["connection"] == "close"

    asyncio.run(scenario())


def test_an_unforeseen_failure_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        exchange = await request(guarded(), "GET", "/fail")
        assert exchange.status == 500
        assert exchange.json()["error"]["type"] == "server_error"
        assert b"secret" not in exchange.body
        assert "content-security-policy" in exchange.response_headers

    asyncio.run(scenario())
    assert "a secret of the server" in caplog.text


# ---- log and root path -------------------------------------------------------------------------------------------


def test_one_line_per_request_without_query_or_text(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running_app() as app:
            body = {"prompt": "private", "max_tokens": 1}
            await request(app, "POST", "/v1/completions?q=private", body, x_request_id="trace-1")

    with caplog.at_level("INFO", "app.requests"):
        asyncio.run(scenario())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "app.requests"]
    assert line.startswith("POST /v1/completions 200 ")
    assert "trace-1" in line
    assert "cmpl-" in line
    assert "private" not in caplog.text


def test_health_checks_and_files_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running_app(Settings(root_path="/deck")) as app:
            for path in ("/healthz", "/readyz", "/deck/metrics", "/static/css/base.css"):
                assert (await request(app, "GET", path)).status == 200

    with caplog.at_level("INFO", "app.requests"):
        asyncio.run(scenario())
    assert not [record for record in caplog.records if record.name == "app.requests"]


def test_no_line_when_told_so(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with running_app(Settings(disable_log_requests=True)) as app:
            await request(app, "GET", "/v1/models")

    with caplog.at_level("INFO", "app.requests"):
        asyncio.run(scenario())
    assert not [record for record in caplog.records if record.name == "app.requests"]


@pytest.mark.parametrize("path", ["/pagedeck/v1/models", "/v1/models"])
def test_a_proxy_may_strip_the_root_path_or_leave_it(path: str) -> None:
    async def scenario() -> None:
        async with running_app(Settings(root_path="/pagedeck")) as app:
            assert (await request(app, "GET", path)).status == 200

    asyncio.run(scenario())
