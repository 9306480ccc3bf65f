"""Puts the application together: table of routes, middleware, error handlers, and the engine's life around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from app.auth import Authenticator
from app.context import AppContext
from app.errors import ApiError, handle_error
from app.openai_api.generation import OpenGenerations
from app.routes import route_table, starlette_routes
from app.security import Boundary, Gate
from app.settings import Settings
from app.state import Console
from app.templating import Templates
from app.throughput import log_throughput
from app.version import VERSION
from engine.async_engine import AsyncEngine
from engine.errors import EngineError

STEP_GRACE_S = 0.3  # for the step that is under way when the time is up


def create_app(settings: Settings, async_engine: AsyncEngine) -> Starlette:
    """The application around an engine that has not been started; its lifespan starts and stops it."""
    console = Console(settings, async_engine)
    templates = Templates(async_engine, VERSION)
    app = Starlette(
        routes=starlette_routes(route_table(is_loopback=settings.is_loopback())),
        middleware=[
            Middleware(Boundary, root_path=settings.root_path, log_requests=not settings.disable_log_requests),
            Middleware(Gate, allowed_hosts=settings.host_allow_list()),
        ],
        exception_handlers={ApiError: handle_error, EngineError: handle_error, HTTPException: handle_error},
        lifespan=_lifespan,
    )
    app.state.ctx = AppContext(settings, async_engine, console, templates)
    app.state.authenticator = Authenticator(console.keys)
    app.state.is_started = False
    app.state.shutdown = None  # the task that ends it, once begun
    app.state.open_generations = OpenGenerations()
    return app


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    ctx: AppContext = app.state.ctx
    await ctx.async_engine.start()
    ctx.console.start()
    app.state.is_started = True
    throughput = asyncio.create_task(
        log_throughput(ctx.async_engine.state, stuck_for_s=lambda: ctx.async_engine.stuck_for_s), name="throughput"
    )
    try:
        yield
    finally:
        throughput.cancel()
        await shut_down(app)


async def shut_down(app: Starlette) -> None:
    """Refuse new work, give what runs `shutdown_timeout`, then end it; every stream gets its last event. Idempotent.

    The server calls this at the first signal: it waits for open connections before the lifespan ends, and streams
    would keep it waiting. A step that takes longer than the time there is is not waited for.
    """
    state = app.state
    if state.shutdown is None:
        state.shutdown = asyncio.ensure_future(_shut_down(state.ctx, state.open_generations))
    await asyncio.shield(state.shutdown)


async def _shut_down(ctx: AppContext, open_generations: OpenGenerations) -> None:
    stopping = asyncio.ensure_future(ctx.async_engine.stop(ctx.settings.shutdown_timeout))
    await asyncio.wait({stopping}, timeout=ctx.settings.shutdown_timeout + STEP_GRACE_S)
    open_generations.cut()
    await ctx.console.stop()
    if stopping.done():
        stopping.result()
