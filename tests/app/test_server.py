"""From the first moment to the last: ports, loading, health, signals, and readers that do not read."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from app.factory import create_app
from app.server import MAX_HEADER_BYTES, SEND_BUFFER_BYTES, Server, address_of, open_listener, serve
from app.settings import Settings
from engine.core.batch import Batch
from engine.errors import StartupError
from tests.helpers.engines import make_async_engine
from tests.helpers.fake_runner import FakeRunner
from tests.helpers.live_app import serve as serve_fake

ROOT = Path(__file__).parents[2]
CHAT = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True, "max_tokens": 900}


def test_a_port_in_use_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with open_listener("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert serve(Settings(port=port)) == 1
    captured = capsys.readouterr()
    assert captured.err == f"pagedeck: port {port} on 127.0.0.1 is in use; choose another with --port\n"
    assert captured.out == ""


def test_a_reachable_address_without_a_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(Settings(host="0.0.0.0", port=0)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "--api-key" in line


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_of_another_machine_is_one_clear_line(host: str) -> None:
    with pytest.raises(StartupError, match=host):
        open_listener(host, 0)


def test_accepted_connections_have_small_send_buffers() -> None:
    with open_listener("127.0.0.1", 0) as listener:
        address = listener.getsockname()
        with socket.create_connection(address), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES


@pytest.mark.parametrize(
    ("host", "shown"), [("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:"), ("::1", "http://[::1]:")]
)
def test_the_address_is_one_to_click_on(host: str, shown: str) -> None:
    try:
        listener = open_listener(host, 0)
    except StartupError as error:
        if ":" in host:
            pytest.skip(f"no IPv6 here: {error}")
        raise
    with listener:
        assert address_of(listener, "/x") == f"{shown}{listener.getsockname()[1]}/x"


# ---- loading -----------------------------------------------------------------------------------------------------


@contextmanager
def loading_server(load: object) -> Iterator[tuple[Server, threading.Event, threading.Thread]]:
    settings = Settings(port=0)
    ready = threading.Event()
    listener = open_listener("127.0.0.1", 0)
    server = Server(settings, listener, load, lambda address, app: ready.set())  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield server, ready, thread
    finally:
        server.should_exit = True
        thread.join(30)


def test_while_the_model_loads_the_process_lives_but_is_not_ready() -> None:
    may_load = threading.Event()

    def load() -> Starlette:
        assert may_load.wait(30)
        return create_app(Settings(port=0), make_async_engine())

    with loading_server(load) as (server, ready, _), httpx.Client(base_url=server.address) as client:
        try:
            assert client.get("/healthz").status_code == 200
            answer = client.get("/readyz")
            assert (answer.status_code, answer.json()["reasons"]) == (503, ["loading"])
            refused = client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.json()["error"]["code"] == "loading"
            page = client.get("/", headers={"accept": "text/html"})
            assert (page.status_code, page.headers["refresh"]) == (503, "2")
        finally:
            may_load.set()
        assert ready.wait(30)
        assert client.get("/readyz").json() == {"status": "ready", "reasons": []}
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_model_that_cannot_load_ends_the_server() -> None:
    def load() -> Starlette:
        raise StartupError("no such model")

    with loading_server(load) as (server, ready, thread):
        thread.join(30)
        assert not thread.is_alive()
        assert isinstance(server.failure, StartupError)
        assert not ready.is_set()


# ---- health ------------------------------------------------------------------------------------------------------


def fail_on(batch: Batch) -> None:
    if any(new.num_prompt_tokens == 13 for new in batch.new):
        raise RuntimeError("the test breaks this step")


def test_pause_makes_it_unready_and_resume_ready() -> None:
    with serve_fake() as live, httpx.Client(base_url=live.address) as client:
        client.post("/admin/api/engine/pause", json={"reason": "test"}).raise_for_status()
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()["reasons"]) == (503, ["paused"])
        assert client.get("/health").status_code == client.get("/healthz").status_code == 200
        client.post("/admin/api/engine/resume", json={}).raise_for_status()
        assert client.get("/readyz").status_code == 200


def test_a_full_queue_refuses_with_retry_after_and_stays_ready() -> None:
    with serve_fake(max_num_queued_reqs=0) as live, httpx.Client(base_url=live.address) as client:
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "queue_full"
        assert client.get("/readyz").status_code == client.get("/health").status_code == 200
        assert live.engine.state.counters.rejected == {"queue_full": 1}


def test_of_several_prompts_all_are_refused_or_none() -> None:
    with serve_fake(max_num_queued_reqs=2) as live, httpx.Client(base_url=live.address) as client:
        client.post("/admin/api/engine/pause", json={"reason": "test"}).raise_for_status()
        answer = client.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
        assert answer.status_code == 503
        client.post("/admin/api/engine/resume", json={}).raise_for_status()
        assert client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1}).status_code == 200
        assert not live.engine.state.sequences


def test_a_dead_engine_is_said_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    poison = {"prompt": "x" * 13, "max_tokens": 2}
    with serve_fake(before_step=fail_on) as live, httpx.Client(base_url=live.address) as client:
        answer = client.post("/v1/completions", json=poison)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_dead"
        assert client.get("/healthz").status_code == 200
        assert client.get("/health").status_code == 503
        assert client.get("/readyz").json()["reasons"] == ["dead"]
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 503
        assert live.engine.is_dead
    assert "the test breaks this step" in caplog.text


def test_a_stream_whose_engine_dies_ends_with_the_error(caplog: pytest.LogCaptureFixture) -> None:
    with serve_fake(before_step=fail_on) as live, httpx.Client(base_url=live.address) as client:
        body = {"prompt": "y" * 13, "max_tokens": 2, "stream": True}
        text = client.post("/v1/completions", json=body).text
        error, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert json.loads(error)["error"]["code"] == "engine_dead"
        assert done == "[DONE]"
        assert live.engine.is_dead
    assert "the test breaks this step" in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_is_an_error_of_its_own(stream: bool) -> None:
    runners: list[FakeRunner] = []

    def fail_what_is_new(batch: Batch) -> None:
        for new in batch.new:
            if new.num_prompt_tokens == 13:
                runners[0].fail_next[new.seq_id] = "logits are not finite"

    with serve_fake(before_step=fail_what_is_new) as live, httpx.Client(base_url=live.address) as client:
        runners.append(live.engine._engine._runner)  # type: ignore[arg-type]
        answer = client.post("/v1/completions", json={"prompt": "x" * 13, "stream": stream})
        if stream:
            event, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
            assert (answer.status_code, done) == (200, "[DONE]")
            error = json.loads(event)["error"]
        else:
            assert answer.status_code == 500
            error = answer.json()["error"]
        assert error["code"] == "generation_failed"
        assert "logits are not finite" in error["message"]
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_times_out_is_an_answer_with_what_there_is(stream: bool) -> None:
    with serve_fake() as live, httpx.Client(base_url=live.address) as client:
        client.post("/admin/api/engine/pause", json={"reason": "so that it must wait"}).raise_for_status()
        body = {"prompt": "a", "queue_timeout_s": 0.01, "stream": stream}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        value = json.loads(answer.text.split("\n\n")[0].removeprefix("data: ")) if stream else answer.json()
        assert value["choices"][0]["finish_reason"] == "timeout"
        assert value["choices"][0]["text"] == ""
        client.post("/admin/api/engine/resume", json={}).raise_for_status()


def address_parts(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("http://").rpartition(":")
    return host, int(port)


def test_headers_without_end_are_cut_off() -> None:
    with (
        serve_fake() as live,
        socket.create_connection(("127.0.0.1", int(live.address.rpartition(":")[2]))) as connection,
    ):
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        line = b"X-Filler: " + b"x" * 1000 + b"\r\n"
        reply = b""
        try:
            for _ in range(2 * MAX_HEADER_BYTES // len(line)):
                connection.sendall(line)
            reply = connection.recv(1000)
        except (ConnectionResetError, BrokenPipeError):
            return
        assert reply.startswith(b"HTTP/1.1 400 ")


# ---- the end -----------------------------------------------------------------------------------------------------

SERVER_SCRIPT = """
import sys, threading, time
from app import server
from app.factory import create_app
from tests.helpers.engines import make_async_engine
from tests.helpers.fake_runner import FakeRunner

def before_step(batch):
    if batch.step == int(sys.argv[2]):
        threading.Event().wait(60)  # a step that outlasts everyone's patience
    time.sleep(0.01)

def load(settings):
    return create_app(settings, make_async_engine(before_step=before_step))

server.load_app = load
from app.cli import main
sys.exit(main(["serve", "--port", "0", "--shutdown-timeout", sys.argv[1]]))
"""


@contextmanager
def server_process(shutdown_timeout: float, endless_step: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER_SCRIPT, str(shutdown_timeout), str(endless_step)],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("pagedeck is ready at http://127.0.0.1:"), line
        yield process, line.split()[4]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_with_a_last_event_and_the_process_with_0(sig: signal.Signals) -> None:
    with server_process(0.2) as (process, address), httpx.Client(base_url=address, timeout=30) as client:
        with (
            client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as chat,
            client.stream("GET", "/admin/api/events") as events,
        ):
            chat_lines, event_lines = chat.iter_lines(), events.iter_lines()
            while "content" not in next(chat_lines):
                pass
            assert next(event_lines)
            process.send_signal(sig)
            rest = [line for line in chat_lines if line]
            assert any('"finish_reason":"abort"' in line for line in rest)
            assert rest[-1] == "data: [DONE]"
            assert "event: bye" in list(event_lines)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_step_that_does_not_end_keeps_neither_streams_nor_the_process() -> None:
    with server_process(0.1, endless_step=4) as (process, address), httpx.Client(base_url=address) as client:
        body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 50, "stream": True}
        with client.stream("POST", "/v1/completions", json=body, timeout=30) as stream:
            lines = stream.iter_lines()
            while "text" not in next(lines):
                pass
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert sum('"finish_reason":"abort"' in line for line in rest) == 4
        assert rest[-1] == "data: [DONE]"
        assert process.wait(20) == 0


def test_what_runs_may_finish_within_the_timeout() -> None:
    with server_process(20) as (process, address), httpx.Client(base_url=address, timeout=30) as client:
        body = {**CHAT, "max_tokens": 30, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as chat:
            lines = chat.iter_lines()
            while "content" not in next(lines):
                pass
            process.send_signal(signal.SIGTERM)
            assert any('"finish_reason":"length"' in line for line in lines)
        assert process.wait(20) == 0


def test_new_work_is_refused_while_it_drains() -> None:
    with serve_fake() as live, httpx.Client(base_url=live.address) as client:
        client.post("/admin/api/engine/drain", json={}).raise_for_status()
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "draining"
        assert answer.headers["retry-after"]
        assert client.get("/readyz").json()["reasons"] == ["draining"]
