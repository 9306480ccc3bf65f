"""Tools on offer, as chat front ends send them with each message: the answer is text; a forced call is refused."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.app.v1.wrong_values import APIS
from tests.helpers.live_app import LiveApp

FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS = [{"type": "function", **FUNCTION}]
CLAUDE_TOOLS = [{"name": "f", "input_schema": {"type": "object"}}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"tools": CHAT_TOOLS}),
        (CHAT, {"tools": CHAT_TOOLS, "tool_choice": "auto", "parallel_tool_calls": True}),
        (CHAT, {"tools": CHAT_TOOLS, "tool_choice": "none"}),
        (CHAT, {"tools": CHAT_TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}),
        (CHAT, {"functions": [FUNCTION], "function_call": "auto"}),
        (RESPONSES, {"tools": FLAT_TOOLS, "tool_choice": "auto"}),
        (RESPONSES, {"tools": [{"type": "web_search"}], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}),
        (MESSAGES, {"tools": CLAUDE_TOOLS}),
        (MESSAGES, {"tools": CLAUDE_TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}),
    ],
)
def test_an_offer_changes_nothing_of_the_answer(live: LiveApp, path: str, fields: dict[str, Any]) -> None:
    body = {**APIS[path][0], "temperature": 0}
    plain, offered = (httpx.post(f"{live.address}{path}", json=sent) for sent in (body, {**body, **fields}))
    assert offered.status_code == 200, offered.text
    assert parts(offered.json()) == parts(plain.json())


def parts(answer: dict[str, Any]) -> list[Any]:
    """The texts and the reason of the end, in whichever API's form."""
    choices = [choice["message"] | {"end": choice["finish_reason"]} for choice in answer.get("choices", ())]
    items = [item["content"] for item in answer.get("output", ())]
    return [*choices, *items, answer.get("content"), answer.get("stop_reason")]


def test_a_conversation_with_calls_of_another_model_goes_on(live: LiveApp) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]},
    ]
    body = {"messages": messages, "tools": CHAT_TOOLS, "max_tokens": 3}
    answer = httpx.post(f"{live.address}{CHAT}", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
