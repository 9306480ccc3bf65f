"""What a request leaves behind once it is over: nothing. Objects are counted, so it holds at any speed."""

from __future__ import annotations

import asyncio
import gc

from engine.async_engine import AsyncEngine
from tests.helpers.engines import make_async_engine, make_request
from tests.helpers.fake_runner import FakeRunner

WARM_UP = 1100  # more than the receipts and records that are kept
MEASURED = 400
SLACK = 200  # objects, half a one per request: the records that are kept are not all equally large


async def serve_one(engine: AsyncEngine, number: int) -> None:
    """A request like many others: most end by themselves, one in ten is aborted, one in ten has two sequences."""
    request = make_request(f"r{number}", [number % 250, 7, number // 250, 9], max_tokens=3, n=1 + (number % 10 == 1))
    stream = await engine.submit(request)
    if number % 10 == 2:
        await engine.abort(request.request_id)
    async for _ in stream:
        pass


async def serve_many(engine: AsyncEngine, first: int, count: int) -> int:
    """Run them eight at a time; returns how many objects there are afterwards."""
    for start in range(first, first + count, 8):
        await asyncio.gather(*(serve_one(engine, number) for number in range(start, start + 8)))
    runner = engine._engine._runner
    assert isinstance(runner, FakeRunner)
    runner.batches.clear()  # the test's own record
    gc.collect()
    return len(gc.get_objects())


def test_requests_leave_no_objects_behind() -> None:
    async def main() -> tuple[int, int]:
        engine = make_async_engine(num_blocks=64)
        await engine.start()
        try:
            before = await serve_many(engine, 0, WARM_UP)
            return before, await serve_many(engine, WARM_UP, MEASURED)
        finally:
            await engine.stop(timeout_s=0.0)

    before, after = asyncio.run(main())
    assert after - before < SLACK, f"{after - before} objects more after {MEASURED} requests"
