"""The online bench against a small server that answers as it is told, and its sums on made-up times."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from app.bench.client import Target, Timing, count_preemptions, find_model, parse_counter, send_workload
from app.bench.online import Measured, online_table, run_online, summarize
from app.bench.server_process import ServerFailedError, running_server
from app.settings import Settings
from engine.bench.workloads import Item, Workload

Answer = Callable[[dict[str, Any]], list[dict[str, Any] | str]]


class FakeServer:
    """An HTTP server that streams what `answer` gives for each request's body and notes what it was asked."""

    def __init__(self, answer: Answer, preemptions: tuple[int, ...] = (3, 5), status: int = 200) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.authorization: set[str] = set()
        self._preemptions = list(preemptions)
        self._status = status

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            path = head.split()[1]
            self.paths.append(path)
            self.authorization.add(headers.get("authorization", ""))
            status, kind, payload = self._respond(path, body)
            writer.write(
                f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(payload)}\r\n"
                "connection: close\r\n\r\n".encode()
                + payload
            )
            await writer.drain()
        finally:
            writer.close()
            await writer.wait_closed()

    def _respond(self, path: str, body: bytes) -> tuple[int, str, bytes]:
        if path == "/v1/models":
            return 200, "application/json", b'{"data": [{"id": "toy", "owned_by": "pagedeck"}]}'
        if path == "/metrics":
            count = self._preemptions.pop(0)
            return 200, "text/plain", f'vllm:num_preemptions_total{{model_name="toy"}} {count}.0\n'.encode()
        if path == "/v1/completions":
            request = json.loads(body)
            self.bodies.append(request)
            events = [e if isinstance(e, str) else json.dumps(e) for e in self.answer(request)]
            return self._status, "text/event-stream", "".join(f"data: {event}\n\n" for event in events).encode()
        return 404, "application/json", b"{}"


def tokens(num: int, usage: int | None = None) -> list[dict[str, Any] | str]:
    """A stream of `num` pieces whose usage says `usage` (as many)."""
    pieces: list[dict[str, Any] | str] = [{"choices": [{"text": "x"}]} for _ in range(num)]
    return [*pieces, {"choices": [], "usage": {"completion_tokens": num if usage is None else usage}}, "[DONE]"]


def serve_and(server: FakeServer, work: Callable[[str], Awaitable[Any]]) -> Any:
    """The result of `work(base_url)` while the server runs."""

    async def main() -> Any:
        listener = await asyncio.start_server(server, "127.0.0.1", 0)
        async with listener:
            return await work(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")

    return asyncio.run(main())


def workload(*max_tokens: int) -> Workload:
    """One request for each number."""
    return Workload("made", tuple(Item((5, 6, 7), num) for num in max_tokens))


def send(server: FakeServer, work: Workload) -> list[Timing]:
    """The timings of a workload that was sent to the server."""
    timings: list[Timing] = serve_and(server, lambda url: send_workload(Target(url, "toy", "key"), work))
    return timings


def test_requests_ask_for_exactly_their_tokens_greedily_from_token_ids() -> None:
    server = FakeServer(lambda body: tokens(body["max_tokens"]))
    timings = send(server, workload(3, 1))
    assert [(t.num_output_tokens, t.error, len(t.gaps_s)) for t in timings] == [(3, None, 2), (1, None, 0)]
    first = next(body for body in server.bodies if body["max_tokens"] == 3)
    assert first == {
        "model": "toy", "prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0.0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert server.authorization == {"bearer key"}


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (tokens(2), "produced 2 tokens instead of 3"),
        ([{"choices": [{"text": "x"}]}, {"error": {"message": "boom"}}], "in the stream: {'message': 'boom'}"),
        (["[DONE]"], "the stream ended without output"),
        (["{broken"], "JSONDecodeError"),
        (['"text"'], "an event that is no object"),
    ],
)  # fmt: skip
def test_a_request_that_went_wrong_says_how(events: list[dict[str, Any] | str], error: str) -> None:
    (timing,) = send(FakeServer(lambda _body: events), workload(3))
    assert timing.error is not None
    assert error in timing.error


def test_a_refused_request_carries_the_servers_words() -> None:
    (timing,) = send(FakeServer(lambda _body: [{"error": "full"}], status=503), workload(3))
    assert timing.error is not None
    assert timing.error.startswith("HTTP 503: ")
    assert "full" in timing.error


def test_the_model_and_the_preemptions_are_the_servers_own() -> None:
    server = FakeServer(lambda _body: [])
    assert serve_and(server, lambda url: find_model(url, None)) == ("toy", "pagedeck")
    assert serve_and(server, lambda url: count_preemptions(Target(url, "toy"))) == 3


def test_a_counter_is_summed_over_its_labels() -> None:
    lines = ["# TYPE a counter", 'a{x="1"} 2.0', 'a{x="2"} 3.0', "a_created 9", "ab 7"]
    assert parse_counter(lines, "a") == 5
    assert parse_counter(lines, "ab") == 7
    assert parse_counter(lines, "b") is None


def test_requests_are_sent_at_their_arrival_times() -> None:
    items = (Item((1,), 1, 0.0), Item((2,), 1, 0.05), Item((3,), 1, 0.1))
    sent = [t.sent_at for t in send(FakeServer(lambda _body: tokens(1)), Workload("made", items))]
    assert sent[1] - sent[0] >= 0.05 - 0.01
    assert sent[2] - sent[0] >= 0.1 - 0.01
    assert sent == sorted(sent)


def timing(prompt: int, times: list[float], *, sent_at: float = 0.0, error: str | None = None) -> Timing:
    """A request whose pieces came at `times`."""
    item = Item(tuple(range(prompt)), len(times))
    return Timing(item, sent_at, times, times[-1] if times else sent_at, len(times), error)


def test_latencies_are_differences_of_what_was_seen() -> None:
    timings = [timing(10, [1.0, 1.5, 2.5], sent_at=0.5), timing(10, [2.0], sent_at=1.0)]
    summary = summarize(Workload("made", tuple(t.item for t in timings)), Measured(timings, 4), rep=1, startup_s=2.0)
    assert summary["duration_s"] == 2.0
    assert summary["output_tokens_per_s"] == 2.0
    assert (summary["num_preemptions"], summary["errors"], summary["rep"], summary["startup_s"]) == (4, 0, 1, 2.0)
    assert summary["ttft_p50_s"] == 0.75
    assert summary["itl_p50_s"] == 0.75
    assert summary["tpot_p99_s"] == 0.75
    assert (summary["e2e_p50_s"], summary["e2e_p99_s"]) == (1.5, pytest.approx(1.99))
    assert "short_requests" not in summary


def test_the_gaps_of_short_requests_stand_apart_where_long_prompts_came_among_them() -> None:
    short = [timing(64, [1.0, 1.1, 1.2]) for _ in range(3)] + [timing(64, [1.0, 3.0])]
    timings = [*short, timing(4000, [5.0, 9.0])]
    summary = summarize(Workload("made", tuple(t.item for t in timings)), Measured(timings, None), 0, None)
    assert summary["short_requests"] == 4
    assert summary["itl_short_max_s"] == 2.0
    assert summary["itl_short_p50_s"] == 0.1
    assert "ITL*" in online_table([summary])


def test_a_failed_request_counts_as_an_error_and_not_as_a_latency() -> None:
    timings = [timing(10, [1.0, 2.0]), timing(10, [], error="HTTP 500")]
    summary = summarize(Workload("made", tuple(t.item for t in timings)), Measured(timings, 0), 0, None)
    assert (summary["errors"], summary["ttft_p99_s"], summary["output_tokens"]) == (1, 1.0, 2)


@pytest.mark.parametrize(("pieces", "status"), [(2, 0), (1, 1)])
def test_the_exit_status_tells_whether_every_request_was_right(
    pieces: int, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server = FakeServer(lambda _body: tokens(pieces))

    async def run(url: str) -> int:
        return await asyncio.to_thread(
            run_online, Settings(), workload(2, 2), reps=1, warmup=1, base_url=url + "/v1", flags=[]
        )

    assert serve_and(server, run) == status
    output = capsys.readouterr()
    (line,) = [json.loads(line) for line in output.out.splitlines()]
    assert line["engine"] == "pagedeck"
    assert line["num_preemptions"] == 2
    assert {"ttft_p50_s", "ttft_p99_s", "itl_p50_s", "tpot_p50_s", "e2e_p99_s"} <= set(line)
    assert "no reset of its prefix cache" in output.err


def test_an_address_where_nobody_listens_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:  # bound but not listening: nobody else gets the port
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        assert run_online(Settings(), workload(1), reps=1, warmup=0, base_url=url, flags=[]) == 1
    assert capsys.readouterr().err.startswith("pagedeck: ")


def test_a_server_that_does_not_start_is_told() -> None:
    with pytest.raises(ServerFailedError, match="status 2"), running_server(["--max-num-seqs=0"]):
        pass


@pytest.mark.model
@pytest.mark.slow
def test_the_bench_starts_a_server_and_measures_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-kv-blocks=64", "--threads=2", "--dtype=float32"]
    items = tuple(Item(tuple(range(100, 110 + n)), 4 + n, arrival_s=0.01 * n) for n in range(3))
    assert run_online(Settings(), Workload("made", items), reps=2, warmup=1, base_url=None, flags=flags) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["output_tokens"], line["errors"], line["num_preemptions"]) for line in lines] == [(15, 0, 0)] * 2
    assert all(line["startup_s"] > 0 and 0 < line["ttft_p50_s"] <= line["e2e_p99_s"] for line in lines)
