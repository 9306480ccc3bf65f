"""Structured output as clients ask for it: the openai client's ways and vLLM's fields, streaming and not."""

from __future__ import annotations

import json
import re
import threading

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from engine.sampling_params import StructuredSpec
from engine.structured.grammars import Grammar
from tests.app.v1.fake_answers import MESSAGES
from tests.helpers.live_app import LiveApp


class Person(BaseModel):
    """A schema as the openai client makes it of a model."""

    model_config = ConfigDict(extra="forbid")
    is_tall: bool
    age: int


def text_of(client: OpenAI, *, stream: bool, **options: object) -> tuple[str, str]:
    """(text, finish reason) of a chat."""
    defaults = {"model": "fake", "messages": MESSAGES, "temperature": 0, "max_tokens": 400}
    answer = client.chat.completions.create(**defaults | options, stream=stream)  # type: ignore[call-overload]
    text, reason = "", ""
    for part in answer if stream else [answer]:
        for choice in part.choices:
            text += (choice.delta if stream else choice.message).content or ""
            reason = choice.finish_reason or reason
    return text, reason


def schema_format(schema: dict[str, object]) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_schema_is_obeyed(client: OpenAI, stream: bool) -> None:
    form = schema_format(Person.model_json_schema())
    text, reason = text_of(client, stream=stream, response_format=form)
    if reason == "stop":
        Person.model_validate_json(text)
    else:
        assert reason == "length"


def test_the_clients_own_parsing_finds_its_model(client: OpenAI) -> None:
    class Choice(BaseModel):
        model_config = ConfigDict(extra="forbid")
        is_tall: bool

    answer = client.chat.completions.parse(
        model="fake", messages=MESSAGES, response_format=Choice, temperature=0, max_tokens=200  # type: ignore[arg-type]
    )  # fmt: skip
    assert isinstance(answer.choices[0].message.parsed, Choice)


@pytest.mark.parametrize("stream", [False, True])
def test_a_json_object_begins_as_one(client: OpenAI, stream: bool) -> None:
    text, reason = text_of(client, stream=stream, response_format={"type": "json_object"}, max_tokens=60)
    assert text.startswith("{")
    if reason == "stop":
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}[0-9]"}, "[a-c]{3}[0-9]"),
        ({"structured_outputs": {"regex": "[a-c]{3}[0-9]"}}, "[a-c]{3}[0-9]"),
        ({"guided_choice": ["yes", "no", "😀"]}, "yes|no|😀"),
        ({"structured_outputs": {"choice": ["yes", "no", "日本"]}}, "yes|no|日本"),
        ({"guided_grammar": 'root ::= "<" [xy] ">"'}, "<[xy]>"),
        ({"structured_outputs": {"grammar": 'start: "<" /[xy]/ ">"'}}, "<[xy]>"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"structured_outputs": {"json": {"enum": ["a", 7]}}}, '"a"|7'),
        ({"response_format": {"type": "text"}, "guided_choice": ["one"]}, "one"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_every_way_to_ask_is_obeyed(client: OpenAI, field: dict[str, object], pattern: str, stream: bool) -> None:
    text, reason = text_of(client, stream=stream, extra_body=field)
    assert re.fullmatch(pattern, text)
    assert reason == "stop"


def test_completions_take_the_same_fields(live: LiveApp) -> None:
    for field in ({"guided_choice": ["left", "right"]}, {"response_format": schema_format({"enum": ["left"]})}):
        body = {"prompt": ["a", "b"], "max_tokens": 40, "n": 2, **field}
        choices = httpx.post(f"{live.address}/v1/completions", json=body).json()["choices"]
        assert len(choices) == 4
        assert {choice["text"].strip('"') for choice in choices} <= {"left", "right"}
        assert {choice["finish_reason"] for choice in choices} == {"stop"}


def test_the_other_apis_take_them_too(live: LiveApp) -> None:
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "boolean"}}}
    answer = httpx.post(f"{live.address}/v1/responses", json={"input": "a", "text": form}).json()
    assert answer["output"][0]["content"][0]["text"] in ("true", "false")
    assert answer["text"]["format"]["schema"] == {"type": "boolean"}
    body = {"messages": MESSAGES, "max_tokens": 20, "guided_choice": ["one"]}
    assert httpx.post(f"{live.address}/v1/messages", json=body).json()["content"][0]["text"] == "one"


def test_two_forms_at_once_are_refused(client: OpenAI) -> None:
    form = {"type": "json_object"}
    with pytest.raises(openai.BadRequestError) as refused:
        text_of(client, stream=False, response_format=form, extra_body={"guided_regex": "a"})
    assert refused.value.param == "guided_regex"


def test_a_schema_that_is_wrong_costs_its_own_request_only(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        text_of(client, stream=True, response_format=schema_format({"type": "nothing"}))
    assert refused.value.param == "response_format"
    assert text_of(client, stream=True, extra_body={"guided_choice": ["fine"]}) == ("fine", "stop")


def test_others_are_answered_while_a_schema_compiles(
    live: LiveApp, client: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    begun, may_end = threading.Event(), threading.Event()
    compile_spec = live.engine.grammars.compile

    def slow(spec: StructuredSpec) -> Grammar:
        if "slow" in spec.text:
            begun.set()
            assert may_end.wait(30)
        return compile_spec(spec)

    monkeypatch.setattr(live.engine.grammars, "compile", slow)
    texts: list[tuple[str, str]] = []
    waiting = threading.Thread(
        target=lambda: texts.append(text_of(client, stream=False, extra_body={"guided_choice": ["slow"]}))
    )
    waiting.start()
    try:
        assert begun.wait(30)
        assert text_of(client, stream=True, max_tokens=5)[1] == "length"
        assert text_of(client, stream=False, extra_body={"guided_choice": ["fast"]}) == ("fast", "stop")
        assert not texts
    finally:
        may_end.set()
        waiting.join(30)
    assert texts == [("slow", "stop")]


def test_the_clients_stream_helper_parses_what_it_gathered(client: OpenAI) -> None:
    class Choice(BaseModel):
        model_config = ConfigDict(extra="forbid")
        is_tall: bool

    with client.chat.completions.stream(
        model="fake", messages=MESSAGES, response_format=Choice, temperature=0, logprobs=True, top_logprobs=1  # type: ignore[arg-type]
    ) as stream:  # fmt: skip
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done", "logprobs.content.done"} <= kinds
    assert isinstance(final.choices[0].message.parsed, Choice)
