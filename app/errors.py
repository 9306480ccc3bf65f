"""Every error a client can meet, in one JSON shape (OpenAI's) or, for people, as one page.

    {"error": {"message", "type", "param", "code"}}

Handlers raise `ApiError` or let the engine's typed errors pass; `error_of` is the one table from exception to answer.
Nothing of an unexpected exception but its being there reaches the client: the traceback is in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

from starlette._utils import get_route_path
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.context import context
from engine.errors import (
    EngineDeadError,
    EngineDrainingError,
    LimitsError,
    NotPausedError,
    QueueFullError,
    RequestError,
    RequestTooLongError,
    StaleLimitsError,
)

logger = logging.getLogger(__name__)

MAX_MESSAGE = 1000  # characters: messages may show the value that is refused
RETRY_AFTER_S = 1  # a full queue moves on with each finished request
_PAGE_PATHS = ("/admin/api/", "/chat/api/")  # JSON below pages
_PAGES = ("/", "/engine", "/admin", "/api", "/lab")


class ApiError(Exception):
    """An answer that is no success. `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]}..."
        self.kind = kind or _kind(status)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})  # further members of the error object

    def body(self) -> dict[str, object]:
        """The JSON value of the answer."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": {**error, **self.extra}}

    def response(self) -> Response:
        """The answer for a program."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def _kind(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 403:
        return "permission_error"
    if status == 503:
        return "service_unavailable"
    return "server_error" if status >= 500 else "invalid_request_error"


def bad_request(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A request that is wrong in itself: 400."""
    return ApiError(400, message, param=param, code=code)


def error_of(error: Exception) -> ApiError:
    """The answer to any exception; 500 for one that nobody expected."""
    match error:
        case ApiError():
            return error
        case RequestTooLongError():
            return bad_request(str(error), error.param, "context_length_exceeded")
        case QueueFullError():
            return _unavailable(str(error), "queue_full")
        case EngineDrainingError():
            return _unavailable(str(error) or "the engine takes no new requests: it is draining", "draining")
        case RequestError():
            return bad_request(str(error), error.param)
        case EngineDeadError():
            return ApiError(503, str(error), code="engine_dead", kind="server_error")
        case NotPausedError():
            return ApiError(409, str(error), code="not_paused")
        case LimitsError():
            return ApiError(422, str(error), param=error.field, code="invalid_value")
        case StaleLimitsError():
            return ApiError(412, str(error), code="stale")
        case HTTPException():
            code = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}.get(error.status_code)
            return ApiError(error.status_code, error.detail, code=code, headers=error.headers)
    return ApiError(500, "something failed in the server; its log says what", code="internal_error")


def _unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": str(RETRY_AFTER_S)})


def wants_page(request: Request) -> bool:
    """Whether a person waits for the answer: a browser that navigates, not a program and not a script of a page."""
    path = get_route_path(request.scope)
    if path.startswith(_PAGE_PATHS):
        return False
    is_page = path in _PAGES or path.startswith(tuple(f"{page}/" for page in _PAGES[1:]))
    accepts_html = "text/html" in request.headers.get("accept", "")
    return accepts_html and (is_page or request.headers.get("sec-fetch-mode", "navigate") == "navigate")


def error_response(request: Request, error: Exception) -> Response:
    """The answer to `error` in the form this client reads."""
    answer = error_of(error)
    if answer.status == 500 and not isinstance(error, ApiError):
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    if not wants_page(request):
        return answer.response()
    templates = context(request).templates
    if answer.status == 401:
        return templates.login_page(request, next_path=request.url.path, status=401, headers=answer.headers)
    try:
        title = HTTPStatus(answer.status).phrase
    except ValueError:
        title = "Error"
    return templates.error_page(request, answer.status, title, answer.message, headers=answer.headers)


async def handle_error(request: Request, error: Exception) -> Response:
    """Starlette's exception handler for everything."""
    return error_response(request, error)
