"""Two living requests never share an id, and a refused one never ends the other."""

from __future__ import annotations

import asyncio
import threading

from engine.core.batch import Batch
from tests.helpers.live_app import post, running_app


def test_an_id_that_is_alive_is_refused_and_its_owner_goes_on() -> None:
    async def scenario() -> None:
        permits = threading.Semaphore(0)

        def before_step(batch: Batch) -> None:
            assert permits.acquire(timeout=30)

        async with running_app(before_step=before_step) as app:
            body = {"prompt": "hello", "max_tokens": 3, "request_id": "mine"}
            first = post(app, "/v1/completions", body)
            added = asyncio.Event()
            app.state.ctx.async_engine.add_listener(lambda records: added.set())
            await asyncio.wait_for(added.wait(), 30)
            second = await post(app, "/v1/completions", body).end()
            assert second.status == 400
            assert second.json()["error"]["param"] == "request_id"
            permits.release(100)
            await first.end()
            assert first.json()["usage"]["completion_tokens"] == 3
            assert (await post(app, "/v1/completions", body).end()).status == 200

    asyncio.run(scenario())


def test_two_at_the_same_moment_are_one_and_one_refusal() -> None:
    async def scenario() -> None:
        async with running_app() as app:
            body = {"prompt": "hello", "max_tokens": 3, "request_id": "mine"}
            exchanges = [post(app, "/v1/completions", body) for _ in range(5)]
            for exchange in exchanges:
                await exchange.end()
            statuses = [exchange.status for exchange in exchanges]
            assert set(statuses) <= {200, 400}
            assert 200 in statuses
            ends = [e.json()["choices"][0]["finish_reason"] for e in exchanges if e.status == 200]
            assert set(ends) == {"length"}

    asyncio.run(scenario())
