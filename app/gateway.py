"""Answers from the first moment on: health checks while the model loads, the whole application once it has.

Knows nothing of how an engine is built; it is given a function that does it, and calls it on a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

LOADING_HEADERS = {"retry-after": "2", "cache-control": "no-store"}


class Gateway:
    """The ASGI application that the server runs.

    Args:
        load: builds the application; runs on a thread.
        on_ready: called on the event loop when the application has started.
        on_failed: called on the event loop with what `load` or the start raised; nothing more will come.
    """

    def __init__(
        self,
        load: Callable[[], Starlette],
        on_ready: Callable[[Starlette], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._load = load
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._app: Starlette | None = None
        self._started = AsyncExitStack()
        self._thread: threading.Thread | None = None
        self._starting: asyncio.Task[None] | None = None
        self._waiting_room = Starlette(
            routes=[
                Route("/healthz", _healthz),
                Route("/health", _healthz),
                Route("/readyz", _readyz),
                Route("/{path:path}", _not_yet, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
            ],
            lifespan=self._lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._waiting_room if self._app is None or scope["type"] == "lifespan" else self._app
        await app(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, waiting_room: Starlette) -> AsyncIterator[None]:
        del waiting_room
        loaded: asyncio.Future[Starlette] = asyncio.get_running_loop().create_future()
        self._thread = threading.Thread(target=self._run_load, args=(loaded,), name="load", daemon=True)
        self._thread.start()
        self._starting = asyncio.create_task(self._start(loaded))
        try:
            yield
        finally:
            self._starting.cancel()
            await asyncio.wait({self._starting})
            await self.shut_down()
            await self._started.aclose()

    def _run_load(self, loaded: asyncio.Future[Starlette]) -> None:
        app: Starlette | None = None
        failure: BaseException | None = None
        try:
            app = self._load()
        except BaseException as error:  # noqa: BLE001 (handed to the event loop, which tells the caller)
            failure = error

        def settle() -> None:
            if loaded.done():
                return
            if app is not None:
                loaded.set_result(app)
            elif failure is not None:
                loaded.set_exception(failure)

        try:
            loaded.get_loop().call_soon_threadsafe(settle)
        except RuntimeError:  # the loop is closed: the server was stopped while this loaded
            return

    async def _start(self, loaded: asyncio.Future[Starlette]) -> None:
        try:
            app = await loaded
            await self._started.enter_async_context(app.router.lifespan_context(app))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 (whatever it is, the server must not wait for ever)
            self._on_failed(error)
            return
        self._app = app
        self._on_ready(app)

    async def shut_down(self) -> None:
        """See `app.factory.shut_down`; nothing to do while there is no application. Idempotent."""
        if self._app is not None:
            from app.factory import shut_down

            await shut_down(self._app)


async def _healthz(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _readyz(request: Request) -> Response:
    return JSONResponse({"status": "not ready", "reasons": ["loading"]}, status_code=503, headers=LOADING_HEADERS)


async def _not_yet(request: Request) -> Response:
    message = "the model is being loaded; try again in a moment"
    if "text/html" in request.headers.get("accept", ""):
        html = f"<!doctype html><title>pagedeck</title><p>pagedeck: {message}"
        return HTMLResponse(html, status_code=503, headers={**LOADING_HEADERS, "refresh": "2"})
    error = {"message": message, "type": "service_unavailable", "param": None, "code": "loading"}
    return JSONResponse({"error": error}, status_code=503, headers=LOADING_HEADERS)
