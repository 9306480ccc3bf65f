"""Who is calling: a key in a header, or a signed cookie that a login gave out.

The header is Authorization, or x-api-key, where Anthropic's clients put it. On a loopback address without keys
everyone is admin. A cookie holds the fingerprint of a key and an expiry, signed with a secret derived from the keys of
the flags: it survives a restart, and is worth nothing once its key is taken away. Where no flag gives a key the secret
is random and a restart ends the logins: what could be derived from created keys is in the store, and whoever reads the
store must not be able to write cookies.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response

from app.access import Role, RouteRow
from app.context import context
from app.errors import ApiError
from app.keys import Key, KeyRing, fingerprint_of
from app.login_throttle import LoginThrottle
from app.sse import ABORT_EXTENSION

COOKIE = "pagedeck_login"
COOKIE_AGE_S = 7 * 24 * 3600


class Caller(NamedTuple):
    """Who is calling."""

    role: Role
    key: Key | None  # None: nobody in particular


NOBODY = Caller(Role.OPEN, None)


class Authenticator:
    """Finds the key that a caller shows. No keys: everyone is admin (the start refuses that on a reachable address).

    Args:
        keys: all there are, now and later.
        now: seconds since 1970.
    """

    def __init__(self, keys: KeyRing, now: Callable[[], float] = time.time) -> None:
        self.keys = keys
        self.throttle = LoginThrottle()
        self._now = now
        # Whose key -> how to cut each connection that is being answered; None: nobody's, while there are no keys.
        self._open: dict[str | None, set[Callable[[], None]]] = {}
        material = keys.flag_fingerprints
        # scrypt: a stolen cookie must not let weak keys be guessed at speed
        self._secret = (
            hashlib.scrypt(material, salt=b"pagedeck login cookie 1", n=2**14, r=8, p=1, dklen=32)
            if material
            else secrets.token_bytes(32)
        )

    @property
    def is_open(self) -> bool:
        """Whether there are no keys."""
        return self.keys.is_empty

    def find(self, key: str) -> Key | None:
        """The key with this text."""
        return self.keys.find(fingerprint_of(key))

    def issue_cookie(self, key: str) -> str:
        """The value of a login cookie for `key`."""
        payload = fingerprint_of(key) + int(self._now() + COOKIE_AGE_S).to_bytes(8, "big")
        return base64.urlsafe_b64encode(payload + self._sign(payload)).decode()

    def key_of_cookie(self, value: str) -> Key | None:
        """The key a cookie stands for; None for one that is forged, expired or of a key that is gone."""
        try:
            data = base64.b64decode(value, altchars=b"-_", validate=True)
        except ValueError:
            return None
        payload, signature = data[:-32], data[-32:]
        if self.is_open or len(payload) != 40 or not hmac.compare_digest(self._sign(payload), signature):
            return None
        if int.from_bytes(payload[32:], "big") < self._now():
            return None
        return self.keys.find(payload[:32])

    def _sign(self, payload: bytes) -> bytes:
        return hmac.digest(self._secret, payload, "sha256")

    def identify(self, connection: HTTPConnection) -> Caller:
        """The caller; `NOBODY` for one who shows nothing.

        Raises:
            ApiError: 401 for a key that is not known.
        """
        if self.is_open:
            return Caller(Role.ADMIN, None)
        header, bare = connection.headers.get("authorization"), connection.headers.get("x-api-key")
        if header is not None or bare is not None:
            scheme, _, text = ("bearer", "", bare or "") if header is None else header.partition(" ")
            key = self.find(text.strip()) if scheme.lower() == "bearer" else None
            if key is None:
                raise unauthorized("this API key is not known here", "invalid_api_key")
        else:
            cookie = connection.cookies.get(COOKIE)
            key = self.key_of_cookie(cookie) if cookie else None
            if key is None:
                return NOBODY
        self.keys.used(key)
        return Caller(key.role, key)

    def watch(self, connection: HTTPConnection, key: Key | None) -> None:
        """Remember how to cut the connection of this request until its task has ended."""
        abort = connection.scope.get("extensions", {}).get(ABORT_EXTENSION, {}).get("abort")
        task = asyncio.current_task()
        if abort is None or task is None:
            return
        key_id = None if key is None else key.id
        cuts = self._open.setdefault(key_id, set())
        cuts.add(abort)

        def forget(_: object) -> None:
            cuts.discard(abort)
            if not cuts:
                self._open.pop(key_id, None)

        task.add_done_callback(forget)

    def cut(self, key: Key | None, but: HTTPConnection) -> None:
        """End what is being answered, streams too, to a key that was revoked, or to nobody since keys are asked for.

        Not the request `but`.
        """
        own = but.scope.get("extensions", {}).get(ABORT_EXTENSION, {}).get("abort")
        for abort in list(self._open.get(None if key is None else key.id, ())):
            if abort != own:
                abort()


def unauthorized(message: str, code: str) -> ApiError:
    """401, with the scheme to use."""
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": 'Bearer realm="pagedeck"'})


def authorize(connection: HTTPConnection, needed: Role) -> Caller:
    """The caller, if it may do what needs `needed`.

    Raises:
        ApiError: 401 without a known key or login, 403 with one of another role.
    """
    authenticator: Authenticator = connection.app.state.authenticator
    if needed is Role.OPEN:
        try:
            return authenticator.identify(connection)
        except ApiError:
            return NOBODY  # a health check is answered whatever it carries
    caller = authenticator.identify(connection)
    if caller.role is Role.OPEN:
        raise unauthorized("this needs an API key (Authorization: Bearer ...) or a login", "missing_api_key")
    if not caller.role.may(needed):
        message = f"the role {caller.role.label} may not do this; it needs {needed.label}"
        raise ApiError(403, message, code="role_not_allowed")
    if caller.key is None or not caller.key.is_from_flag:
        authenticator.watch(connection, caller.key)
    return caller


def is_local_path(path: str) -> bool:
    """Whether a redirect to `path` stays on this server."""
    return path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable()


def _next_path(request: Request, fields: Mapping[str, object]) -> str:
    path = str(fields.get("next", ""))
    return path if is_local_path(path) else f"{_root_path(request)}/"


def _root_path(request: Request) -> str:
    return str(request.scope.get("root_path", ""))


async def login_form(request: Request) -> Response:
    """GET /admin/login."""
    return context(request).templates.login_page(request, next_path=_next_path(request, request.query_params))


async def login(request: Request) -> Response:
    """POST /admin/login: a key for a cookie."""
    authenticator: Authenticator = request.app.state.authenticator
    form = await request.form(max_files=0, max_fields=10)
    key, next_path = str(form.get("key", "")).strip(), _next_path(request, form)
    if not authenticator.is_open:
        address = request.client.host if request.client else ""
        wait_s = authenticator.throttle.wait_s(address)
        if wait_s:
            error = f"Too many wrong keys came from this address. Try again in {wait_s} s."
            return context(request).templates.login_page(
                request, next_path=next_path, status=429, error=error, headers={"Retry-After": str(wait_s)}
            )
        if authenticator.find(key) is None:
            authenticator.throttle.failed(address)
            error = "This key is not known here."
            return context(request).templates.login_page(request, next_path=next_path, status=401, error=error)
    response = RedirectResponse(next_path, status_code=303)
    if not authenticator.is_open:
        set_login_cookie(request, response, key)
    return response


def set_login_cookie(request: Request, response: Response, key: str) -> None:
    """Log the browser in with `key`."""
    authenticator: Authenticator = request.app.state.authenticator
    response.set_cookie(
        COOKIE,
        authenticator.issue_cookie(key),
        max_age=COOKIE_AGE_S,
        path=_root_path(request) or "/",
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


async def logout(request: Request) -> Response:
    """POST /admin/logout: forget the cookie."""
    root = _root_path(request)
    response = RedirectResponse(f"{root}/admin/login", status_code=303)
    response.delete_cookie(COOKIE, path=root or "/", httponly=True, samesite="strict")
    return response


ROUTES: tuple[RouteRow, ...] = (
    RouteRow("/admin/login", ("GET",), login_form, Role.OPEN, "login_form"),
    RouteRow("/admin/login", ("POST",), login, Role.OPEN, "login"),
    RouteRow("/admin/logout", ("POST",), logout, Role.OPEN, "logout"),
)
