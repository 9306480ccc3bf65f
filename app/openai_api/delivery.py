"""Deltas to an HTTP answer, in one piece or as server-sent events; what they say is up to the format."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import TypeVar

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from app.context import context
from app.errors import ApiError, error_of
from app.openai_api.answer import Format
from app.openai_api.generation import ClientWatch, Generation, OpenGenerations, PromptDelta
from app.openai_api.results import Gathered, Json, UsageCount
from engine.engine import Request as EngineRequest
from engine.errors import EngineError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MANY_ENTRIES = 500  # tokens with log-probabilities: some 25 ms of writing, with 20 alternatives each
STREAM_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


async def respond(
    request: Request,
    requests: list[EngineRequest],
    shape: Format,
    usage: UsageCount,
    *,
    stream: bool,
    headers: dict[str, str],
) -> Response:
    """Run `requests` and answer in `shape`.

    Raises:
        InvalidValueError: a request's id is in use.
        EngineError: a request was refused, or the engine died before an answer had begun.
        ApiError: 500 for a request that failed.
        ClientDisconnect: the client left; its requests are aborted.
    """
    engine = context(request).async_engine
    work = _Work(request, Generation(engine, requests), request.app.state.open_generations)
    try:
        await work.watch.race(work.generation.submit())
        if stream:
            frames = _frames(work.generation, shape, usage)
            return EventStream(frames, work, headers={**headers, **STREAM_HEADERS})
        answer = await work.watch.race(_whole(work.generation, shape, usage, headers))
    except BaseException:
        work.close()
        raise
    work.close()
    return answer


class _Work:
    """What must be let go of at the end, whatever the end is."""

    def __init__(self, request: Request, generation: Generation, open_generations: OpenGenerations) -> None:
        open_generations.add(generation)
        self.watch = ClientWatch(request.receive)
        self.generation = generation
        self._open = open_generations

    def close(self) -> None:
        self.watch.close()
        self.generation.close()
        self._open.discard(self.generation)


class EventStream(Response):
    """Sends frames as they come, until the last one or until the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncIterator[bytes], work: _Work, headers: dict[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._frames = frames
        self._work = work
        self.init_headers(headers)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._work.watch.race(self._send_all(send))
        finally:
            self._work.close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def frame(value: Json, *, is_named: bool = False) -> bytes:
    """One event."""
    name = f"event: {value['type']}\n".encode() if is_named else b""
    return name + b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _frames(generation: Generation, shape: Format, usage: UsageCount) -> AsyncIterator[bytes]:
    def framed(events: list[Json]) -> bytes:
        return b"".join(frame(event, is_named=shape.has_named_events) for event in events)

    def told(news: PromptDelta) -> bytes:
        return framed(shape.chunks(news, usage))

    try:
        if opening := shape.opening():
            yield framed(opening)
        async for news in generation:
            usage.add(news.delta)
            if news.delta.finish_reason == "error":
                raise failed(news.delta.error)
            if events := await _written(partial(told, news), len(news.delta.prompt_logprobs)):
                yield events
        if closing := shape.closing(usage):
            yield framed(closing)
    except (ApiError, EngineError) as error:  # the status is sent: the stream itself must say it
        yield framed(shape.failure(error_of(error)))
    if shape.end:
        yield shape.end


async def _whole(generation: Generation, shape: Format, usage: UsageCount, headers: dict[str, str]) -> Response:
    gathered: dict[tuple[int, int], Gathered] = {}
    async for news in generation:
        usage.add(news.delta)
        if news.delta.finish_reason == "error":
            raise failed(news.delta.error)
        gathered.setdefault((news.prompt_index, news.delta.index), Gathered()).add(news.delta)
    num_entries = sum(len(got.logprobs) + len(got.prompt_logprobs) for got in gathered.values())
    return await _written(lambda: JSONResponse(shape.whole(gathered, usage), headers=headers), num_entries)


async def _written(write: Callable[[], T], num_entries: int) -> T:
    """The result of `write`, on a worker thread where it holds so many log-probabilities that others would wait."""
    if num_entries < MANY_ENTRIES:
        return write()
    return await anyio.to_thread.run_sync(write, abandon_on_cancel=True)


def failed(message: str | None) -> ApiError:
    """A request that the engine could not finish."""
    return ApiError(500, f"the request failed: {message or 'the engine gave no reason'}", code="generation_failed")
