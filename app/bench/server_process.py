"""A server of this package as a child process, for as long as a bench runs."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from app.settings import ApiKey, child_environment

STOP_TIMEOUT_S = 10.0
_ADDRESS = re.compile(r"http://\S+")


class ServerFailedError(RuntimeError):
    """The server ended before it was ready; what it printed is on stderr."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """Where it listens, and how long it took to get there."""

    base_url: str
    startup_s: float
    pid: int


@contextmanager
def running_server(flags: Sequence[str], keys: Sequence[ApiKey] = ()) -> Iterator[RunningServer]:
    """Start `pagedeck serve` on a free port, wait for the line that says it is ready, and stop it at the end.

    Raises:
        ServerFailedError: it ended first.
    """
    command = [sys.executable, "-m", "app.cli", "serve", *flags, "--host=127.0.0.1", "--port=0"]
    started_at = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment(keys)) as process:
        assert process.stdout is not None
        # What it prints after it is ready must not fill the pipe.
        drain = threading.Thread(target=process.stdout.read, daemon=True)
        try:
            address = next((match[0] for line in process.stdout if (match := _ADDRESS.search(line))), None)
            if address is None:
                raise ServerFailedError(f"the server ended with status {process.wait()} before it was ready")
            drain.start()
            yield RunningServer(address.rstrip("/."), time.perf_counter() - started_at, process.pid)
        finally:
            _stop(process)
            if drain.ident is not None:
                drain.join()


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
        return
    process.kill()
    process.wait()
