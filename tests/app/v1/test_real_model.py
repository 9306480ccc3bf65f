"""The API on the embedded model, as the `openai` client and its users see it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema_rs
import pytest
from openai import OpenAI

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.engine import Engine
from tests.helpers.live_app import serve

pytestmark = [pytest.mark.model, pytest.mark.slow]

MESSAGES = [{"role": "user", "content": "Say hello with an emoji, then count to five in Japanese."}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "sights": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
    },
    "required": ["city", "population", "sights"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    # float32: whatever shares the batch, the tokens are the same
    config = EngineConfig(dtype="float32", num_kv_blocks=256, threads=2, max_model_len=1024)
    with (
        serve(engine=AsyncEngine(Engine.from_config(config))) as live,
        OpenAI(base_url=f"{live.address}/v1", api_key="none", max_retries=0, timeout=300) as client,
    ):
        yield client


@pytest.mark.parametrize("stop", [None, ["\n", "five"]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stream_adds_up_to_the_answer(client: OpenAI, temperature: float, stop: list[str] | None) -> None:
    options = {
        "model": "", "messages": MESSAGES, "max_tokens": 40, "temperature": temperature, "seed": 7, "stop": stop,
    }  # fmt: skip
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**options, stream=True))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


def test_every_api_says_the_same(client: OpenAI) -> None:
    chat = client.chat.completions.create(model="", messages=MESSAGES, max_tokens=20, temperature=0)  # type: ignore[arg-type]
    response = client.responses.create(
        model="", input=MESSAGES[0]["content"], max_output_tokens=20, temperature=0,
        instructions=None,
    )  # fmt: skip
    message = client.post(
        "/messages", cast_to=object, body={"messages": MESSAGES, "max_tokens": 20, "temperature": 0}
    )  # fmt: skip
    text = chat.choices[0].message.content
    assert text
    assert response.output_text == text
    assert message["content"][0]["text"] == text  # type: ignore[index]


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_at_temperature_one(client: OpenAI, stream: bool) -> None:
    answer = client.chat.completions.create(
        model="", messages=[{"role": "user", "content": "Describe Prague as JSON."}], max_tokens=200, seed=3, n=3,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}, stream=stream,
    )  # fmt: skip
    texts, reasons = dict.fromkeys(range(3), ""), {}
    for part in answer if stream else [answer]:
        for choice in part.choices:  # type: ignore[union-attr]
            texts[choice.index] += (choice.delta if stream else choice.message).content or ""  # type: ignore[union-attr]
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    for index, text in texts.items():
        if reasons[index] == "stop":
            assert jsonschema_rs.is_valid(SCHEMA, json.loads(text)), text
        else:
            assert reasons[index] == "length"
    assert len(set(texts.values())) == 3


def test_echoed_log_probabilities_are_those_of_the_same_text_generated(client: OpenAI) -> None:
    prompt = "The capital of France is"
    made = client.completions.create(model="", prompt=prompt, max_tokens=8, temperature=0, logprobs=1)
    first, logprobs = made.choices[0], made.choices[0].logprobs
    assert logprobs is not None
    scored = client.completions.create(
        model="", prompt=prompt + first.text, max_tokens=0, echo=True, logprobs=1,
        extra_body={"add_special_tokens": False},
    ).choices[0].logprobs  # fmt: skip
    assert scored is not None
    assert scored.tokens is not None
    assert scored.token_logprobs is not None
    assert "".join(scored.tokens) == prompt + first.text
    assert scored.token_logprobs[-8:] == pytest.approx(logprobs.token_logprobs, abs=2e-3)


def test_bad_words_and_allowed_tokens_hold(client: OpenAI) -> None:
    prompt = "The capital of France is"
    free = client.completions.create(model="", prompt=prompt, max_tokens=12, temperature=0).choices[0].text
    assert "Paris" in free
    banned = client.completions.create(
        model="", prompt=prompt, max_tokens=12, temperature=0, extra_body={"bad_words": ["Paris"]}
    ).choices[0]
    assert "Paris" not in banned.text
    allowed = client.completions.create(
        model="", prompt=prompt, max_tokens=6, extra_body={"allowed_token_ids": [28, 30, 33], "return_token_ids": True}
    ).choices[0]
    assert allowed.model_extra is not None
    assert set(allowed.model_extra["token_ids"]) <= {28, 30, 33}
