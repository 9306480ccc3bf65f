"""The engine on its thread: one inbox in, one hop out, and nobody left waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence

import pytest

from engine.async_engine import AsyncEngine
from engine.core.batch import Batch
from engine.core.events import Record
from engine.core.stats import fold
from engine.errors import EngineDeadError, EngineDrainingError, NotPausedError, QueueFullError, StaleLimitsError
from engine.request_stream import RequestStream
from tests.helpers.engines import make_async_engine, make_request


def run(test: Callable[[AsyncEngine], Awaitable[None]], **options: object) -> None:
    """Run `test` on a started engine and stop it; at most half a minute, whatever hangs."""

    async def main() -> None:
        engine = make_async_engine(**options)
        await engine.start()
        try:
            await test(engine)
        finally:
            await engine.stop(timeout_s=0.0)

    asyncio.run(asyncio.wait_for(main(), 30))


async def read(stream: RequestStream) -> list[int]:
    return [token_id async for delta in stream for token_id in delta.token_ids]


async def until(engine: AsyncEngine, condition: Callable[[], bool]) -> None:
    """Wait, record by record, until `condition` holds."""
    changed = asyncio.Event()
    engine.add_listener(lambda records: changed.set())
    while not condition():
        changed.clear()
        await changed.wait()


def test_requests_stream_concurrently_and_the_fold_agrees_with_the_trace() -> None:
    async def test(engine: AsyncEngine) -> None:
        streams = [await engine.submit(make_request(f"r{i}", 20 + i, max_tokens=30)) for i in range(6)]
        tokens = await asyncio.gather(*(read(stream) for stream in streams))
        assert [len(t) for t in tokens] == [30] * 6
        assert engine.state.counters.generation_tokens == 180
        assert engine.state.block_counts["used"] == 0
        records = engine.trace.records(1, 10_000)
        assert fold(12, engine.start_limits, records).snapshot() == engine.state.snapshot()

    run(test, num_blocks=12)


def test_the_last_delta_carries_the_engines_own_counts() -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit(make_request("a", 20, max_tokens=5))
        deltas = [delta async for delta in stream]
        stats = deltas[-1].stats
        assert stats is not None
        assert (stats.num_prompt_tokens, stats.num_output_tokens, stats.peak_num_blocks) == (20, 5, 2)
        assert stats.ttft_s is not None
        assert stats.decode_s is not None
        assert 0 < stats.ttft_s < stats.e2e_s
        assert all(delta.stats is None for delta in deltas[:-1])

    run(test)


def test_pause_holds_everyone_and_single_steps_advance_exactly() -> None:
    async def test(engine: AsyncEngine) -> None:
        await engine.pause("look")
        assert (engine.state.is_paused, engine.state.pause_reason) == (True, "look")
        stream = await engine.submit(make_request("a", 20, max_tokens=5))
        assert engine.state.blocked is not None
        assert engine.state.blocked.constraint == "paused"
        assert await engine.step(3) == 3
        assert engine.state.step == 3
        assert engine.state.running["a"].num_output_tokens == 3
        assert await engine.step(10) == 2  # fewer: nothing is left to do
        await engine.resume()
        assert len(await read(stream)) == 5

    run(test)


def test_single_steps_need_a_pause() -> None:
    async def test(engine: AsyncEngine) -> None:
        with pytest.raises(NotPausedError):
            await engine.step()

    run(test)


def test_an_abort_is_visible_in_the_state_when_it_is_answered() -> None:
    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit(make_request("a", 20, max_tokens=100_000))
        await until(engine, lambda: "a" in engine.state.running)
        receipt = await engine.abort("a")
        assert receipt.state == "aborted"
        assert receipt.blocks_freed > 0
        assert not engine.state.sequences
        assert engine.state.block_counts["used"] == 0
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason == "abort"
        assert await engine.abort("a") == receipt

    run(test, num_blocks=4096, max_model_len=1_000_000)


def test_a_refusal_is_raised_and_counted() -> None:
    async def test(engine: AsyncEngine) -> None:
        await engine.pause("hold")
        stream = await engine.submit(make_request("a"))
        with pytest.raises(QueueFullError):
            await engine.submit(make_request("b"))
        assert engine.state.counters.rejected == {"queue_full": 1}
        await engine.resume()
        assert len(await read(stream)) == 8

    run(test, max_num_queued_reqs=1)


def test_limits_are_in_force_when_the_change_is_answered() -> None:
    async def test(engine: AsyncEngine) -> None:
        limits, version = await engine.set_limits({"max_num_seqs": 2}, expected_version=1)
        assert (limits.max_num_seqs, version) == (2, 2)
        with pytest.raises(StaleLimitsError):
            await engine.set_limits({"max_num_seqs": 3}, expected_version=1)

    run(test)


def test_a_step_that_fails_fails_every_open_request_and_says_why() -> None:
    def explode(batch: Batch) -> None:
        if batch.step == 3:
            raise ValueError("the device is gone")

    async def test(engine: AsyncEngine) -> None:
        await engine.pause("until both are in")
        streams = [await engine.submit(make_request(name, max_tokens=50)) for name in "ab"]
        await engine.resume()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="ValueError: the device is gone"):
                await read(stream)
        assert engine.is_dead
        assert engine.state.dead_reason == "ValueError: the device is gone"
        with pytest.raises(EngineDeadError):
            await engine.submit(make_request("c"))
        with pytest.raises(EngineDeadError):
            await engine.abort("a")

    run(test, before_step=explode)


def test_a_record_that_the_fold_rejects_fails_every_open_request_and_says_why() -> None:
    """What can't be taken in must not be lost in silence, with everyone waiting for ever."""

    async def test(engine: AsyncEngine) -> None:
        await engine.pause("until both are in")
        streams = [await engine.submit(make_request(name, max_tokens=50)) for name in "ab"]

        def reject(record: Record, take: Callable[[Record], None] = engine.state.apply) -> None:
            if record.step == 2:
                raise KeyError("block 7")
            take(record)

        engine.state.apply = reject  # type: ignore[method-assign]
        await engine.resume()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="KeyError: 'block 7'"):
                await read(stream)
        assert engine._thread is not None
        await asyncio.to_thread(engine._thread.join, 20)
        assert not engine._thread.is_alive(), "nothing is computed that nobody gets"
        engine.state.apply = type(engine.state).apply.__get__(engine.state)  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError):
            await engine.submit(make_request("c"))

    run(test)


def test_commands_in_the_inbox_of_a_dying_engine_are_answered() -> None:
    in_step, go_on = threading.Event(), threading.Event()

    def explode(batch: Batch) -> None:
        in_step.set()
        go_on.wait(20)
        raise ValueError("gone")

    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit(make_request("a"))
        await asyncio.to_thread(in_step.wait, 20)
        commands = [asyncio.ensure_future(engine.pause("x")), asyncio.ensure_future(engine.set_limits({}))]
        await asyncio.sleep(0)  # both are in the inbox now
        go_on.set()
        results = await asyncio.gather(*commands, return_exceptions=True)
        assert [type(result) for result in results] == [EngineDeadError, EngineDeadError]
        with pytest.raises(EngineDeadError):
            await read(stream)

    run(test, before_step=explode)


def test_a_stuck_step_is_told_and_recovers() -> None:
    in_step, go_on = threading.Event(), threading.Event()

    def wait(batch: Batch) -> None:
        in_step.set()
        go_on.wait(20)

    async def test(engine: AsyncEngine) -> None:
        engine.stuck_after_s = 0.0
        assert not engine.is_stuck
        stream = await engine.submit(make_request("a"))
        await asyncio.to_thread(in_step.wait, 20)
        assert engine.is_stuck
        go_on.set()
        assert len(await read(stream)) == 8
        assert not engine.is_stuck

    run(test, before_step=wait)


def test_a_cancelled_submit_leaves_nothing_behind() -> None:
    async def test(engine: AsyncEngine) -> None:
        await engine.pause("hold")
        task = asyncio.ensure_future(engine.submit(make_request("a")))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.resume()
        assert not engine.state.sequences
        assert not engine._streams

    run(test)


def test_a_cancelled_submit_that_is_refused_leaves_nothing_behind() -> None:
    """The client left while a step ran; its request is refused only afterwards."""
    in_step, go_on = threading.Event(), threading.Event()

    def wait(batch: Batch) -> None:
        in_step.set()
        assert go_on.wait(20)

    async def test(engine: AsyncEngine) -> None:
        stream = await engine.submit(make_request("a", max_tokens=2))
        await asyncio.to_thread(in_step.wait, 20)
        task = asyncio.ensure_future(engine.submit(make_request("b", max_tokens=2, temperature=9.0)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await read(stream)
        await engine.abort("b")  # answered after all that was before it
        assert not engine._streams
        assert len(await read(await engine.submit(make_request("b", max_tokens=2)))) == 2

    run(test, before_step=wait)


def test_a_pause_ends_single_steps_and_each_caller_is_told_its_own() -> None:
    async def test(engine: AsyncEngine) -> None:
        await engine.pause("look")
        stream = await engine.submit(make_request("a", max_tokens=100_000))
        assert await asyncio.gather(engine.step(5), engine.step(3)) == [5, 3]
        long = asyncio.ensure_future(engine.step(10_000))
        await at_step(engine, 10)
        await engine.pause("enough")
        stopped_at = engine.state.step
        assert await long == stopped_at - 8
        gone = asyncio.ensure_future(engine.step(10_000))
        await at_step(engine, stopped_at + 2)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await engine.pause("after the present step")
        left_at = engine.state.step
        assert await engine.step(1) == 1
        assert engine.state.step == left_at + 1
        assert left_at < 10_000
        await engine.abort("a")
        await read(stream)

    run(test, num_blocks=8192, max_model_len=120_000)


async def at_step(engine: AsyncEngine, step: int) -> None:
    """Wait until the engine has made so many steps."""
    there = asyncio.Event()

    def look(records: Sequence[Record]) -> None:
        if engine.state.step >= step:
            there.set()

    engine.add_listener(look)
    look(())
    await there.wait()
    engine.remove_listener(look)


def test_who_waits_behind_a_long_step_is_told_when_the_engine_stops() -> None:
    in_step, go_on = threading.Event(), threading.Event()

    def wait(batch: Batch) -> None:
        in_step.set()
        assert go_on.wait(20)

    async def main() -> None:
        engine = make_async_engine(before_step=wait)
        await engine.start()
        running = await engine.submit(make_request("a", max_tokens=50))
        await asyncio.to_thread(in_step.wait, 20)
        behind = asyncio.ensure_future(engine.submit(make_request("b")))
        await asyncio.sleep(0)
        stop = asyncio.ensure_future(engine.stop(timeout_s=0.0))
        with pytest.raises(EngineDrainingError, match="a step is still running"):
            await behind
        go_on.set()
        await stop
        assert [delta async for delta in running][-1].finish_reason == "abort"

    asyncio.run(asyncio.wait_for(main(), 30))


def test_stop_ends_what_runs_as_abort_and_refuses_new_work() -> None:
    async def main() -> None:
        engine = make_async_engine(num_blocks=4096, max_model_len=1_000_000)
        await engine.start()
        stream = await engine.submit(make_request("a", max_tokens=100_000))
        await engine.stop(timeout_s=0.0)
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason == "abort"
        with pytest.raises(EngineDrainingError):
            await engine.submit(make_request("b"))

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_failing_listener_costs_nobody_a_token(caplog: pytest.LogCaptureFixture) -> None:
    def fail(records: object) -> None:
        raise KeyError("a bug in a page")

    async def test(engine: AsyncEngine) -> None:
        engine.add_listener(fail)
        assert len(await read(await engine.submit(make_request("a")))) == 8

    run(test)
    assert "a listener of the engine failed" in caplog.text


def test_a_total_timeout_ends_an_idle_paused_engines_request() -> None:
    async def test(engine: AsyncEngine) -> None:
        await engine.pause("hold")
        stream = await engine.submit(make_request("a", request_timeout_s=0.01))
        deltas = [delta async for delta in stream]
        assert deltas[-1].finish_reason == "timeout"

    run(test)
