"""The chat's API: texts that outlive their connection, arrive once and in order, and only at their owner."""

from __future__ import annotations

import threading

import pytest
from starlette.applications import Starlette

from app.context import AppContext
from engine.core.batch import Batch
from engine.sampling_params import SamplingParams
from tests.app.chat.client import ME, OTHER, Page, ask, read, run, stream_of, try_ask
from tests.helpers.engines import make_request
from tests.helpers.live_app import request


def test_an_answer_streams_to_its_browser_with_the_engine_s_own_counts() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        async with stream_of(app) as stream:
            assert (stream.status, stream.headers["cache-control"]) == (200, "no-store")
            answer = await ask(app)
            page, key = Page(stream), answer["generation_id"]
            end = await page.read("done", key)
            assert page.kinds(key)[0] == "snapshot"
            assert end["finish_reason"] == "length"
            assert end["error"] is None
            assert end["stats"]["num_output_tokens"] == 12
            assert end["stats"]["num_prompt_tokens"] == answer["num_prompt_tokens"]
            assert end["stats"]["ttft_s"] > 0
            whole = await read(app, key)
            assert (whole["text"], whole["status"], whole["offset"]) == (page.generations[key]["text"], "done", 12)
            assert whole["stats"] == end["stats"]

    run(test)


def test_the_first_token_is_not_held_back_by_the_pace_of_the_stream() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        ctx.console.chat_streams._frame_interval_s = 3600.0
        engine = ctx.async_engine
        await engine.pause("a look")
        async with stream_of(app) as stream:
            key = (await ask(app))["generation_id"]
            page = Page(stream)
            await page.read("snapshot", key)
            await engine.step(1)
            delta = await page.read("delta", key)
            assert (delta["offset"], len(delta["text"])) == (0, 1)
            await engine.resume()

    run(test)


def test_a_generation_outlives_its_stream_and_a_new_one_goes_on_where_it_is() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        engine = ctx.async_engine
        await engine.pause("a look")
        async with stream_of(app) as stream:
            key = (await ask(app))["generation_id"]
            await engine.step(3)
            page = Page(stream)
            await page.read("delta", key)
        await engine.step(3)  # nobody watches
        async with stream_of(app) as stream:
            page = Page(stream)
            snapshot = await page.read("snapshot", key)
            assert (snapshot["offset"], snapshot["status"], snapshot["num_output_tokens"]) == (6, "running", 6)
            await engine.resume()
            await page.read("done", key)
            assert page.generations[key]["text"] == (await read(app, key))["text"]
            assert page.generations[key]["offset"] == 12
        async with stream_of(app) as stream:
            snapshot = await Page(stream).read("snapshot", key)
            assert (snapshot["status"], snapshot["finish_reason"], len(snapshot["text"])) == ("done", "length", 12)
            assert snapshot["stats"]["num_output_tokens"] == 12

    run(test)


def test_a_stream_that_comes_before_the_first_token_gets_everything() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        await ctx.async_engine.pause("a look")
        key = (await ask(app))["generation_id"]
        async with stream_of(app) as stream:
            page = Page(stream)
            snapshot = await page.read("snapshot", key)
            assert (snapshot["text"], snapshot["offset"], snapshot["status"]) == ("", 0, "queued")
            assert snapshot["detail"] == "waits: the engine is paused"
            await ctx.async_engine.resume()
            await page.read("done", key)
            assert len(page.generations[key]["text"]) == 12

    run(test)


def test_many_chats_share_one_stream_and_never_mix() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        async with stream_of(app) as stream:
            answers = [await ask(app, f"chat number {i}", max_tokens=20 + i) for i in range(8)]
            page = Page(stream)
            for answer in answers:
                key = answer["generation_id"]
                if page.generations.get(key, {}).get("finish_reason") is None:
                    await page.read("done", key)
            texts = {page.generations[a["generation_id"]]["text"] for a in answers}
            assert len(texts) == 8
            for answer in answers:
                key = answer["generation_id"]
                assert page.generations[key]["text"] == (await read(app, key))["text"]

    run(test, num_blocks=16)


def test_text_goes_to_the_stream_of_its_own_browser_only() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        async with stream_of(app) as mine, stream_of(app, OTHER) as theirs:
            first = await ask(app)
            second = await ask(app, client_id=OTHER)
            page = Page(theirs)
            await page.read("done", second["generation_id"])
            assert set(page.generations) == {second["generation_id"]}
            await Page(mine).read("done", first["generation_id"])

    run(test)


def test_the_id_that_others_see_does_not_open_the_text() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        await ctx.async_engine.pause("a look")
        answer = await ask(app)
        rows = [s.request_id for s in ctx.async_engine.state.sequences.values()]
        assert rows == [answer["request_id"]]
        exchange = await request(app, "GET", f"/chat/api/generations/{answer['request_id']}")
        assert exchange.status == 404
        await ctx.async_engine.resume()

    run(test)


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_stop_frees_the_blocks_at_once_and_its_receipt_is_the_same_again(steps: int) -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        engine = ctx.async_engine
        await engine.pause("a look")
        async with stream_of(app) as stream:
            key = (await ask(app, "hello " * 10))["generation_id"]
            if steps:
                await engine.step(steps)
            exchange = await request(app, "DELETE", f"/chat/api/generations/{key}")
            receipt = exchange.json()
            assert (receipt["state"], receipt["step"], receipt["output_tokens"]) == ("aborted", steps, steps)
            assert (receipt["blocks_freed"] > 0) == (steps > 0)
            assert (len(engine.state.sequences), engine.state.block_counts["used"]) == (0, 0)
            end = await Page(stream).read("done", key)
            assert end["finish_reason"] == "abort"
            assert end["stats"]["num_output_tokens"] == steps
        again = await request(app, "DELETE", f"/chat/api/generations/{key}")
        assert again.json() == receipt
        assert (await read(app, key))["status"] == "done"

    run(test)


def test_stop_after_the_end_says_how_it_ended() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        async with stream_of(app) as stream:
            key = (await ask(app))["generation_id"]
            await Page(stream).read("done", key)
        exchange = await request(app, "DELETE", f"/chat/api/generations/{key}")
        assert (exchange.status, exchange.json()["state"]) == (200, "finished:length")

    run(test)


class Gate:
    """Lets the engine run as many steps as it was given."""

    def __init__(self) -> None:
        self.steps = threading.Semaphore(0)

    def wait(self, batch: Batch) -> None:
        assert self.steps.acquire(timeout=20)


def test_queued_says_why_in_words_and_numbers() -> None:
    gate = Gate()

    async def test(app: Starlette, ctx: AppContext) -> None:
        await ctx.async_engine.pause("a look")
        async with stream_of(app) as stream:
            page = Page(stream)
            keys = [(await ask(app, f"number {i}"))["generation_id"] for i in range(3)]
            for key in keys:
                assert (await page.read("snapshot", key))["detail"] == "waits: the engine is paused"
            await ctx.async_engine.resume()
            gate.steps.release()
            while page.generations[keys[1]]["detail"] != "waits: needs 1 sequence slot, 0 free of max_num_seqs":
                await page.read("status", keys[1])
            assert page.generations[keys[1]]["why"]["constraint"] == "slots"
            while page.generations[keys[2]]["detail"] != "waits: 1 in front of it":
                await page.read("status", keys[2])
            assert page.generations[keys[2]]["why"]["constraint"] == "behind"
            gate.steps.release(100)
            for key in keys:
                if page.generations[key]["finish_reason"] is None:
                    await page.read("done", key)

    run(test, max_num_seqs=1, before_step=gate.wait)


def test_a_long_prefill_says_how_far_it_is() -> None:
    gate = Gate()

    async def test(app: Starlette, ctx: AppContext) -> None:
        async with stream_of(app) as stream:
            page = Page(stream)
            answer = await ask(app, "x" * 90)
            gate.steps.release()
            while page.generations.get(answer["generation_id"], {}).get("status") != "prefilling":
                await page.read("status", answer["generation_id"])
            detail = page.generations[answer["generation_id"]]["detail"]
            assert detail == f"32 of {answer['num_prompt_tokens']} tokens computed"
            gate.steps.release(100)
            await page.read("done", answer["generation_id"])

    run(test, max_num_batched_tokens=32, before_step=gate.wait)


def test_a_preemption_has_a_receipt_that_says_when_for_whom_and_what_it_costs() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        engine = ctx.async_engine
        async with stream_of(app) as stream:
            page = Page(stream)
            await engine.pause("a look")
            first = await engine.submit(make_request("r-1", 90, max_tokens=40))
            key = (await ask(app, "x" * 60, max_tokens=40))["generation_id"]
            while engine.state.counters.num_preemptions == 0:
                await engine.step(1)
            told = await page.read("status", key)
            while told["status"] != "preempted":
                told = await page.read("status", key)
            receipt = told["receipt"]
            assert receipt == {
                "step": engine.state.step, "by": "r-1", "by_source": "v1", "blocks": receipt["blocks"],
                "tokens": receipt["tokens"],
            }  # fmt: skip
            assert receipt["blocks"] >= 5
            assert receipt["tokens"] >= 60
            assert told["detail"].startswith(
                f"preempted at step {receipt['step']} for r-1: {receipt['blocks']} blocks freed, "
                f"{receipt['tokens']} tokens to compute again; "
            )
            await engine.resume()
            end = await page.read("done", key)
            assert end["preemptions"] == [receipt]
            assert end["stats"]["num_preemptions"] == 1
            assert end["finish_reason"] == "length"
            async for _ in first:
                pass

    run(test, num_blocks=12, watermark=0.0)


def test_a_conversation_that_is_too_long_is_refused_with_the_numbers() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        exchange = await try_ask(app, "x" * 400)
        assert exchange.status == 400
        error = exchange.json()["error"]
        assert (error["code"], error["param"], error["max_context"]) == ("context_length_exceeded", "messages", 128)
        assert error["num_prompt_tokens"] > 400
        body = {"messages": [{"role": "user", "content": "x" * 400}]}
        counted = (await request(app, "POST", "/chat/api/tokenize", body)).json()
        assert counted == {"num_prompt_tokens": error["num_prompt_tokens"], "max_context": 128}

    run(test, num_blocks=8)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "client_id"),
        ({"client_id": "short", "messages": []}, "client_id"),
        ({"client_id": "with space in it", "messages": []}, "client_id"),
        ({"client_id": ME + "\n", "messages": []}, "client_id"),
        ({"client_id": ME}, "messages"),
        ({"client_id": ME, "messages": "hello"}, "messages"),
        ({"client_id": ME, "messages": [3]}, "messages"),
        ({"client_id": ME, "messages": [{"role": "user", "content": "a"}], "params": []}, "params"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_field(body: dict[str, object], param: str) -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        exchange = await request(app, "POST", "/chat/api/generations", body)
        assert (exchange.status, exchange.json()["error"]["param"]) == (400, param)
        assert not ctx.async_engine.state.sequences

    run(test)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 3), ("top_p", 0), ("max_tokens", 0), ("stop", [""]), ("seed", 1.5), ("top_k", -2), ("min_p", "1")],
)
def test_a_bad_parameter_is_a_400_that_names_it(name: str, value: object) -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        exchange = await try_ask(app, **{name: value})
        assert (exchange.status, exchange.json()["error"]["param"]) == (400, name)
        assert ctx.console.generations.of_client(ME) == []

    run(test)


@pytest.mark.parametrize(
    "query", ["", "?client_id=", "?client_id=a", "?client_id=a/../../../b", "?client_id=" + "x" * 65]
)
def test_a_stream_needs_a_client_id(query: str) -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        exchange = await request(app, "GET", f"/chat/api/stream{query}")
        assert (exchange.status, exchange.json()["error"]["param"]) == (400, "client_id")

    run(test)


def test_an_unknown_generation_is_a_404() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        for method in ("GET", "DELETE"):
            assert (await request(app, method, "/chat/api/generations/nothing")).status == 404

    run(test)


def test_a_full_queue_is_a_503_and_leaves_nothing_behind() -> None:
    async def test(app: Starlette, ctx: AppContext) -> None:
        await ctx.async_engine.pause("a look")
        await ask(app)
        exchange = await try_ask(app)
        assert (exchange.status, exchange.json()["error"]["code"]) == (503, "queue_full")
        assert len(ctx.console.generations.of_client(ME)) == 1
        await ctx.async_engine.resume()

    run(test, max_num_queued_reqs=1)


def test_a_dead_engine_ends_the_answer_with_its_error_and_keeps_the_text() -> None:
    def fail(batch: Batch) -> None:
        if batch.step == 4:
            raise RuntimeError("the lights went out")

    async def test(app: Starlette, ctx: AppContext) -> None:
        async with stream_of(app) as stream:
            key = (await ask(app))["generation_id"]
            page = Page(stream)
            end = await page.read("done", key)
            assert end["finish_reason"] == "error"
            assert "the lights went out" in end["error"]
            assert len(page.generations[key]["text"]) == 3

    run(test, before_step=fail)


def test_characters_of_several_bytes_and_units_are_counted_as_code_points() -> None:
    text = "naïve 🙂 日本語 🇫🇷 e\u0301"
    data = text.encode()
    num_prompt_tokens = 0

    def spell(token_ids: list[int], params: SamplingParams) -> int:
        """One byte after the other: a character is whole only after its last."""
        return data[len(token_ids) - num_prompt_tokens]

    async def test(app: Starlette, ctx: AppContext) -> None:
        async with stream_of(app) as stream:
            body = {"messages": [{"role": "user", "content": "hello"}]}
            nonlocal num_prompt_tokens
            num_prompt_tokens = (await request(app, "POST", "/chat/api/tokenize", body)).json()["num_prompt_tokens"]
            key = (await ask(app, max_tokens=len(data)))["generation_id"]
            page = Page(stream)
            await page.read("done", key)
            assert page.generations[key]["text"] == text

    run(test, choose=spell)
