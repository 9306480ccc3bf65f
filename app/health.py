"""Whether the process answers, whether the engine lives, and whether new work should be sent here.

Three questions, three addresses: an orchestrator that restarts on a full queue makes it worse, so that a full queue is
none of the reasons.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.access import Role, RouteRow
from app.context import context
from app.encode import Json
from engine.async_engine import AsyncEngine


def unready_reasons(engine: AsyncEngine, is_started: bool) -> list[str]:
    """Why no new work should come: loading, dead, draining, stuck, paused; empty = ready."""
    reasons = {
        "loading": not is_started,
        "dead": engine.is_dead,
        "draining": engine.is_draining,
        "stuck": engine.is_stuck,
        "paused": engine.state.is_paused,
    }
    return [reason for reason, holds in reasons.items() if holds]


def stuck(engine: AsyncEngine) -> Json | None:
    """The step that takes too long: `{step, running_s, limit_s}`; None while all is well."""
    running_s = engine.stuck_for_s
    if running_s is None:
        return None
    return {"step": engine.state.step + 1, "running_s": round(running_s, 1), "limit_s": engine.stuck_after_s}


async def healthz(request: Request) -> Response:
    """GET /healthz: the process answers."""
    return JSONResponse({"status": "ok"})


async def health(request: Request) -> Response:
    """GET /health: 503 when the engine is dead."""
    engine = context(request).async_engine
    if engine.is_dead:
        return JSONResponse({"status": "dead"}, status_code=503)
    return JSONResponse({"status": "ok"})


async def readyz(request: Request) -> Response:
    """GET /readyz: 503 while loading, dead, draining, stuck or paused; never for a full queue."""
    reasons = unready_reasons(context(request).async_engine, request.app.state.is_started)
    status = "not ready" if reasons else "ready"
    return JSONResponse({"status": status, "reasons": reasons}, status_code=503 if reasons else 200)


ROUTES: tuple[RouteRow, ...] = (
    RouteRow("/healthz", ("GET",), healthz, Role.OPEN, "healthz"),
    RouteRow("/health", ("GET",), health, Role.OPEN, "health"),
    RouteRow("/readyz", ("GET",), readyz, Role.OPEN, "readyz"),
)
