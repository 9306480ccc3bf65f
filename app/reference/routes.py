"""The API's description for programs and for people."""

from __future__ import annotations

import anyio.to_thread
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
    root_path = str(request.scope.get("root_path", ""))
    # A tenth of a second when it is asked for first: not on the event loop.
    body = await anyio.to_thread.run_sync(lambda: dumps(openapi_document(rows, root_path)))
    return Response(body, media_type="application/json")


async def api(request: Request) -> Response:
    """GET /api."""
    from app.reference.pages import api_page  # here: it reads what the operations are made of

    return await api_page(request)


ROUTES: tuple[RouteRow, ...] = (
    RouteRow("/openapi.json", ("GET",), openapi, Role.ANY, "openapi"),
    RouteRow("/api", ("GET",), api, Role.ANY, "api_page"),
)
