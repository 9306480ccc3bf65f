"""The API's description holds what the server does: routes, roles, schemas, ranges and real answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import TypeAdapter

from app.access import Role
from app.reference import admin_answers, v1_answers
from app.reference.document import NOT_DESCRIBED, OPERATIONS, openapi_document, plain_path
from app.reference.operation import ErrorAnswer
from app.routes import ROUTES, route_table
from app.settings import Settings
from engine.async_engine import AsyncEngine
from engine.errors import InvalidValueError
from engine.sampling_params import SamplingParams
from tests.helpers.live_app import ADMIN, INFERENCE, KEYS, READ_ONLY, post, request, running_app

DOCUMENT: Any = openapi_document(route_table(is_loopback=False))
SCHEMAS: Any = DOCUMENT["components"]["schemas"]


def conforms(answer: type, body: bytes) -> Any:
    """The JSON of `body`, which `answer` allows."""
    TypeAdapter[Any](answer).validate_json(body)
    return json.loads(body)


def test_every_route_is_described_or_named_as_one_that_is_not() -> None:
    names = {row.name for row in ROUTES}
    assert set(OPERATIONS) | set(NOT_DESCRIBED) == names
    assert not set(OPERATIONS) & set(NOT_DESCRIBED)


def test_methods_paths_and_roles_are_those_of_the_table() -> None:
    described = {
        (path, method.upper(), entry["operationId"], entry["x-role"])
        for path, entries in DOCUMENT["paths"].items()
        for method, entry in entries.items()
    }
    assert described == {
        (plain_path(row.path), method, row.name, row.role.label)
        for row in route_table(is_loopback=False)
        if row.name in OPERATIONS
        for method in row.methods
    }
    assert all(
        (entry["security"] == []) == (entry["x-role"] == Role.OPEN.label)
        for entries in DOCUMENT["paths"].values()
        for entry in entries.values()
    )


def test_it_is_served_to_whoever_has_a_key() -> None:
    async def scenario() -> None:
        async with running_app(Settings(host="192.0.2.7", api_key=KEYS, allowed_hosts=("127.0.0.1",))) as app:
            assert (await request(app, "GET", "/openapi.json")).status == 401
            for key in (INFERENCE, READ_ONLY, ADMIN):
                answer = await request(app, "GET", "/openapi.json", authorization=f"Bearer {key}")
                assert answer.status == 200
                assert answer.json() == json.loads(json.dumps(DOCUMENT))

    asyncio.run(scenario())


def test_every_reference_leads_somewhere() -> None:
    found: list[str] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            found.extend([value["$ref"]] if isinstance(value.get("$ref"), str) else [])
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)

    walk(DOCUMENT)
    assert found
    assert {ref for ref in found if ref.removeprefix("#/components/schemas/") not in SCHEMAS} == set()


def test_every_field_of_a_request_is_explained() -> None:
    bodies = {name: schema for name, schema in SCHEMAS.items() if name.endswith("Body")}
    silent = [
        (name, field)
        for name, schema in bodies.items()
        for field, spec in schema.get("properties", {}).items()
        if not spec.get("description")
    ]
    assert len(bodies) >= 8
    assert silent == []


BOUNDS = [
    (field, keyword, option[keyword])
    for field, spec in SCHEMAS["ChatBody"]["properties"].items()
    if field in SamplingParams.__dataclass_fields__ and field != "logprobs"
    for option in spec.get("anyOf", [])
    for keyword in ("minimum", "exclusiveMinimum", "maximum")
    if keyword in option
]


@pytest.mark.parametrize(("field", "keyword", "bound"), BOUNDS)
def test_the_ranges_are_those_of_the_engine(field: str, keyword: str, bound: float) -> None:
    def is_taken(value: float) -> bool:
        try:
            SamplingParams(**{field: value}).validate(300)
        except InvalidValueError as error:
            return error.param != field
        return True

    step: float = 1 if isinstance(SCHEMAS["ChatBody"]["properties"][field].get("default"), int) else 0.001
    step = 1 if field in ("n", "top_k", "seed", "min_tokens", "max_tokens") else step
    outside = bound + step if keyword == "maximum" else bound - step
    assert is_taken(bound) == (keyword != "exclusiveMinimum")
    assert not is_taken(outside)


def test_there_are_ranges_to_hold_against_the_engine() -> None:
    assert {field for field, _, _ in BOUNDS} >= {"temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens"}


def test_real_answers_of_the_generation_routes_conform() -> None:
    async def scenario() -> None:
        async with running_app() as app:
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "n": 2, "logprobs": True,
                    "top_logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1,
                    "return_timings": True}  # fmt: skip
            text = {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 2, "return_token_ids": True, "echo": True,
                    "prompt_logprobs": 1, "return_timings": True}  # fmt: skip
            for path, body, whole, chunk in (
                ("/v1/chat/completions", chat, v1_answers.ChatCompletion, v1_answers.ChatChunk),
                ("/v1/completions", text, v1_answers.Completion, v1_answers.Completion),
            ):
                answer = await post(app, path, body).end()
                assert answer.status == 200, answer.body
                conforms(whole, answer.body)
                streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
                stream = await post(app, path, streamed).end()
                events = [line[6:] for line in stream.body.split(b"\n") if line.startswith(b"data: ")]
                assert events.pop() == b"[DONE]"
                assert len(events) > 4
                for event in events:
                    conforms(chunk, event)
                wrong = await post(app, path, {**body, "temperature": 9}).end()
                assert wrong.status == 400
                conforms(ErrorAnswer, wrong.body)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "body", "whole", "event", "error"),
    [
        ("/v1/responses",
         {"input": "hi", "max_output_tokens": 4, "include": ["message.output_text.logprobs"], "top_logprobs": 1},
         v1_answers.ResponseObject, v1_answers.ResponseEvent, ErrorAnswer),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
         v1_answers.Message, v1_answers.MessageEvent, v1_answers.MessageError),
    ],
)  # fmt: skip
def test_real_answers_of_responses_and_messages_conform(
    path: str, body: dict[str, object], whole: type, event: type, error: type
) -> None:
    async def scenario() -> None:
        async with running_app() as app:
            told = conforms(whole, (await post(app, path, {**body, "return_timings": True}).end()).body)
            assert "timings" in told
            stream = await post(app, path, {**body, "stream": True}).end()
            events = [line[6:] for line in stream.body.split(b"\n") if line.startswith(b"data: ")]
            assert len(events) > 6
            for data in events:
                conforms(event, data)
            wrong = await post(app, path, {**body, "temperature": 9}).end()
            assert wrong.status == 400
            conforms(error, wrong.body)

    asyncio.run(scenario())


async def has_waiting(engine: AsyncEngine, num: int) -> None:
    """Wait until so many sequences wait."""
    enough = asyncio.Event()

    def look(_: object) -> None:
        if engine.state.num_waiting >= num:
            enough.set()

    engine.add_listener(look)
    look(None)
    await enough.wait()
    engine.remove_listener(look)


def test_real_answers_of_the_admin_api_conform_while_there_is_work() -> None:
    async def scenario() -> None:
        async with running_app(num_blocks=8, max_num_seqs=1) as app:
            engine = app.state.ctx.async_engine
            answer = await request(app, "POST", "/admin/api/engine/pause", {"reason": "a test"})
            conforms(admin_answers.Done, answer.body)
            # Two that are told apart in the state: one runs after the first step, one waits.
            bodies = [{"prompt": "x" * 20, "max_tokens": 40, "ignore_eos": True} for _ in range(2)]
            waiting = [post(app, "/v1/completions", body) for body in bodies]
            await has_waiting(engine, len(waiting))
            answer = await request(app, "POST", "/admin/api/engine/step", {"n": 2})
            assert conforms(admin_answers.Stepped, answer.body)["steps"] == 2
            state = conforms(admin_answers.State, (await request(app, "GET", "/admin/api/state")).body)
            assert (len(state["running"]), len(state["waiting"])) == (1, 1)
            blocks = conforms(admin_answers.Blocks, (await request(app, "GET", "/admin/api/blocks")).body)
            assert len(blocks["blocks"]) == 8
            steps = conforms(admin_answers.Steps, (await request(app, "GET", "/admin/api/steps")).body)
            assert len(steps["steps"]) == 2
            profile = conforms(admin_answers.Phases, (await request(app, "GET", "/admin/api/phases")).body)
            assert profile["num_steps"] == 2
            conforms(admin_answers.Step, (await request(app, "GET", "/admin/api/steps/1")).body)
            for row in (*state["running"], *state["waiting"]):
                path = f"/admin/api/requests/{row['request_id']}"
                assert conforms(admin_answers.RequestHistory, (await request(app, "GET", path)).body)["is_live"]
                conforms(admin_answers.Receipt, (await request(app, "POST", f"{path}/abort")).body)
                assert not conforms(admin_answers.RequestHistory, (await request(app, "GET", path)).body)["is_live"]
            await request(app, "POST", "/admin/api/engine/resume")
            for exchange in waiting:
                await exchange.end()
            entries = conforms(admin_answers.Audit, (await request(app, "GET", "/admin/api/audit")).body)["entries"]
            assert len(entries) == 5

    asyncio.run(scenario())


@pytest.mark.parametrize("name", [name for name, operation in OPERATIONS.items() if operation.example])
def test_each_example_is_answered_with_success(name: str) -> None:
    operation = OPERATIONS[name]
    (row,) = [row for row in ROUTES if row.name == name]

    async def scenario() -> None:
        async with running_app() as app:
            if name == "step":
                await request(app, "POST", "/admin/api/engine/pause", {"reason": "a test"})
            headers = {p.name.replace("-", "_"): p.example for p in operation.parameters if p.where == "header"}
            example: Any = dict(operation.example or {})
            if name == "create_key":  # the first one must be an admin's
                _, text = await app.state.ctx.console.keys.create("me", Role.ADMIN)
                headers["authorization"] = f"Bearer {text}"
            if name == "detokenize":  # of a model with a larger vocabulary than the fake one's
                example["tokens"] = [72, 105]
            answer = await request(app, row.methods[0], row.path, example, **headers)
            assert answer.status == operation.status, answer.body

    asyncio.run(scenario())
