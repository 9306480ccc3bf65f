"""Who is calling: a key in the Authorization header, or a signed cookie that a login gave out.

On a loopback address without keys everyone is admin. A cookie holds the fingerprint of a key and an expiry, signed
with a secret derived from the keys: it survives a restart, and is worth nothing once its key is taken away.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Mapping

from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response

from app.access import Role, RouteRow
from app.context import context
from app.errors import ApiError

COOKIE = "pagedeck_login"
COOKIE_AGE_S = 7 * 24 * 3600


class Authenticator:
    """Keys and their roles. No keys: everyone is admin (the start refuses that on a reachable address).

    Args:
        keys: (key, role) pairs.
        now: seconds since 1970.
    """

    def __init__(self, keys: Iterable[tuple[str, Role]], now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._roles: list[tuple[bytes, Role]] = [(_fingerprint(key), role) for key, role in keys]
        material = b"".join(fingerprint for fingerprint, _ in self._roles)
        # scrypt: a stolen cookie must not let weak keys be guessed at speed
        self._secret = (
            hashlib.scrypt(material, salt=b"pagedeck login cookie 1", n=2**14, r=8, p=1, dklen=32) if material else b""
        )

    @property
    def is_open(self) -> bool:
        """Whether there are no keys."""
        return not self._roles

    def role_of_key(self, key: str) -> Role | None:
        """The role of a key, compared in constant time with every key there is."""
        return self._role_of_fingerprint(_fingerprint(key))

    def _role_of_fingerprint(self, fingerprint: bytes) -> Role | None:
        found: Role | None = None
        for known, role in self._roles:
            if hmac.compare_digest(known, fingerprint):
                found = role
        return found

    def issue_cookie(self, key: str) -> str:
        """The value of a login cookie for `key`."""
        payload = _fingerprint(key) + int(self._now() + COOKIE_AGE_S).to_bytes(8, "big")
        return base64.urlsafe_b64encode(payload + self._sign(payload)).decode()

    def role_of_cookie(self, value: str) -> Role | None:
        """The role a cookie stands for; None for one that is forged, expired or of a key that is gone."""
        try:
            data = base64.b64decode(value, altchars=b"-_", validate=True)
        except ValueError:
            return None
        payload, signature = data[:-32], data[-32:]
        if self.is_open or len(payload) != 40 or not hmac.compare_digest(self._sign(payload), signature):
            return None
        if int.from_bytes(payload[32:], "big") < self._now():
            return None
        return self._role_of_fingerprint(payload[:32])

    def _sign(self, payload: bytes) -> bytes:
        return hmac.digest(self._secret, payload, "sha256")

    def role_of(self, connection: HTTPConnection) -> Role:
        """The caller's role; OPEN for one who shows nothing.

        Raises:
            ApiError: 401 for a key that is not known.
        """
        if self.is_open:
            return Role.ADMIN
        header = connection.headers.get("authorization")
        if header is not None:
            scheme, _, key = header.partition(" ")
            role = self.role_of_key(key.strip()) if scheme.lower() == "bearer" else None
            if role is None:
                raise unauthorized("this API key is not known here", "invalid_api_key")
            return role
        cookie = connection.cookies.get(COOKIE)
        return (self.role_of_cookie(cookie) if cookie else None) or Role.OPEN


def _fingerprint(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def unauthorized(message: str, code: str) -> ApiError:
    """401, with the scheme to use."""
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": 'Bearer realm="pagedeck"'})


def authorize(connection: HTTPConnection, needed: Role) -> Role:
    """The caller's role, if it may do what needs `needed`.

    Raises:
        ApiError: 401 without a known key or login, 403 with one of another role.
    """
    authenticator: Authenticator = connection.app.state.authenticator
    if needed is Role.OPEN:
        try:
            return authenticator.role_of(connection)
        except ApiError:
            return Role.OPEN  # a health check is answered whatever it carries
    role = authenticator.role_of(connection)
    if role is Role.OPEN:
        raise unauthorized("this needs an API key (Authorization: Bearer ...) or a login", "missing_api_key")
    if not role.may(needed):
        raise ApiError(403, f"the role {role.label} may not do this; it needs {needed.label}", code="role_not_allowed")
    return role


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
    key, next_path = str(form.get("key", "")), _next_path(request, form)
    if not authenticator.is_open and authenticator.role_of_key(key.strip()) is None:
        error = "This key is not known here."
        return context(request).templates.login_page(request, next_path=next_path, status=401, error=error)
    response = RedirectResponse(next_path, status_code=303)
    if not authenticator.is_open:
        response.set_cookie(
            COOKIE,
            authenticator.issue_cookie(key.strip()),
            max_age=COOKIE_AGE_S,
            path=_root_path(request) or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
    return response


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
