"""The real server in a process of its own, a server that says what a test needs said, and a real Chromium.

`start_server(*flags)` starts one more server; `live_server` is the one most tests share. `browser_page` is a page in a
fresh profile (own localStorage, own shared worker); what it asks of any other host is refused and noted.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, Route, expect, sync_playwright

from tests.e2e.load import NUM_BLOCKS, Console, Load, load, paced
from tests.e2e.parrot import Parrot, ParrotServer
from tests.helpers.live_app import serve

REPOSITORY = Path(__file__).resolve().parents[2]
READY_POLLS = 600
POLL_S = 0.1
EXPECT_MS = 30_000  # how long `expect` waits: long enough for a machine that does other things too
CHROMIUM_ARGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@dataclass
class LiveServer:
    """A running server: where it answers, and its process."""

    base_url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def log(self) -> str:
        """What it has printed so far."""
        return self.log_path.read_text(errors="replace")

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, then wait; returns the exit status. Kills what does not end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


StartServer = Callable[..., LiveServer]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _is_ready(base_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base_url}/readyz", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def start_process(directory: Path, flags: tuple[str, ...]) -> LiveServer:
    """A server on a free port, ready to answer."""
    port = _free_port()
    base_url = f"http://127.0.0.1:{port}"
    log_path = directory / f"server-{port}.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "serve", "--port", str(port), *flags],
            cwd=REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    server = LiveServer(base_url, process, log_path)
    for _ in range(READY_POLLS):
        if _is_ready(base_url):
            return server
        try:
            # Waiting for the end is the pause between two polls: a server that dies is seen at once.
            status = process.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
        pytest.fail(f"the server ended with status {status} before it was ready:\n{server.log()[-4000:]}")
    server.stop()
    pytest.fail(f"the server was not ready after {READY_POLLS} polls:\n{server.log()[-4000:]}")


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Factory: `start_server("--max-num-seqs", "2")` starts a server of its own, stopped at the end of the session."""
    directory = tmp_path_factory.mktemp("servers")
    servers: list[LiveServer] = []

    def start(*flags: str) -> LiveServer:
        server = start_process(directory, flags)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def live_server(start_server: StartServer) -> LiveServer:
    """The server with default flags and the embedded model, shared by the tests of the session."""
    return start_server()


@pytest.fixture
def start_parrot() -> Iterator[Callable[..., ParrotServer]]:
    """Factory: the whole server on an engine that says what it is told; options as of `make_engine`."""
    with ExitStack() as stack:

        def start(**engine_options: object) -> ParrotServer:
            parrot = Parrot()
            options = {"num_blocks": 512, **engine_options}
            app = stack.enter_context(serve(choose=parrot.choose, before_step=parrot.before_step, **options))
            stack.callback(parrot.go_on)  # before the server is told to end
            return ParrotServer(app.address, parrot, app)

        yield start


@pytest.fixture
def parrot_server(start_parrot: Callable[..., ParrotServer]) -> ParrotServer:
    """One of those, with room for everything."""
    return start_parrot()


@pytest.fixture(scope="session")
def playwright_driver() -> Iterator[Playwright]:
    """Playwright itself."""
    with sync_playwright() as driver:
        yield driver


@pytest.fixture(scope="session")
def chromium(playwright_driver: Playwright, chromium_path: str) -> Iterator[Browser]:
    """One Chromium for the session."""
    expect.set_options(timeout=EXPECT_MS)
    browser = playwright_driver.chromium.launch(executable_path=chromium_path, args=list(CHROMIUM_ARGS))
    yield browser
    browser.close()


@dataclass
class Visit:
    """What a page did besides what it shows."""

    outside_requests: list[str] = field(default_factory=list)  # refused
    page_errors: list[str] = field(default_factory=list)  # uncaught exceptions
    console_errors: list[str] = field(default_factory=list)


@pytest.fixture
def browser_context(chromium: Browser) -> Iterator[BrowserContext]:
    """A fresh profile at 1440 x 900; several tabs share it."""
    context = chromium.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(30_000)
    yield context
    context.close()


@pytest.fixture
def visit(browser_context: BrowserContext) -> Visit:
    """What every page of the context asked of other hosts, and its errors."""
    seen = Visit()

    def refuse(route: Route) -> None:
        seen.outside_requests.append(route.request.url)
        route.abort()

    def watch(page: Page) -> None:
        page.on("pageerror", lambda error: seen.page_errors.append(str(error)))
        page.on("console", lambda m: seen.console_errors.append(m.text) if m.type == "error" else None)

    browser_context.route(re.compile(r"^(?!(https?://(127\.0\.0\.1|localhost)[:/]|data:|blob:|about:))"), refuse)
    browser_context.on("page", watch)
    return seen


@pytest.fixture
def browser_page(browser_context: BrowserContext, visit: Visit) -> Page:
    """One tab of that profile. Uncaught errors are in `visit`."""
    return browser_context.new_page()


@pytest.fixture
def clean_page(browser_page: Page, visit: Visit) -> Iterator[Page]:
    """That tab; no script may have failed and nothing may have been asked of another host."""
    yield browser_page
    assert visit.page_errors == []
    assert visit.outside_requests == []


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """An application on a fake model with a pool that eight long requests don't fit into."""
    with serve(num_blocks=NUM_BLOCKS, max_num_seqs=8, before_step=paced) as live:
        yield live.address


@pytest.fixture
def console(address: str) -> Iterator[Console]:
    """Its admin API, with the limits as they were at the start."""
    console = Console(address)
    limits = console.state()["limits"]
    yield console
    console.set_limits(**limits)


@pytest.fixture
def traffic(console: Console) -> Iterator[Load]:
    """Requests to it, gone when the test ends."""
    with load(console) as traffic:
        yield traffic
