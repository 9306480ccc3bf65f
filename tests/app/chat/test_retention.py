"""Which of the chat's texts are kept, for how long, and who ends them."""

from __future__ import annotations

import asyncio

from starlette.applications import Starlette

from app.context import AppContext
from app.playground import generations as kept
from tests.app.chat.client import ME, OTHER, Page, ask, run, stream_of
from tests.helpers.live_app import running_app


def test_what_nobody_reads_is_aborted_after_a_while_and_what_is_read_is_not() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        generations, now = ctx.console.generations, 1000.0
        generations._now = lambda: now
        await ctx.async_engine.pause("a look")
        async with stream_of(app, OTHER) as stream:
            abandoned = generations.get((await ask(app))["generation_id"])
            followed = generations.get((await ask(app, client_id=OTHER))["generation_id"])
            assert abandoned is not None
            assert followed is not None
            now += kept.ABANDON_S - 1
            await generations.sweep()
            assert len(ctx.async_engine.state.sequences) == 2
            now += 2
            await generations.sweep()
            assert list(ctx.async_engine.state.sequences) == [followed.request_id]
            await Page(stream).read("snapshot", followed.generation_id)
        now += kept.ABANDON_S - 1  # its reader has only just left
        await generations.sweep()
        assert list(ctx.async_engine.state.sequences) == [followed.request_id]
        now += 2
        await generations.sweep()
        assert not ctx.async_engine.state.sequences

    run(test)


def test_what_ended_is_kept_for_a_while_and_only_so_many() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        generations, now = ctx.console.generations, 1000.0
        generations._now = lambda: now
        async with stream_of(app) as stream:
            key = (await ask(app))["generation_id"]
            await Page(stream).read("done", key)
        now += kept.KEEP_FINISHED_S
        await generations.sweep()
        assert generations.get(key) is not None
        now += 1
        await generations.sweep()
        assert generations.get(key) is None
        for _ in range(kept.MAX_KEPT + 5):
            await generations.stop(generations.get((await ask(app))["generation_id"]))  # type: ignore[arg-type]
        await generations.sweep()
        assert len(generations.of_client(ME)) <= kept.MAX_KEPT

    run(test)


def test_the_end_of_the_application_ends_the_answer_and_then_the_stream() -> None:
    async def main() -> None:
        async with running_app() as app:
            await app.state.ctx.async_engine.pause("a look")
            client = await stream_of(app).__aenter__()
            key = (await ask(app))["generation_id"]
            await Page(client).read("snapshot", key)
        events = await client.until("bye")
        assert [event for event, *_ in events if event in ("done", "bye")] == ["done", "bye"]
        done = next(data for event, data, _ in events if event == "done")
        assert (done["generation_id"], done["finish_reason"]) == (key, "abort")
        await client.ended.wait()
        await client.leave()

    asyncio.run(main())


def test_a_disconnect_frees_the_reader_at_once() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        async with stream_of(app) as stream, stream_of(app):
            await stream.next("hello")
            assert ctx.console.chat_streams.num_readers == 2
        assert ctx.console.chat_streams.num_readers == 0

    run(test)
