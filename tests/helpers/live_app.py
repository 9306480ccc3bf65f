"""The whole application on a fake engine: in this process behind a real socket, or as bare ASGI."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette

from app.factory import create_app
from app.server import Server, open_listener
from app.settings import ApiKey, Settings
from engine.async_engine import AsyncEngine
from tests.helpers.engines import make_async_engine

INFERENCE, READ_ONLY, ADMIN = "inference-key", "read-only-key", "admin-key"
KEYS = (ApiKey(INFERENCE, "inference"), ApiKey(READ_ONLY, "read-only"), ApiKey(ADMIN, "admin"))


@dataclass
class LiveApp:
    """A running server: where it answers, and what is behind it."""

    address: str
    app: Starlette
    engine: AsyncEngine
    server: Server


@contextmanager
def serve(
    settings: Settings | None = None, *, engine: AsyncEngine | None = None, **engine_options: object
) -> Iterator[LiveApp]:
    """A server on a free port, in a thread with a loop of its own, until the block ends; on `engine`, or a fake one."""
    settings = settings or Settings(port=0)
    engine = engine or make_async_engine(**engine_options)
    ready = threading.Event()
    apps: list[Starlette] = []

    def on_ready(address: str, app: Starlette) -> None:
        apps.append(app)
        ready.set()

    listener = open_listener(settings.host, 0)
    server = Server(settings, listener, lambda: create_app(settings, engine), on_ready)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="server")
    thread.start()
    try:
        assert ready.wait(30), f"the server did not start: {server.failure}"
        yield LiveApp(server.address, apps[0], engine, server)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"


@asynccontextmanager
async def running_app(settings: Settings | None = None, **engine_options: object) -> AsyncIterator[Starlette]:
    """The application with its engine started on the running loop, to be called as ASGI."""
    app = create_app(settings or Settings(), make_async_engine(**engine_options))
    async with app.router.lifespan_context(app):
        yield app


@dataclass
class Exchange:
    """One HTTP request driven by hand: the test decides when the body comes and when the client leaves."""

    app: Starlette
    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    incoming: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    sent: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    status: int | None = None
    response_headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    task: asyncio.Task[None] | None = None

    def start(self) -> Exchange:
        """Begin, without a body so far."""
        path, _, query = self.path.partition("?")
        headers = {"host": "127.0.0.1:8000", **self.headers}
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": self.method, "scheme": "http", "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()], "state": {},
        }  # fmt: skip
        self.task = asyncio.ensure_future(self.app(scope, self.incoming.get, self._send))
        return self

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.response_headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message.get("body", b"")
        self.sent.put_nowait(message)

    def send_body(self, body: bytes, *, more: bool = False) -> Exchange:
        """Put a part of the body where the application finds it."""
        self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": more})
        return self

    def leave(self) -> None:
        """Close the connection."""
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def end(self) -> Exchange:
        """Wait for the application to be done with this request."""
        assert self.task is not None
        await self.task
        return self

    def json(self) -> Any:
        """The response's body."""
        return json.loads(self.body)


def post(app: Starlette, path: str, value: object, **headers: str) -> Exchange:
    """A POST of JSON whose body has been sent."""
    exchange = Exchange(app, "POST", path, {"content-type": "application/json", **headers})
    return exchange.start().send_body(json.dumps(value).encode())


async def request(
    app: Starlette, method: str, path: str, value: object = None, body: bytes | None = None, **headers: str
) -> Exchange:  # fmt: skip
    """A whole exchange; underscores in header names stand for hyphens."""
    names = {name.replace("_", "-"): text for name, text in headers.items()}
    if value is not None:
        names.setdefault("content-type", "application/json")
        body = json.dumps(value).encode()
    return await Exchange(app, method, path, names).start().send_body(body or b"").end()
