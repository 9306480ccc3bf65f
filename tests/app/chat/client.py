"""What a browser does with the chat's API, and what its page makes of the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette

from app.context import AppContext
from tests.app.stream.asgi_client import AsgiStream
from tests.helpers.live_app import Exchange, request, running_app

ME, OTHER = "browser-one", "browser-two"
Test = Callable[[Starlette, AppContext], Awaitable[None]]
GREEDY = {"temperature": 0, "max_tokens": 12}


def run(test: Test, **engine_options: Any) -> None:
    async def main() -> None:
        async with running_app(**engine_options) as app:
            ctx: AppContext = app.state.ctx
            # As often as there is something to say, so that tests see each step.
            ctx.console.chat_streams._frame_interval_s = 0
            await test(app, ctx)

    asyncio.run(main())


def stream_of(app: Starlette, client_id: str = ME) -> AsgiStream:
    return AsgiStream(app, f"/chat/api/stream?client_id={client_id}")


async def ask(app: Starlette, text: str = "hello", client_id: str = ME, **params: Any) -> dict[str, Any]:
    exchange = await try_ask(app, text, client_id, **params)
    assert exchange.status == 201, exchange.body
    answer: dict[str, Any] = exchange.json()
    return answer


async def try_ask(app: Starlette, text: str = "hello", client_id: str = ME, **params: Any) -> Exchange:
    messages = [{"role": "user", "content": text}]
    body = {"client_id": client_id, "messages": messages, "params": {**GREEDY, **params}}
    return await request(app, "POST", "/chat/api/generations", body)


async def read(app: Starlette, generation_id: str) -> dict[str, Any]:
    exchange = await request(app, "GET", f"/chat/api/generations/{generation_id}")
    assert exchange.status == 200, exchange.body
    answer: dict[str, Any] = exchange.json()
    return answer


class Page:
    """What a page makes of its stream (the same as static/js/stream-fold.js)."""

    def __init__(self, stream: AsgiStream) -> None:
        self.generations: dict[str, dict[str, Any]] = {}
        self.log: list[tuple[str, dict[str, Any]]] = []
        self._stream = stream

    async def read(self, kind: str, generation_id: str) -> dict[str, Any]:
        """Take events up to the next of this kind for this generation."""
        while True:
            event, data, _ = await self._stream.next()
            self.log.append((event, data))
            key = data.get("generation_id")
            if event == "snapshot":
                assert data["offset"] == len(data["text"])
                assert key not in self.generations, "a snapshot comes once per stream"
                self.generations[key] = dict(data)
            elif event == "delta":
                generation = self.generations[key]
                assert data["offset"] == len(generation["text"]), "neither a gap nor a repetition"
                generation["text"] += data["text"]
            elif event in ("status", "done"):
                self.generations[key].update(data)
                if event == "done":
                    assert data["offset"] == len(self.generations[key]["text"])
            if event == kind and key == generation_id:
                return data

    def kinds(self, generation_id: str) -> list[str]:
        return [event for event, data in self.log if data.get("generation_id") == generation_id]
