"""Requests that keep an engine busy while a browser looks at it, and plain HTTP to compare with what the pages say."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NUM_BLOCKS = 64  # of the fixture `address`
STEP_S = 0.02
ANSWER_S = 240  # an upper bound for a busy machine


def paced(_batch: object) -> None:
    """How long a step of the fake model takes: long enough for a browser to see each one."""
    threading.Event().wait(STEP_S)


class Console:
    """The admin API of one server."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")

    def call(self, method: str, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
        """(status, JSON) of a request; errors of the server are answers too."""
        data = None if body is None else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(
            self.address + path, data, {"Content-Type": "application/json", **names}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
                return response.status, json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"null")

    def state(self) -> Any:
        """GET /admin/api/state."""
        return self.call("GET", "/admin/api/state")[1]

    def act(self, action: str, body: object = None) -> Any:
        """POST /admin/api/engine/ACTION, which must succeed."""
        status, answer = self.call("POST", f"/admin/api/engine/{action}", {} if body is None else body)
        assert status == 200, answer
        return answer

    def set_limits(self, **changes: object) -> None:
        """PATCH of the limits as another admin would."""
        version = self.state()["limits_version"]
        status, answer = self.call("PATCH", "/admin/api/limits", changes, If_Match=f'"{version}"')
        assert status == 200, answer

    def metric(self, name: str) -> float:
        """The sum over all labels of a metric of /metrics."""
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


class Load:
    """Completions in flight, each on a thread of its own."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.answers: list[tuple[int, Any]] = []
        self._threads: list[threading.Thread] = []

    def start(self, num_requests: int, *, prompt_tokens: int = 60, max_tokens: int = 400) -> None:
        """Send that many requests at once; no two prompts are alike."""
        for i in range(num_requests):
            number = len(self._threads) + i
            prompt = [33 + (number * 31 + j * 7) % 90 for j in range(prompt_tokens)]
            body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
            thread = threading.Thread(target=self._send, args=(body,), name=f"request-{number}")
            self._threads.append(thread)
            thread.start()

    @property
    def model(self) -> str:
        """Name of the served model."""
        name: str = self.console.state()["model"]
        return name

    def _send(self, body: object) -> None:
        self.answers.append(self.console.call("POST", "/v1/completions", body))

    def join(self) -> None:
        """Wait for all answers."""
        for thread in self._threads:
            thread.join(ANSWER_S + 10)
            assert not thread.is_alive(), f"{thread.name} was never answered"


@contextmanager
def load(console: Console) -> Iterator[Load]:
    """A load that is gone, whatever the test left running or paused, when the block ends."""
    traffic = Load(console)
    try:
        yield traffic
    finally:
        if console.state()["paused"]:
            console.act("resume")
        while rows := [*(state := console.state())["running"], *state["waiting"]]:
            for row in rows:
                request_id = row.get("request_id", row["id"])
                console.call("POST", f"/admin/api/requests/{request_id}/abort", {})
        traffic.join()
