"""Reads an endless response of an ASGI application event by event, as fast or as slowly as a test wants."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any

from starlette.types import ASGIApp, Message

from tests.app.stream.mirror import events_of

PATIENCE_S = 20.0  # only a broken test waits that long


class AsgiStream:
    """A GET that stays open; use as an async context manager, which disconnects at the end.

    Args:
        is_reading: False: the client takes nothing until `read_on`.
    """

    def __init__(
        self, app: ASGIApp, path: str, headers: dict[str, str] | None = None, *, is_reading: bool = True
    ) -> None:
        path, _, query = path.partition("?")
        pairs = {"host": "127.0.0.1", **(headers or {})}
        self.scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "GET",
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in pairs.items()], "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }  # fmt: skip
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.ended = asyncio.Event()
        self._app = app
        self._started = asyncio.Event()
        self._gate = asyncio.Event()
        if is_reading:
            self._gate.set()
        self._has_sent = False  # the request's empty body
        self._is_leaving = asyncio.Event()
        self._buffer = b""
        self._events: asyncio.Queue[tuple[str, dict[str, Any], str | None]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> AsgiStream:
        self._task = asyncio.create_task(self._run())
        async with asyncio.timeout(PATIENCE_S):
            await self._started.wait()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.leave()

    async def _run(self) -> None:
        try:
            await self._app(self.scope, self._receive, self._send)
        finally:
            self.ended.set()
            self._started.set()

    async def _receive(self) -> Message:
        if not self._has_sent:
            self._has_sent = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._is_leaving.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            self._started.set()
            return
        await self._gate.wait()
        self._buffer += message.get("body", b"")
        whole, separator, self._buffer = self._buffer.rpartition(b"\n\n")
        for event in events_of(whole + separator):
            self._events.put_nowait(event)

    def read_on(self) -> None:
        """Take what comes from now on."""
        self._gate.set()

    async def next(self, *kinds: str) -> tuple[str, dict[str, Any], str | None]:
        """The next event, of one of `kinds` if any are named."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                event = await self._events.get()
                if not kinds or event[0] in kinds:
                    return event

    async def until(self, kind: str) -> list[tuple[str, dict[str, Any], str | None]]:
        """All events up to and with the next of `kind`."""
        events = [await self.next()]
        while events[-1][0] != kind:
            events.append(await self.next())
        return events

    async def leave(self) -> None:
        """Disconnect, and wait until the application has noticed."""
        self._is_leaving.set()
        assert self._task is not None
        async with asyncio.timeout(PATIENCE_S):
            await self._task
