"""One HTTP request's work in the engine: submit, listen, and abort when the client leaves.

Knows nothing of response formats. Everything between the body and the last byte runs inside `ClientWatch.race`, so
that a client that goes away, at whatever moment, ends its engine requests before the next step.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from engine.async_engine import AsyncEngine
from engine.engine import Request as EngineRequest
from engine.errors import EngineError, InvalidValueError
from engine.outputs import SequenceDelta
from engine.request_stream import RequestStream

T = TypeVar("T")


class ClientWatch:
    """Listens for the client's leaving once its body has been read."""

    def __init__(self, receive: Receive) -> None:
        self._left = asyncio.ensure_future(_wait_for_disconnect(receive))

    async def race(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`; if the client leaves first, `work` is cancelled and has ended when this returns.

        Raises:
            ClientDisconnect: the client left.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._left}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            raise
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        raise ClientDisconnect

    def close(self) -> None:
        """Stop listening."""
        self._left.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class PromptDelta(NamedTuple):
    """News of one sequence of one of the request's prompts."""

    prompt_index: int
    delta: SequenceDelta


class Generation(AsyncIterator[PromptDelta]):
    """Several engine requests (one per prompt), and their deltas as one stream in the order in which they come.

    `close` aborts what has not finished, submitted or about to be; it must be called, and may be at any time.
    """

    def __init__(self, engine: AsyncEngine, requests: Sequence[EngineRequest]) -> None:
        self.request_ids = tuple(request.request_id for request in requests)
        self._engine = engine
        self._requests = requests
        self._open: set[str] = set()
        self._streams: list[RequestStream] = []
        self._only: RequestStream | None = None  # a single stream needs no task to merge it
        self._ended: set[tuple[str, int]] = set()  # (request id, index) of sequences whose end was told
        self._news: asyncio.Queue[PromptDelta | Exception | None] = asyncio.Queue()
        self._pumps: list[asyncio.Future[None]] = []

    async def submit(self) -> None:
        """Submit all requests, or none.

        Raises:
            EngineError: the first refusal; those that were accepted are aborted.
        """
        # Open before they are accepted: a cancelled submission may still be in the engine's inbox.
        self._open.update(request.request_id for request in self._requests)
        submissions = (self._engine.submit(request) for request in self._requests)
        results = await asyncio.gather(*submissions, return_exceptions=True)
        refusals = [result for result in results if isinstance(result, BaseException)]
        if refusals:
            self.close()
            raise refusals[0]
        self._streams = [result for result in results if isinstance(result, RequestStream)]
        if len(self._streams) == 1:
            self._only = self._streams[0]
        else:
            self._pumps = [asyncio.ensure_future(self._pump(i, stream)) for i, stream in enumerate(self._streams)]

    async def _pump(self, prompt_index: int, stream: RequestStream) -> None:
        try:
            async for delta in stream:
                self._news.put_nowait(self._told(prompt_index, delta))
        except EngineError as error:
            self._news.put_nowait(error)
        self._open.discard(stream.request_id)
        if not self._open:
            self._news.put_nowait(None)

    async def __anext__(self) -> PromptDelta:
        """The next delta.

        Raises:
            EngineDeadError: the engine died.
        """
        if self._only is not None:
            try:
                return self._told(0, await anext(self._only))
            except (StopAsyncIteration, EngineError):
                self._open.clear()
                raise
        news = await self._news.get()
        if news is None:
            self._news.put_nowait(None)
            raise StopAsyncIteration
        if isinstance(news, Exception):
            raise news
        return news

    def _told(self, prompt_index: int, delta: SequenceDelta) -> PromptDelta:
        if delta.finish_reason is not None:
            self._ended.add((delta.request_id, delta.index))
        return PromptDelta(prompt_index, delta)

    def cut(self) -> None:
        """Give every sequence its end now, without waiting for the engine: for a shutdown whose time is up."""
        step = self._engine.state.step
        for stream, request in zip(self._streams, self._requests, strict=False):
            for index in range(request.sampling_params.n):
                if (stream.request_id, index) not in self._ended:
                    stream.put(SequenceDelta(stream.request_id, index, step, "", (), (), finish_reason="abort"))

    def close(self) -> None:
        """Abort what is still open."""
        for pump in self._pumps:
            pump.cancel()
        for request_id in self._open:
            abort_soon(self._engine, request_id)
        self._open.clear()


class OpenGenerations:
    """Those that are under way, so that a shutdown can end them."""

    def __init__(self) -> None:
        self._open: set[Generation] = set()
        self._ids: set[str] = set()

    def add(self, generation: Generation) -> None:
        """Note one that begins. Its requests' ids are its own until it is discarded: only so can it abort them.

        Raises:
            InvalidValueError: an id is in use.
        """
        taken = next((request_id for request_id in generation.request_ids if request_id in self._ids), None)
        if taken is not None:
            raise InvalidValueError("request_id", taken, "unique among the requests that are alive")
        self._ids.update(generation.request_ids)
        self._open.add(generation)

    def discard(self, generation: Generation) -> None:
        """Forget one that has ended."""
        if generation in self._open:
            self._open.discard(generation)
            self._ids.difference_update(generation.request_ids)

    def cut(self) -> None:
        """See `Generation.cut`."""
        for generation in list(self._open):
            generation.cut()


def abort_soon(engine: AsyncEngine, request_id: str) -> None:
    """Abort without waiting; an engine that is dead or has stopped has nothing left to abort."""
    with contextlib.suppress(EngineError):
        engine.abort_soon(request_id)
