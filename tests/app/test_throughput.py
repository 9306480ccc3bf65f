"""The line of log says what the counters say, and nothing while nothing happens."""

from __future__ import annotations

import asyncio

import pytest

from app.throughput import Totals, line, log_throughput
from tests.helpers.engines import make_async_engine, make_request


def test_an_idle_engine_has_no_line() -> None:
    state = make_async_engine().state
    assert line(Totals.of(state), state, 10.0) is None


def test_rates_are_differences_of_the_counters() -> None:
    async def scenario() -> str | None:
        engine = make_async_engine()
        await engine.start()
        before = Totals.of(engine.state)
        async for _ in await engine.submit(make_request("a", 20, max_tokens=8)):
            pass
        text = line(before, engine.state, 4.0)
        assert line(Totals.of(engine.state), engine.state, 4.0) is None
        await engine.stop()
        return text

    assert asyncio.run(scenario()) == (
        "2.0 steps/s, prefill 5.0 tokens/s, generation 2.0 tokens/s, running 0, waiting 0, KV 0.0%, preemptions 0"
    )


def test_a_queue_that_does_not_move_is_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        engine = make_async_engine()
        await engine.start()
        await engine.pause("test")
        stream = await engine.submit(make_request("a", 20))
        logging_task = asyncio.ensure_future(log_throughput(engine.state, interval_s=0.001))
        while not caplog.records:  # noqa: ASYNC110 (log records wake nobody up)
            await asyncio.sleep(0)
        logging_task.cancel()
        await engine.abort(stream.request_id)
        await engine.stop()

    with caplog.at_level("INFO", "app.throughput"):
        asyncio.run(scenario())
    assert "waiting 1" in caplog.records[0].getMessage()


def test_a_step_that_takes_too_long_is_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        state = make_async_engine().state
        logging_task = asyncio.ensure_future(log_throughput(state, interval_s=0.001, stuck_for_s=lambda: 34.2))
        while not caplog.records:  # noqa: ASYNC110 (log records wake nobody up)
            await asyncio.sleep(0)
        logging_task.cancel()

    with caplog.at_level("WARNING", "app.throughput"):
        asyncio.run(scenario())
    assert caplog.records[0].getMessage() == "step 1 has been running for 34 s: nobody gets a token"
