"""Anthropic's Messages API: objects, events and errors as its clients read them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from engine.core.batch import Batch
from engine.sampling_params import SamplingParams
from tests.helpers.fake_runner import expected_tokens
from tests.helpers.live_app import LiveApp, serve
from tests.helpers.tokenizers import byte_tokenizer

GREEDY = SamplingParams(temperature=0.0)
HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}


def said(text: str, num_tokens: int) -> str:
    prompt = byte_tokenizer().encode(text, add_special_tokens=False)
    return bytes(expected_tokens(prompt, GREEDY, num_tokens)).decode()


HELLO_PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def create(live: LiveApp, body: dict[str, object]) -> dict[str, Any]:
    answer = httpx.post(f"{live.address}/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    value: dict[str, Any] = answer.json()
    return value


def events(live: LiveApp, body: dict[str, object]) -> list[dict[str, Any]]:
    text = httpx.post(f"{live.address}/v1/messages", json={**body, "stream": True}).text
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found


def test_a_message_is_answered(live: LiveApp) -> None:
    answer = create(live, HELLO)
    assert answer["type"] == "message"
    assert answer["role"] == "assistant"
    assert answer["content"] == [{"type": "text", "text": said(HELLO_PROMPT, 6)}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    usage = answer["usage"]
    assert usage["output_tokens"] == 6
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(
        byte_tokenizer().encode(HELLO_PROMPT, add_special_tokens=False)
    )


@pytest.mark.parametrize("system", ["be short", [{"type": "text", "text": "be"}, {"type": "text", "text": "short"}]])
def test_a_system_prompt_comes_first(live: LiveApp, system: object) -> None:
    text = "be short" if isinstance(system, str) else "be\nshort"
    answer = create(live, {**HELLO, "system": system})
    assert answer["content"][0]["text"] == said(f"<|im_start|>system\n{text}<|im_end|>\n{HELLO_PROMPT}", 6)


def test_an_assistants_last_message_is_gone_on_with(live: LiveApp) -> None:
    messages = [*HELLO["messages"], {"role": "assistant", "content": "I say"}]  # type: ignore[misc]
    answer = create(live, {**HELLO, "messages": messages})
    assert answer["content"][0]["text"] == said(HELLO_PROMPT + "I say", 6)


def test_a_stop_sequence_is_named(live: LiveApp) -> None:
    full = said(HELLO_PROMPT, 6)
    answer = create(live, {**HELLO, "stop_sequences": ["nowhere", full[3]]})
    assert answer["content"][0]["text"] == full[: full.index(full[3])]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", full[3])


def test_an_end_of_its_own_is_the_end_of_the_turn(live: LiveApp) -> None:
    answer = create(live, {**HELLO, "max_tokens": 50, "guided_choice": ["done"]})
    assert (answer["content"][0]["text"], answer["stop_reason"]) == ("done", "end_turn")


def test_a_stream_tells_the_same_in_anthropics_order(live: LiveApp) -> None:
    whole, told = create(live, HELLO), events(live, HELLO)
    kinds = list(dict.fromkeys(event["type"] for event in told))
    assert kinds == [
        "message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop",
    ]  # fmt: skip
    assert told[0]["message"]["content"] == []
    assert told[0]["message"]["stop_reason"] is None
    deltas = [event["delta"]["text"] for event in told if event["type"] == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"]
    assert told[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] == 6


def test_tokens_are_counted_without_an_answer(live: LiveApp) -> None:
    body = {"model": "fake", "messages": HELLO["messages"]}
    answer = httpx.post(f"{live.address}/v1/messages/count_tokens", json=body).json()
    assert answer == {"input_tokens": len(byte_tokenizer().encode(HELLO_PROMPT, add_special_tokens=False))}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"messages": HELLO["messages"]}, 400, "max_tokens"),
        ({**HELLO, "model": "claude"}, 404, "model"),
        ({**HELLO, "temperature": 9}, 400, "temperature"),
        ({**HELLO, "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}, 400, "tool_choice"),
    ],
)
def test_errors_have_anthropics_type_around_them(
    live: LiveApp, body: dict[str, object], status: int, param: str
) -> None:  # fmt: skip
    answer = httpx.post(f"{live.address}/v1/messages", json=body)
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["param"] == param


def test_a_request_that_fails_within_a_stream_says_so() -> None:
    def fail(batch: Batch) -> None:
        if batch.step == 3:
            raise RuntimeError("the test breaks the engine")

    with serve(before_step=fail) as live:
        told = events(live, HELLO)
    assert told[-1]["type"] == "error"
    assert "dead" in told[-1]["error"]["message"]
