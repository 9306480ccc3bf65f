"""The API's description for programs and for people."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from app.access import Role, RouteRow
from app.context import context
from app.sse import dumps


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    from app.reference.document import openapi_document  # here: the table of routes holds this row
    from app.routes import route_table

    rows = route_table(is_loopback=context(request).settings.is_loopback())
    document = openapi_document(rows, str(request.scope.get("root_path", "")))
    return Response(dumps(document), media_type="application/json")


async def api(request: Request) -> Response:
    """GET /api."""
    from app.reference.pages import api_page  # here: it reads what the operations are made of

    return await api_page(request)


ROUTES: tuple[RouteRow, ...] = (
    RouteRow("/openapi.json", ("GET",), openapi, Role.ANY, "openapi"),
    RouteRow("/api", ("GET",), api, Role.ANY, "api_page"),
)
