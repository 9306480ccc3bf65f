"""A client's own timeouts: in their range they hold, beyond it they cost that request a 400."""

from __future__ import annotations

import asyncio

import pytest

from engine.core.limits import MAX_TIMEOUT_S
from tests.helpers.live_app import post, running_app


@pytest.mark.parametrize("name", ["queue_timeout_s", "request_timeout_s"])
@pytest.mark.parametrize("seconds", [0, -1, 1.1e9, 1e10, 1e19, 1e308])
def test_a_timeout_out_of_range_is_refused_and_the_engine_lives(name: str, seconds: float) -> None:
    async def scenario() -> None:
        async with running_app() as app:
            refused = await post(app, "/v1/completions", {"prompt": "hi", "max_tokens": 2, name: seconds}).end()
            assert refused.status == 400
            assert refused.json()["error"]["param"] == name
            assert (await post(app, "/v1/completions", {"prompt": "hi", "max_tokens": 2}).end()).status == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["queue_timeout_s", "request_timeout_s"])
def test_the_longest_timeout_is_taken_while_the_engine_waits_for_it(name: str) -> None:
    async def scenario() -> None:
        async with running_app(max_num_seqs=1) as app:
            engine = app.state.ctx.async_engine
            await engine.pause("a test")  # the engine's thread sleeps until the deadline or the next command
            answer = post(app, "/v1/completions", {"prompt": "hi", "max_tokens": 2, name: MAX_TIMEOUT_S})
            await engine.abort("nobody")
            await engine.resume()
            await answer.end()
            assert answer.status == 200
            assert not engine.is_dead

    asyncio.run(scenario())
