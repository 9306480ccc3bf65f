"""`pagedeck serve`: take the port, load the engine, answer, and end within two seconds of a signal.

The port is taken before the model is loaded, so that one in use is one clear line at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.gateway import Gateway
from app.settings import Settings
from app.sse import ABORT_EXTENSION
from engine.errors import StartupError

if TYPE_CHECKING:
    from app.context import AppContext

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED = 0, 1
SEND_BUFFER_BYTES = 64 * 1024  # what one stalled reader may cost the kernel; accepted sockets inherit it
# How long the event loop may keep the interpreter from the engine's thread that wants it back, and the other way round.
# Python's own 5 ms held up steps that stream to many clients by several milliseconds each.
SWITCH_INTERVAL_S = 0.0005
BACKLOG = 2048
MAX_HEADER_BYTES = 64 * 1024
HEADER_TIMEOUT_S = 30.0  # from a connection, or the first byte of a request, to the end of its headers
KEEP_ALIVE_S = 60
GRACE_S = 0.6  # from --shutdown-timeout to the cutting of connections: the last step, then the last events


def serve(settings: Settings) -> int:
    """Run until a signal; returns the exit status. What cannot start says why in one line on stderr."""
    try:
        check_reachability(settings)
        listener = open_listener(settings.host, settings.port)
    except StartupError as error:
        say(f"pagedeck: {error}", sys.stderr)
        return EXIT_FAILED
    configure_logging(settings.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    server = Server(settings, listener, lambda: load_app(settings), announce, leave=leave)
    server.run(sockets=[listener])
    if isinstance(server.failure, StartupError):
        say(f"pagedeck: {server.failure}", sys.stderr)
    else:
        logger.error("the engine could not be started", exc_info=server.failure)
    return EXIT_FAILED


def leave() -> None:
    """End the process at once, after an orderly end of everything that has one.

    An interpreter's own end would wait for native code on the threads that load or step, and free gigabytes page by
    page.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_OK)


def load_app(settings: Settings) -> Starlette:
    """Load the model, allocate the KV pool, and put the application around them.

    Raises:
        StartupError: says what doesn't work and what would.
    """
    from app.factory import create_app  # here, so that the port answers before torch is imported
    from engine.async_engine import AsyncEngine
    from engine.engine import Engine

    return create_app(settings, AsyncEngine(Engine.from_config(settings.engine_config())))


def announce(address: str, app: Starlette) -> None:
    """The one line that says where to go."""
    ctx: AppContext = app.state.ctx
    say(f"pagedeck is ready at {address} with {ctx.async_engine.info.name}", sys.stdout)


def say(line: str, stream: TextIO) -> None:
    """Print a line at once."""
    stream.write(line + "\n")
    stream.flush()


def configure_logging(level: str) -> None:
    """One line per record on stderr; the web server's own news only where they are asked for."""
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)
    if level != "debug":
        for name in ("uvicorn", "uvicorn.error", "httpx", "asyncio"):
            logging.getLogger(name).setLevel(logging.WARNING)


def check_reachability(settings: Settings) -> None:
    """Refuse an address that other machines reach, without a key.

    Raises:
        StartupError: says what would work.
    """
    if not settings.is_loopback() and not settings.api_key:
        raise StartupError(
            f"--host {settings.host} can be reached from other machines: give an --api-key, or listen on 127.0.0.1"
        )


def open_listener(host: str, port: int) -> socket.socket:
    """A bound, listening socket.

    Raises:
        StartupError: the port is in use, or the address is none of this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]  # fmt: skip
    except OSError as error:
        raise StartupError(f"--host {host} is no address: {error.strerror or error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartupError(f"port {port} on {host} is in use; choose another with --port") from None
        raise StartupError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def address_of(listener: socket.socket, root_path: str = "") -> str:
    """The address to open in a browser."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{root_path}"


class HttpProtocol(HttpToolsProtocol):
    """HTTP/1.1 with bounds on the headers: how many bytes, and how long they may take."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first request."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        self._num_header_bytes = 0
        self._start_timer()
        super().on_message_begin()
        self.scope["extensions"] = {ABORT_EXTENSION: {"abort": self.transport.abort}}

    def on_url(self, url: bytes) -> None:
        """Count the address."""
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header."""
        self._count(name, value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The headers are there in time."""
        self._stop_timer()
        super().on_headers_complete()

    def _count(self, *parts: bytes) -> None:
        self._num_header_bytes += sum(len(part) + 4 for part in parts)
        if self._num_header_bytes > MAX_HEADER_BYTES:  # the parser turns this into a 400 and the connection is closed
            raise ValueError("the headers are too large")

    def _start_timer(self) -> None:
        self._stop_timer()
        self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class Server(uvicorn.Server):
    """uvicorn, with the engine's end begun at the signal and not after the last connection has gone.

    Args:
        listener: a bound socket, see `open_listener`.
        load: builds the application, on a thread.
        on_ready: called with the address and the application once it has started.
        leave: called on the event loop at the end of an orderly run.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        load: Callable[[], Starlette],
        on_ready: Callable[[str, Starlette], None],
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address_of(listener, settings.root_path)
        self.gateway = Gateway(load, lambda app: on_ready(self.address, app), self._fail)
        self.failure: BaseException | None = None
        self._leave = leave
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None
        super().__init__(
            uvicorn.Config(
                self.gateway,
                http=HttpProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=settings.shutdown_timeout + GRACE_S,  # type: ignore[arg-type]
            )
        )

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Remember the loop for the signal's sake."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: new work is refused from this moment on."""
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._begin_to_stop)

    def _begin_to_stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self.gateway.shut_down())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams while waiting for their connections to close."""
        self._begin_to_stop()
        await super().shutdown(sockets)
        self._captured_signals.clear()  # the end was orderly: the status is 0, not the signal's
        if self.failure is None:
            self._leave()
