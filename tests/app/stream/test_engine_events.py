"""GET /admin/api/events of the whole application, over ASGI."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.applications import Starlette
from starlette.types import Message

from app.context import AppContext
from app.sse import ABORT_EXTENSION, EventStream
from engine.async_engine import RequestStream
from tests.app.stream.asgi_client import AsgiStream
from tests.app.stream.mirror import Mirror
from tests.app.stream.stage import expected
from tests.helpers.engines import make_request
from tests.helpers.live_app import running_app

PATH = "/admin/api/events"


def ctx_of(app: Starlette) -> AppContext:
    ctx: AppContext = app.state.ctx
    return ctx


async def read_all(stream: RequestStream) -> str:
    return "".join([delta.text async for delta in stream])


async def follow(client: AsgiStream, mirror: Mirror, seq: int) -> None:
    """Feed `mirror` until it has a keyframe and is at `seq`."""
    while mirror.scalars.get("seq", -1) < seq:
        mirror.feed(*await client.next())


def test_a_copy_equals_the_engine_s_state_after_a_burst_with_preemptions() -> None:
    async def test() -> None:
        async with running_app(num_blocks=24, max_num_seqs=6) as app, AsgiStream(app, PATH) as client:
            engine, mirror = ctx_of(app).async_engine, Mirror()
            assert client.status == 200
            assert client.headers["content-type"].startswith("text/event-stream")
            assert client.headers["cache-control"] == "no-store"
            ctx_of(app).console.publisher._max_backlog_bytes = (
                2**30
            )  # every event is to come, however slow this machine
            await follow(client, mirror, 0)
            await engine.pause("all are to wait together, so that they preempt at any speed of the machine")
            requests = [make_request(f"r-{i}", 40, max_tokens=60) for i in range(12)]
            streams = [await engine.submit(request) for request in requests]
            await engine.resume()
            await asyncio.gather(*(read_all(stream) for stream in streams))
            await follow(client, mirror, engine.state.seq)
            assert mirror.state() == expected(engine.state, ctx_of(app).console.wall)
            assert mirror.scalars["counters"]["num_preemptions"] > 0
            told = [e for e in mirror.events if e["kind"] == "preempted"]
            assert len(told) == mirror.scalars["counters"]["num_preemptions"]
            assert all(" freed, " in e["text"] and " to compute again" in e["text"] for e in told)

    asyncio.run(test())


def test_no_frame_carries_prompt_or_answer_text() -> None:
    async def test() -> None:
        async with running_app() as app, AsgiStream(app, PATH) as client:
            engine = ctx_of(app).async_engine
            first = await read_all(await engine.submit(make_request("r-0", list(b"my secret"), max_tokens=30)))
            stop = first[20:24]
            request = make_request("r-1", list(b"my secret"), max_tokens=30, stop=(stop,))
            assert await read_all(await engine.submit(request)) == first[:20]
            seen = ""
            seq = 0
            while seq < engine.state.seq:
                _, data, _ = await client.next("key", "delta")
                seq, seen = data["seq"], seen + str(data)
            assert "finished r-1 (stop)" in seen
            assert "secret" not in seen
            assert stop not in seen

    asyncio.run(test())


def test_a_disconnect_frees_the_viewer_at_once() -> None:
    async def test() -> None:
        async with running_app() as app:
            publisher = ctx_of(app).console.publisher
            client = AsgiStream(app, PATH)
            async with client:
                await client.until("key")
                assert len(publisher.clients) == 1
            assert not publisher.clients

    asyncio.run(test())


def test_head_opens_no_stream() -> None:
    async def test() -> None:
        async with running_app() as app:
            client = AsgiStream(app, PATH)
            client.scope["method"] = "HEAD"
            async with client:
                await client.ended.wait()
                assert client.status == 200
            assert not ctx_of(app).console.publisher.clients

    asyncio.run(test())


def test_the_end_of_the_application_says_bye() -> None:
    async def test() -> None:
        async with running_app() as app:
            client = await AsgiStream(app, PATH).__aenter__()
            await client.until("key")
        _, data, _ = await client.next("bye")
        assert data == {"reason": "shutdown"}
        await client.ended.wait()
        await client.leave()

    asyncio.run(test())


def test_last_event_id_of_another_process_gets_a_keyframe_and_of_this_one_resumes() -> None:
    async def test() -> None:
        async with running_app() as app:
            engine = ctx_of(app).async_engine
            async with AsgiStream(app, PATH) as client:
                _, _, key_id = await client.next("key")
            assert key_id == f"{engine.epoch}-{engine.state.seq}"
            await engine.pause("a look")
            async with AsgiStream(app, PATH, {"last-event-id": key_id}) as client:
                events = await client.until("delta")
                assert [event for event, *_ in events] == ["hello", "delta"]
                assert events[-1][1]["paused"] is True
            async with AsgiStream(app, PATH, {"last-event-id": f"other-{engine.state.seq}"}) as client:
                assert [event for event, *_ in await client.until("key")] == ["hello", "key"]

    asyncio.run(test())


def test_a_reader_that_takes_nothing_is_cut_off_and_its_iterator_closed() -> None:
    async def test() -> None:
        is_closed = is_cut = False

        def cut() -> None:
            nonlocal is_cut
            is_cut = True

        async def frames() -> Any:
            nonlocal is_closed
            try:
                while True:
                    yield b"event: x\ndata: 1\n\n"
            finally:
                is_closed = True

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        scope = {"type": "http", "method": "GET", "extensions": {ABORT_EXTENSION: {"abort": cut}}}
        await EventStream(frames(), "test", send_timeout_s=0)(scope, receive, send)
        assert is_closed
        assert is_cut

    asyncio.run(test())
