"""A client that leaves takes its request with it: within one step, in every state, streaming or not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from starlette.applications import Starlette

from engine.async_engine import AsyncEngine
from engine.core.batch import Batch
from engine.core.stats import Fold
from tests.helpers.live_app import Exchange, post, running_app

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 500, "ignore_eos": True}
TEXT = {"prompt": ["hello", "you"], "max_tokens": 500, "ignore_eos": True, "n": 2}
REQUESTS = [
    pytest.param("/v1/chat/completions", {**CHAT, "stream": True}, id="chat, streaming"),
    pytest.param("/v1/chat/completions", CHAT, id="chat, whole"),
    pytest.param("/v1/completions", {**TEXT, "stream": True}, id="two prompts of two, streaming"),
    pytest.param("/v1/completions", TEXT, id="two prompts of two, whole"),
]


class Gate:
    """Lets the engine take as many steps as the test allows."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)

    def allow(self, num_steps: int) -> None:
        self.permits.release(num_steps)

    def before_step(self, batch: Batch) -> None:
        assert self.permits.acquire(timeout=30), "the test allows no further step"


def engine_of(app: Starlette) -> AsyncEngine:
    engine: AsyncEngine = app.state.ctx.async_engine
    return engine


async def until(engine: AsyncEngine, holds: Callable[[Fold], bool]) -> None:
    """Wait until the state fulfils `holds`; records, not time, wake it up."""
    changed = asyncio.Event()
    listener = lambda records: changed.set()  # noqa: E731
    engine.add_listener(listener)
    try:
        while not holds(engine.state):
            changed.clear()
            await asyncio.wait_for(changed.wait(), 30)
    finally:
        engine.remove_listener(listener)


def assert_nothing_is_held(engine: AsyncEngine) -> None:
    assert not engine.state.sequences
    counts = engine.state.block_counts
    assert counts["used"] == counts["shared"] == 0
    assert counts["free"] + counts["cached"] == engine.state.num_blocks


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_running_request_ends_before_another_step(path: str, body: dict[str, object]) -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running_app(before_step=gate.before_step) as app:
            engine = engine_of(app)
            exchange = post(app, path, body)
            gate.allow(3)
            await until(engine, lambda state: state.step == 3)
            assert engine.state.running
            exchange.leave()
            await exchange.end()  # the abort is in the inbox; the engine waits inside step 4
            gate.allow(1)
            await until(engine, lambda state: not state.sequences)
            assert engine.state.step <= 4
            assert engine.state.counters.finished == {"abort": 4 if "prompt" in body else 1}
            assert_nothing_is_held(engine)

    asyncio.run(scenario())


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_waiting_request_leaves_the_queue_and_is_never_scheduled(path: str, body: dict[str, object]) -> None:
    async def scenario() -> None:
        async with running_app() as app:
            engine = engine_of(app)
            await engine.pause("the test")
            exchange = post(app, path, body)
            await until(engine, lambda state: state.num_waiting == (2 if "prompt" in body else 1))
            exchange.leave()
            await exchange.end()
            await until(engine, lambda state: not state.sequences)
            await engine.resume()
            assert engine.state.step == 0
            assert engine.state.counters.generation_tokens == 0
            assert_nothing_is_held(engine)

    asyncio.run(scenario())


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_client_that_is_gone_before_the_engine_answers_is_never_scheduled(
    path: str, body: dict[str, object]
) -> None:  # fmt: skip
    async def scenario() -> None:
        gate = Gate()
        async with running_app(before_step=gate.before_step) as app:
            engine = engine_of(app)
            other = post(app, "/v1/completions", {"prompt": "other", "max_tokens": 2})
            await until(engine, lambda state: state.num_waiting == 1)  # the engine thread is inside step 1 now
            exchange = post(app, path, body)
            exchange.leave()
            await exchange.end()  # its add and its abort are both in the inbox
            gate.allow(2)
            await other.end()
            assert other.status == 200
            await until(engine, lambda state: not state.sequences)
            assert engine.state.counters.generation_tokens == 2
            assert_nothing_is_held(engine)

    asyncio.run(scenario())


def test_a_preempted_request_can_be_left() -> None:
    async def scenario() -> None:
        async with running_app(num_blocks=8) as app:
            engine = engine_of(app)
            await engine.pause("the test")
            exchanges = [post(app, "/v1/completions", {"prompt": letter * 40, "max_tokens": 60}) for letter in "ab"]
            await until(engine, lambda state: state.num_waiting == 2)
            while not engine.state.counters.num_preemptions:
                await engine.step(1)
            preempted = next(s for s in engine.state.sequences.values() if s.status == "PREEMPTED")
            assert preempted.num_prompt_tokens == 40
            for exchange in exchanges:
                exchange.leave()
                await exchange.end()
            await until(engine, lambda state: not state.sequences)
            assert_nothing_is_held(engine)
            await engine.resume()

    asyncio.run(scenario())


def test_a_client_that_leaves_within_its_body_costs_nothing() -> None:
    async def scenario() -> None:
        async with running_app() as app:
            headers = {"content-type": "application/json"}
            exchange = Exchange(app, "POST", "/v1/completions", headers).start().send_body(b'{"prompt"', more=True)
            exchange.leave()
            await exchange.end()
            assert exchange.status is None
            assert engine_of(app).state.counters.num_requests == 0

    asyncio.run(scenario())


def test_a_stream_that_the_server_cuts_off_is_aborted_too() -> None:
    async def scenario() -> None:
        gate = Gate()
        async with running_app(before_step=gate.before_step) as app:
            engine = engine_of(app)
            exchange = post(app, "/v1/chat/completions", {**CHAT, "stream": True})
            gate.allow(3)
            await until(engine, lambda state: state.step == 3)
            assert exchange.task is not None
            exchange.task.cancel()  # what a server does at the end of its patience
            with pytest.raises(asyncio.CancelledError):
                await exchange.task
            gate.allow(1)
            await until(engine, lambda state: not state.sequences)
            assert engine.state.counters.finished == {"abort": 1}

    asyncio.run(scenario())


def test_an_answer_that_is_read_to_its_end_aborts_nothing() -> None:
    async def scenario() -> None:
        async with running_app() as app:
            engine = engine_of(app)
            for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)):
                for stream in (False, True):
                    exchange = await post(app, path, {**body, "max_tokens": 3, "stream": stream}).end()
                    assert exchange.status == 200
            assert engine.state.counters.finished == {"length": 10}

    asyncio.run(scenario())
