"""The admin API: the engine's state as JSON, and the actions of an admin, each of them audited.

Reads answer from the live fold and the trace, which are on this event loop. Actions are commands to the engine and are
answered when it has applied them, so that the next read shows their effect.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import anyio.to_thread
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.admin.actions import audited
from app.admin.events import Client
from app.admin.limits import etag, expected_version, limits_table
from app.admin.request_history import request_history
from app.context import AppContext, context
from app.encode import BlockColumns, Json, engine_state, kv, record_json
from app.errors import ApiError, bad_request
from app.health import stuck
from app.json_body import Body, parse_body, read_body, read_json_object
from app.sse import EventStream, dumps, last_event_id
from app.version import VERSION
from engine.core.profile import BOOKKEEPING, step_profile
from engine.errors import NotPausedError, StaleLimitsError

MAX_LISTED = 1000
MAX_STEPS_AT_ONCE = 10_000


# ---- reads -------------------------------------------------------------------------------------------------------


async def state(request: Request) -> Response:
    """GET /admin/api/state: everything at one point between two records."""
    ctx = context(request)
    engine, wall = ctx.async_engine, ctx.console.wall
    now = wall.unix(engine.now())
    whole = engine_state(engine.state, wall, engine.info.block_size, engine.info.name, now)
    trouble = stuck(engine)
    return JSONResponse(whole if trouble is None else {**whole, "stuck": trouble})


async def blocks(request: Request) -> Response:
    """GET /admin/api/blocks: owner, ref_count, state and hash of each block."""
    engine = context(request).async_engine
    counts = {"step": engine.state.step, **kv(engine.state, engine.info.block_size)}
    columns = BlockColumns.of(engine.state)
    body = await anyio.to_thread.run_sync(lambda: dumps({**counts, "blocks": columns.details()}))
    return Response(body, media_type="application/json")


async def steps(request: Request) -> Response:
    """GET /admin/api/steps?from=N&limit=K: the records of executed steps, oldest first; the latest without `from`."""
    engine = context(request).async_engine
    limit = _query_int(request, "limit", 100, low=1, high=MAX_LISTED)
    start = _query_int(request, "from", max(1, engine.state.step - limit + 1), low=0)
    found = engine.trace.steps(start, limit)
    kept = engine.trace.steps(0, 1)
    return JSONResponse({
        "steps": [record_json(record) for record in found],
        "first_step": kept[0].step if kept else None,
        "last_step": engine.state.step,
    })  # fmt: skip


async def one_step(request: Request) -> Response:
    """GET /admin/api/steps/N: the record of one step."""
    engine = context(request).async_engine
    number: int = request.path_params["step"]
    record = engine.trace.step(number)
    if record is None:
        kept = engine.trace.steps(0, 1)
        which = f"kept are {kept[0].step:,} to {engine.state.step:,}" if kept else "none is kept"
        raise ApiError(404, f"step {number:,} is not in the trace; {which}", param="step", code="not_found")
    return JSONResponse(record_json(record))


async def one_request(request: Request) -> Response:
    """GET /admin/api/requests/ID: its life as the trace tells it."""
    return JSONResponse(history_of(request))


def history_of(request: Request) -> Json:
    """The life of the request in the path.

    Raises:
        ApiError: 404 if it neither lives nor is in the trace.
    """
    ctx = context(request)
    engine, wall = ctx.async_engine, ctx.console.wall
    request_id: str = request.path_params["request_id"]
    records = engine.trace.records(0, engine.state.seq)
    found = request_history(request_id, records, engine.state, wall, wall.unix(engine.now()))
    if found is None:
        kept = f"the trace goes back to step {records[0].step:,}" if records else "the trace is empty"
        raise ApiError(
            404, f"request {request_id[:128]!r} neither lives nor is in the trace; {kept}",
            param="request_id", code="not_found",
        )  # fmt: skip
    return found


async def phases(request: Request) -> Response:
    """GET /admin/api/phases?limit=K: where the time of the latest steps went, medians in milliseconds."""
    engine = context(request).async_engine
    limit = _query_int(request, "limit", 100, low=1, high=MAX_LISTED)
    profile = step_profile(engine.trace.steps(max(1, engine.state.step - limit + 1), limit))
    return JSONResponse({
        "num_steps": profile.num_steps,
        "last_step": engine.state.step,
        "step_ms": round(profile.step_s * 1e3, 4),
        "phases": [
            {"name": name, "ms": round(seconds * 1e3, 4), "is_bookkeeping": name in BOOKKEEPING}
            for name, seconds in profile.phases
        ],
    })  # fmt: skip


async def events(request: Request) -> Response:
    """GET /admin/api/events: the engine's event stream, see `app.admin.events`."""
    publisher = context(request).console.publisher
    client = Client()
    seen = last_event_id(request.headers, request.query_params)
    return EventStream(publisher.stream(seen, client), "engine stream")


async def info(request: Request) -> Response:
    """GET /admin/api/info: the model, this process and how it was started."""
    ctx = context(request)
    return JSONResponse({
        "model": asdict(ctx.async_engine.info),
        "version": VERSION,
        "epoch": ctx.async_engine.epoch,
        "role": request.state.role.label,
        "flags": [asdict(row) for row in ctx.settings.describe()],
    })  # fmt: skip


async def get_limits(request: Request) -> Response:
    """GET /admin/api/limits: flat, with an ETag for the PATCH."""
    return _limits_response(context(request))


async def get_limits_table(request: Request) -> Response:
    """GET /admin/api/limits/table: the limits with all that a person wants to know of each."""
    ctx = context(request)
    version = ctx.async_engine.state.limits_version
    body = {"version": version, "limits": limits_table(ctx.async_engine, ctx.settings)}
    return JSONResponse(body, headers={"ETag": etag(version)})


async def audit(request: Request) -> Response:
    """GET /admin/api/audit?limit=K: the latest actions, newest first."""
    limit = _query_int(request, "limit", 200, low=1, high=MAX_LISTED)
    return JSONResponse({"entries": [entry.as_json() for entry in context(request).console.audit.latest(limit)]})


async def metrics(request: Request) -> Response:
    """GET /metrics: for Prometheus."""
    body, content_type = context(request).console.metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


# ---- actions -----------------------------------------------------------------------------------------------------


class PauseBody(Body):
    """POST /admin/api/engine/pause."""

    reason: Annotated[str, Field(min_length=1, max_length=500, pattern=r"\S")]


class StepBody(Body):
    """POST /admin/api/engine/step."""

    n: Annotated[int, Field(ge=1, le=MAX_STEPS_AT_ONCE)] = 1


async def patch_limits(request: Request) -> Response:
    """PATCH /admin/api/limits: any subset, all or nothing; answers with the limits in force."""
    ctx = context(request)
    header = request.headers.get("if-match")
    if header is None:
        message = "PATCH needs an If-Match header with the ETag that GET gave, so that no change is overwritten unseen"
        raise ApiError(428, message, param="if-match", code="precondition_required")
    changes = await read_json_object(request)
    engine = ctx.async_engine
    before = engine.state.limits.as_dict()
    shown = ", ".join(f"{name} {_shown(before.get(name))} → {_shown(value)}" for name, value in changes.items())
    try:
        await audited(request, "limits", shown, engine.set_limits(changes, expected_version(header)))
    except StaleLimitsError as error:
        version = engine.state.limits_version
        raise ApiError(
            412,
            f"someone else changed the limits: they are at version {version} now",
            code="stale",
            headers={"ETag": etag(version)},
            extra={"version": version, "current": engine.state.limits.as_dict()},
        ) from error
    return _limits_response(ctx)


async def pause(request: Request) -> Response:
    """POST /admin/api/engine/pause {"reason"}: no step after the present one, for everyone."""
    body = await read_body(request, PauseBody)
    reason = body.reason.strip()
    await audited(request, "pause", reason, context(request).async_engine.pause(reason))
    return _done(request)


async def resume(request: Request) -> Response:
    """POST /admin/api/engine/resume."""
    await audited(request, "resume", "", context(request).async_engine.resume())
    return _done(request)


async def step(request: Request) -> Response:
    """POST /admin/api/engine/step {"n": 1}: that many single steps of a paused engine, fewer if it runs out of work."""
    body = parse_body(await _optional_json(request), StepBody)
    engine = context(request).async_engine
    try:
        num_run = await audited(request, "step", f"n = {body.n:,}", engine.step(body.n))
    except NotPausedError as error:
        raise ApiError(409, str(error), code="not_paused") from error
    return _done(request, steps=num_run)


async def drain(request: Request) -> Response:
    """POST /admin/api/engine/drain: no new requests from now on; what was accepted goes on."""
    await audited(request, "drain", "", context(request).async_engine.drain())
    return _done(request)


async def abort_request(request: Request) -> Response:
    """POST /admin/api/requests/ID/abort: a receipt; asked again, how the request had ended."""
    request_id: str = request.path_params["request_id"]
    receipt = await audited(request, "abort", request_id, context(request).async_engine.abort(request_id))
    return JSONResponse({"ok": True, **asdict(receipt)})


async def reset_prefix_cache(request: Request) -> Response:
    """POST /admin/api/prefix-cache/reset: cached blocks become free."""
    dropped = await audited(request, "prefix-cache reset", "", context(request).async_engine.reset_prefix_cache())
    return _done(request, blocks_dropped=dropped)


# ---- shared ------------------------------------------------------------------------------------------------------


def _done(request: Request, **more: object) -> Response:
    fold = context(request).async_engine.state
    return JSONResponse({"ok": True, "step": fold.step, "paused": fold.is_paused, "draining": fold.is_draining, **more})


def _limits_response(ctx: AppContext) -> Response:
    fold = ctx.async_engine.state
    return JSONResponse(fold.limits.as_dict(), headers={"ETag": etag(fold.limits_version), "Cache-Control": "no-store"})


def _shown(value: object) -> str:
    return "off" if value is None else str(value)[:40]


async def _optional_json(request: Request) -> Json:
    return await read_json_object(request) if await request.body() else {}


def _query_int(request: Request, name: str, default: int, *, low: int, high: int | None = None) -> int:
    raw = request.query_params.get(name)
    if raw is None:
        return default
    if raw.isascii() and raw.isdigit() and len(raw) <= 15:
        value = int(raw)
        if value >= low and (high is None or value <= high):
            return value
    allowed = f"an integer >= {low}" + ("" if high is None else f" and <= {high}")
    raise bad_request(f"{name} must be {allowed}, got {raw[:40]!r}", name)
