"""Keys that admins create and revoke while the server runs, beside those of the flags."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Annotated, Any, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.access import Role
from app.admin.actions import audited
from app.auth import Authenticator, set_login_cookie
from app.context import context
from app.errors import ApiError
from app.json_body import Body, read_body
from app.keys import MAX_LABEL, Key, KeyRefusedError
from app.settings import Role as RoleLabel

T = TypeVar("T")
NO_STORE = {"Cache-Control": "no-store"}


class CreateKeyBody(Body):
    """POST /admin/api/keys."""

    label: Annotated[str, Field(min_length=1, max_length=MAX_LABEL, pattern=r"^\S(.*\S)?$")]
    role: RoleLabel


async def list_keys(request: Request) -> Response:
    """GET /admin/api/keys: all keys, without their texts, and whether any is asked for."""
    return JSONResponse(listing(request), headers=NO_STORE)


def listing(request: Request) -> dict[str, Any]:
    """The keys as the page and programs see them."""
    console = context(request).console
    return {
        "is_authentication_on": not console.keys.is_empty,
        "is_kept": console.store.is_kept,
        "keys": [{**key.as_json(), "is_yours": key is request.state.key} for key in console.keys.all()],
    }


async def create_key(request: Request) -> Response:
    """POST /admin/api/keys {"label", "role"}: 201 with the key's text, this once.

    The first key turns authentication on, also for what is being answered: it is cut. A browser that made the key is
    logged in with it, so that its pages go on.
    """
    body = await read_body(request, CreateKeyBody)
    console, role = context(request).console, Role.from_label(body.role)
    was_open = console.keys.is_empty
    key, text = await audited(
        request, "key created", f"{body.label} ({role.label})", _refusable(console.keys.create(body.label, role))
    )
    response = JSONResponse({**key.as_json(), "key": text}, status_code=201, headers=NO_STORE)
    if was_open:
        authenticator: Authenticator = request.app.state.authenticator
        authenticator.cut(None, but=request)
        if request.headers.get("sec-fetch-site") == "same-origin":
            set_login_cookie(request, response, text)
    return response


async def revoke_key(request: Request) -> Response:
    """DELETE /admin/api/keys/ID: the key holds no more, and what is being answered to it ends."""
    console = context(request).console
    key_id: str = request.path_params["key_id"]
    known = next((key for key in console.keys.all() if key.id == key_id), None)
    shown = key_id if known is None else f"{known.label} ({known.role.label})"
    key = await audited(request, "key revoked", shown, _revoke(request, key_id))
    authenticator: Authenticator = request.app.state.authenticator
    authenticator.cut(key, but=request)
    is_on = not console.keys.is_empty
    return JSONResponse({"ok": True, **key.as_json(), "is_authentication_on": is_on}, headers=NO_STORE)


async def _revoke(request: Request, key_id: str) -> Key:
    key = await _refusable(context(request).console.keys.revoke(key_id))
    if key is None:
        raise ApiError(404, f"there is no key {key_id[:40]!r}", param="key_id", code="not_found")
    return key


async def _refusable(command: Awaitable[T]) -> T:
    try:
        return await command
    except KeyRefusedError as error:
        raise ApiError(409, str(error), param=error.param, code=error.code) from error
