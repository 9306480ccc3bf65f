"""The admin API over ASGI: reads that agree with the engine, actions that are applied when they answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

from app.settings import Settings
from engine.async_engine import AsyncEngine
from engine.request_stream import RequestStream
from tests.helpers.engines import make_request
from tests.helpers.live_app import Exchange, request, running_app

Test = Callable[[Starlette, AsyncEngine], Awaitable[None]]


def run(test: Test, settings: Settings | None = None, **engine_options: object) -> None:
    async def main() -> None:
        async with running_app(settings, **engine_options) as app:
            await test(app, app.state.ctx.async_engine)

    asyncio.run(main())


async def get(app: Starlette, path: str) -> Any:
    exchange = await request(app, "GET", f"/admin/api/{path}")
    assert exchange.status == 200, exchange.body
    return exchange.json()


async def post(app: Starlette, path: str, value: object = None) -> Exchange:
    return await request(app, "POST", f"/admin/api/{path}", value)


async def patch(app: Starlette, value: object, tag: str | None = '"1"', **more: Any) -> Exchange:
    headers = {} if tag is None else {"if_match": tag}
    return await request(app, "PATCH", "/admin/api/limits", value, **headers, **more)


async def drop(stream: RequestStream) -> None:
    async for _ in stream:
        pass


async def paused_with(app: Starlette, engine: AsyncEngine, *requests: Any) -> list[RequestStream]:
    assert (await post(app, "engine/pause", {"reason": "a look"})).status == 200
    return [await engine.submit(each) for each in requests]


def test_state_shows_rows_with_their_numbers_and_why_they_wait() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        long = make_request("r-1", 60, max_tokens=40, source="bench", priority=2)
        await paused_with(app, engine, long, make_request("r-2", 90), make_request("r-3", 9))
        await post(app, "engine/step", {"n": 2})
        state = await get(app, "state")
        assert (state["step"], state["paused"], state["pause_reason"], state["model"]) == (2, True, "a look", "fake")
        assert state["kv"] == {
            "block_size": 16, "num_blocks": 8, "num_usable_blocks": 8, "free": 4, "cached": 0, "used": 4, "shared": 0,
        }  # fmt: skip
        (running,), (second, third) = state["running"], state["waiting"]
        assert running["id"] == running["request_id"] == "r-1"
        assert (running["status"], running["source"], running["priority"]) == ("RUNNING", "bench", 2)
        assert (running["num_prompt_tokens"], running["num_output_tokens"]) == (60, 2)
        assert (running["num_computed_tokens"], running["num_cached_tokens"], running["num_preemptions"]) == (61, 0, 0)
        assert len(running["block_table"]) == running["num_blocks"] == 4
        assert running["age_s"] >= 0
        assert second["why"]["constraint"] == "blocks"
        assert (second["why"]["needed"], second["why"]["available"]) == (6, 4)
        assert third["why"] == {
            "constraint": "behind", "needed": None, "available": None, "watermark": None, "behind": "r-2",
        }  # fmt: skip
        assert state["counters"]["generation_tokens"] == 2
        assert state["limits"] == engine.state.limits.as_dict()

    run(test, num_blocks=8, watermark=0.0)


def test_blocks_name_owner_references_state_and_hash() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        prompt = list(range(40))
        await paused_with(app, engine, make_request("r-1", prompt), make_request("r-2", prompt))
        await post(app, "engine/step", {"n": 2})
        body = await get(app, "blocks")
        assert [b["id"] for b in body["blocks"]] == list(range(16))
        states = [b["state"] for b in body["blocks"]]
        assert {s: states.count(s) for s in ("free", "cached", "used", "shared")} == {
            s: body[s] for s in ("free", "cached", "used", "shared")
        }
        owned = {b["owner"] for b in body["blocks"] if b["ref_count"]}
        assert owned == {"r-1", "r-2"}
        sealed = next(b for b in body["blocks"] if b["hash"])
        assert sealed["ref_count"] == len(sealed["owners"]) >= 1

    run(test, num_blocks=16)


def test_steps_are_the_trace_s_records() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        await drop(await engine.submit(make_request("r-1", 20, max_tokens=5)))
        body = await get(app, "steps?from=2&limit=2")
        assert [s["step"] for s in body["steps"]] == [2, 3]
        assert (body["first_step"], body["last_step"]) == (1, 5)
        one = await get(app, "steps/1")
        assert one["num_prefill_tokens"] == 20
        assert one["changes"]["admitted"] == [
            {"seq_id": "r-1", "num_cached_tokens": 0, "num_known_tokens": 20, "is_resumed": False}
        ]
        assert "forward" in one["phases"]
        assert len((await get(app, "steps"))["steps"]) == 5
        missing = await request(app, "GET", "/admin/api/steps/99")
        assert missing.status == 404
        assert "kept are 1 to 5" in missing.json()["error"]["message"]

    run(test)


@pytest.mark.parametrize(
    "query", ["from=-1", "from=x", "limit=0", "limit=1001", "limit=1e3", "from=" + "9" * 99, "limit="]
)
def test_a_query_out_of_range_is_a_400_that_names_it(query: str) -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        exchange = await request(app, "GET", f"/admin/api/steps?{query}")
        assert exchange.status == 400
        assert exchange.json()["error"]["param"] == query.split("=")[0]

    run(test)


def test_info_tells_model_process_role_and_flags() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        body = await get(app, "info")
        assert body["model"]["name"] == "fake"
        assert body["model"]["block_size"] == 16
        assert (body["epoch"], body["role"]) == (engine.epoch, "admin")
        flags = {row["name"]: row for row in body["flags"]}
        assert set(flags["port"]) >= {"name", "value", "default", "help", "source"}

    run(test)


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_limits_are_flat_and_tagged() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        exchange = await request(app, "GET", "/admin/api/limits")
        assert list(exchange.json()) == [
            "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold",
            "max_prefill_tokens_while_decoding", "watermark", "num_usable_blocks", "max_num_queued_reqs",
            "queue_timeout_s", "request_timeout_s", "scheduling_policy",
        ]  # fmt: skip
        assert exchange.response_headers["etag"] == '"1"'

    run(test)


def test_a_patch_is_in_force_when_it_is_answered_and_moves_the_tag() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        exchange = await patch(app, {"max_num_seqs": 2, "queue_timeout_s": 1.5})
        assert exchange.status == 200
        assert exchange.response_headers["etag"] == '"2"'
        assert exchange.json()["max_num_seqs"] == 2
        assert (await get(app, "state"))["limits"]["queue_timeout_s"] == 1.5
        again = await patch(app, {"queue_timeout_s": None}, '"2"')
        assert again.json()["queue_timeout_s"] is None

    run(test)


def test_without_if_match_nothing_is_changed() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        exchange = await patch(app, {"max_num_seqs": 2}, None)
        assert exchange.status == 428
        assert exchange.json()["error"]["code"] == "precondition_required"
        assert engine.state.limits_version == 1

    run(test)


@pytest.mark.parametrize("tag", ['"7"', "1", '"x"', '""', "junk"])
def test_a_stale_tag_gets_the_current_values(tag: str) -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        await patch(app, {"max_num_seqs": 3})
        exchange = await patch(app, {"max_num_seqs": 2}, tag)
        assert exchange.status == 412
        assert exchange.response_headers["etag"] == '"2"'
        error = exchange.json()["error"]
        assert (error["code"], error["version"], error["current"]["max_num_seqs"]) == ("stale", 2, 3)
        assert engine.state.limits.max_num_seqs == 3

    run(test)


@pytest.mark.parametrize(
    ("changes", "param", "allowed"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs", ">= 1"),
        ({"max_num_seqs": "8"}, "max_num_seqs", "an integer"),
        ({"max_num_seqs": True}, "max_num_seqs", "an integer"),
        ({"num_usable_blocks": 65}, "num_usable_blocks", "<= 64"),
        ({"watermark": -0.1}, "watermark", ">= 0"),
        ({"queue_timeout_s": 0}, "queue_timeout_s", "> 0"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy", "fcfs or priority"),
        ({"scheduling_policy": ["fcfs"]}, "scheduling_policy", "fcfs or priority"),
        ({"max_num_seqs": 4, "no_such": 1}, "no_such", "max_num_seqs"),
        ({}, "limits", "at least one"),
    ],
)
def test_a_bad_limit_is_a_422_with_field_value_and_range_and_nothing_is_applied(
    changes: dict[str, object], param: str, allowed: str
) -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        before = engine.state.limits
        exchange = await patch(app, changes)
        assert exchange.status == 422
        error = exchange.json()["error"]
        assert error["param"] == param
        assert allowed in error["message"]
        assert engine.state.limits == before

    run(test)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b'{"max_num_seqs": NaN}', b"\xff", b"[" * 5000])
def test_a_bad_body_is_a_400_on_every_action(body: bytes) -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        kind = {"content_type": "application/json"}
        assert (await patch(app, None, body=body, **kind)).status == 400
        for path in ("engine/pause", *(("engine/step",) if body else ())):
            exchange = await request(app, "POST", f"/admin/api/{path}", body=body, **kind)
            assert exchange.status == 400, exchange.body
            assert exchange.json()["error"]["message"]

    run(test)


def test_the_table_says_where_each_value_is_from_and_what_is_allowed() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        await patch(app, {"max_num_seqs": 2})
        body = await get(app, "limits/table")
        rows = {row["name"]: row for row in body["limits"]}
        assert body["version"] == 2
        assert list(rows) == list(engine.state.limits.as_dict())
        seqs, usable = rows["max_num_seqs"], rows["num_usable_blocks"]
        assert (seqs["value"], seqs["start_value"], seqs["source"], seqs["low"]) == (2, 256, "runtime", 1)
        assert (usable["default"], usable["high"], usable["range"]) == (64, 64, "an integer >= 1 and <= 64")
        assert rows["watermark"]["source"] == "flag"
        assert rows["scheduling_policy"]["choices"] == ["fcfs", "priority"]
        assert all(row["help"] and row["takes_effect"] for row in rows.values())

    run(test, Settings(sources={"watermark": "flag"}))


# ---- actions ---------------------------------------------------------------------------------------------------------


def test_pause_step_and_resume() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        (stream,) = await paused_with(app, engine, make_request("r-1", 20, max_tokens=10))
        assert (await get(app, "state"))["paused"] is True
        one = (await post(app, "engine/step")).json()
        assert (one["ok"], one["step"], one["steps"]) == (True, 1, 1)
        three = (await post(app, "engine/step", {"n": 3})).json()
        assert (three["step"], three["steps"]) == (4, 3)
        assert (await get(app, "state"))["step"] == 4
        assert (await get(app, "state"))["running"][0]["num_output_tokens"] == 4
        rest = (await post(app, "engine/step", {"n": 100})).json()
        assert (rest["step"], rest["steps"]) == (10, 6)
        await drop(stream)
        assert (await post(app, "engine/resume")).json()["paused"] is False
        refused = await post(app, "engine/step", {"n": 1})
        assert (refused.status, refused.json()["error"]["code"]) == (409, "not_paused")

    run(test)


@pytest.mark.parametrize(
    "body", [{}, {"reason": ""}, {"reason": "  "}, {"reason": None}, {"reason": 3}, {"reason": "x" * 501}]
)
def test_pausing_everyone_needs_a_reason(body: dict[str, object]) -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        exchange = await post(app, "engine/pause", body)
        assert (exchange.status, exchange.json()["error"]["param"]) == (400, "reason")
        assert not engine.state.is_paused

    run(test)


@pytest.mark.parametrize("n", [0, -1, 10_001, 1.5, "1", True])
def test_step_takes_a_count(n: object) -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        exchange = await post(app, "engine/step", {"n": n})
        assert (exchange.status, exchange.json()["error"]["param"]) == (400, "n")

    run(test)


def test_abort_gives_a_receipt_and_the_blocks_back_and_can_be_asked_again() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        await paused_with(app, engine, make_request("r-1", 60, max_tokens=30))
        await post(app, "engine/step", {"n": 3})
        receipt = (await post(app, "requests/r-1/abort")).json()
        assert receipt == {
            "ok": True, "request_id": "r-1", "state": "aborted", "step": 3, "blocks_freed": 4, "output_tokens": 3,
        }  # fmt: skip
        state = await get(app, "state")
        assert (state["running"], state["kv"]["used"]) == ([], 0)
        assert (await post(app, "requests/r-1/abort")).json() == receipt
        assert (await post(app, "requests/nobody/abort")).json()["state"] == "unknown"

    run(test)


def test_reset_frees_the_cached_blocks() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        await drop(await engine.submit(make_request("r-1", 60)))
        cached = engine.state.block_counts["cached"]
        assert cached > 0
        assert (await post(app, "prefix-cache/reset")).json()["blocks_dropped"] == cached
        assert (await get(app, "state"))["kv"]["free"] == 64

    run(test)


def test_drain_refuses_new_work() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        assert (await post(app, "engine/drain")).json()["draining"] is True
        assert (await get(app, "state"))["draining"] is True
        with pytest.raises(Exception, match="no new requests"):
            await engine.submit(make_request("r-1"))

    run(test)


# ---- audit -----------------------------------------------------------------------------------------------------------


def test_every_action_is_audited_done_or_refused_newest_first() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        await post(app, "engine/pause", {"reason": " a look "})
        await post(app, "engine/step", {"n": 2})
        await post(app, "engine/resume")
        await post(app, "engine/step", {"n": 2})
        await patch(app, {"max_num_seqs": 2, "queue_timeout_s": 3})
        await patch(app, {"max_num_seqs": 0}, '"2"')
        await patch(app, {"max_num_seqs": 9}, '"1"')
        await post(app, "requests/r-9/abort")
        await post(app, "prefix-cache/reset")
        await post(app, "engine/drain")
        entries = (await get(app, "audit"))["entries"]
        told = [(e["action"], e["detail"], e["outcome"].split(":")[0]) for e in reversed(entries)]
        assert told == [
            ("pause", "a look", "ok"),
            ("step", "n = 2", "ok"),
            ("resume", "", "ok"),
            ("step", "n = 2", "refused (409)"),
            ("limits", "max_num_seqs 256 → 2, queue_timeout_s off → 3", "ok"),
            ("limits", "max_num_seqs 2 → 0", "refused (422)"),
            ("limits", "max_num_seqs 2 → 9", "refused (412)"),
            ("abort", "r-9", "ok"),
            ("prefix-cache reset", "", "ok"),
            ("drain", "", "ok"),
        ]
        assert all(e["role"] == "admin" and e["step"] == 0 and e["at"] > 1e9 for e in entries)
        assert len((await get(app, "audit?limit=3"))["entries"]) == 3

    run(test)


def test_the_audit_log_is_there_again_after_a_restart(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path / "data"))

    async def first(app: Starlette, engine: AsyncEngine) -> None:
        await post(app, "engine/pause", {"reason": "before the restart"})

    async def second(app: Starlette, engine: AsyncEngine) -> None:
        await post(app, "engine/resume")
        entries = (await get(app, "audit"))["entries"]
        assert [e["detail"] for e in entries] == ["", "before the restart"]

    run(first, settings)
    run(second, settings)
    assert (tmp_path / "data" / "audit.sqlite3").exists()


def test_state_is_json_that_a_strict_reader_takes() -> None:
    async def test(app: Starlette, engine: AsyncEngine) -> None:
        await paused_with(app, engine, make_request("r-1", 20, n=3), make_request("r-2", 20))
        await post(app, "engine/step")
        for path in ("state", "blocks", "steps", "info", "limits", "limits/table", "audit"):
            exchange = await request(app, "GET", f"/admin/api/{path}")
            json.loads(exchange.body, parse_constant=pytest.fail)

    run(test)
