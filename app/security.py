"""What is checked and added around every request, as pure ASGI: nothing here stands between a handler and a disconnect.

    Boundary  outermost: root path, request id, security headers, one log line, and the last resort for exceptions
    Gate      host allow-list, same-origin rule for unsafe methods, limits of the body

Knows nothing of keys and roles (`app.auth`) and of what the routes do.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import ApiError, error_response

logger = logging.getLogger(__name__)
request_logger = logging.getLogger("app.requests")

MAX_BODY_BYTES = 4 * 1024 * 1024
BODY_TIMEOUT_S = 30.0  # from the first look at the body to its end
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "worker-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
SECURITY_HEADERS: tuple[tuple[str, str], ...] = (
    ("content-security-policy", CONTENT_SECURITY_POLICY),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("x-frame-options", "DENY"),
)
# Asked for every few seconds, or many at a time: lines about them only hide the others.
QUIET_PATHS = ("/healthz", "/health", "/readyz", "/metrics", "/static/")

_DEFAULT_PORTS = {"http": "80", "https": "443"}
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def split_host(host: str) -> tuple[str, str]:
    """("[::1]", "8000") of "[::1]:8000", in lower case; ("", "") for what is no host."""
    match = re.fullmatch(r"(\[[0-9a-f:.%]+\]|[^:\[\]/@\s]+)(?::([0-9]{1,5}))?", host.strip().lower())
    return (match[1].rstrip("."), match[2] or "") if match else ("", "")


class HostAllowList:
    """Hosts a request may name: with a port only that port, without one any port."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self._hosts = frozenset(split_host(host) for host in hosts) - {("", "")}
        if not self._hosts:
            raise ValueError("the list of allowed hosts is empty")

    def allows(self, host: str) -> bool:
        """Whether the value of a Host header is in the list."""
        name, port = split_host(host)
        return (name, "") in self._hosts or (name, port) in self._hosts


def is_same_origin(method: str, headers: Headers) -> bool:
    """Whether a request may have effects: it comes from a page of this very origin, or from no browser at all."""
    if method in SAFE_METHODS:
        return True
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = headers.get("origin")
    if origin is None:
        return True
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    if parts.scheme not in _DEFAULT_PORTS or parts.path or parts.query or parts.fragment:
        return False
    default = _DEFAULT_PORTS[parts.scheme]
    name, port = split_host(parts.netloc)
    host_name, host_port = split_host(headers.get("host", ""))
    return bool(name) and (name, port or default) == (host_name, host_port or default)


class Gate:
    """Refuses what must not reach a handler."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        allowed_hosts: Iterable[str],
        max_body_bytes: int = MAX_BODY_BYTES,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self.app = app
        self.hosts = HostAllowList(allowed_hosts)
        self.max_body_bytes = max_body_bytes
        self.body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await error_response(Request(scope, receive), refusal)(scope, receive, send)
            return
        await self.app(scope, _bounded(receive, self.max_body_bytes, self.body_timeout_s), send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not self.hosts.allows(hosts[0]):
            shown = hosts[0][:100] if hosts else ""
            message = f"the host {shown!r} is not allowed here; --allowed-hosts names those that are"
            return ApiError(403, message, code="host_not_allowed")
        if not is_same_origin(scope["method"], headers):
            message = "a page of another origin may not do this"
            return ApiError(403, message, code="cross_origin")
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self.max_body_bytes:
            return _too_large(self.max_body_bytes)
        return None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")


def _bounded(receive: Receive, max_bytes: int, timeout_s: float) -> Receive:
    """`receive` that raises 413 over `max_bytes`, counted as they come, and 408 for a body that takes too long."""
    num_bytes = 0
    is_complete = False
    deadline: float | None = None

    async def bounded_receive() -> Message:
        nonlocal num_bytes, is_complete, deadline
        if is_complete:
            return await receive()
        if deadline is None:
            deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            headers = {"connection": "close"}
            raise ApiError(
                408, f"the body was not there after {timeout_s:g} s", code="body_timeout", headers=headers
            ) from None
        if message["type"] == "http.request":
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
        else:
            is_complete = True
        return message

    return bounded_receive


class Boundary:
    """The outermost layer: what every answer has, whoever gave it."""

    def __init__(self, app: ASGIApp, *, root_path: str = "", log_requests: bool = True) -> None:
        self.app = app
        self.root_path = root_path.rstrip("/")
        self.log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started_at = time.monotonic()
        status = 0
        self._set_root_path(scope)
        state = scope.setdefault("state", {})
        given = Headers(scope=scope).get("x-request-id", "")
        is_given = _REQUEST_ID.fullmatch(given) is not None
        state["request_id"] = given if is_given else uuid.uuid4().hex
        state["is_request_id_given"] = is_given

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", state["request_id"])
                for name, value in SECURITY_HEADERS:
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self.app(scope, receive, send_with_headers)
        except ClientDisconnect:
            pass  # nobody is there to answer
        except Exception as error:
            if status:
                logger.error("%s %s failed after its answer had begun", scope["method"], scope["path"], exc_info=error)
                raise
            await error_response(Request(scope, receive), error)(scope, receive, send_with_headers)
        finally:
            if self.log_requests:
                seconds = time.monotonic() - started_at
                path = scope["path"].removeprefix(self.root_path)
                shown = status or "left"  # the client went before there was an answer
                request_id = " ".join(filter(None, (state.get("answer_id"), given if is_given else None)))
                request_logger.log(
                    logging.DEBUG if path.startswith(QUIET_PATHS) else logging.INFO,
                    "%s %s %s %.3f s %s",
                    scope["method"], path, shown, seconds, request_id or state["request_id"],
                )  # fmt: skip

    def _set_root_path(self, scope: Scope) -> None:
        """Work behind proxies that strip the prefix, and behind those that don't."""
        root = self.root_path
        if root:
            path = scope["path"]
            scope["root_path"] = root
            scope["path"] = path if path == root or path.startswith(f"{root}/") else root + path
