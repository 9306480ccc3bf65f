"""A request that ends before its prompt was computed answers with what there is."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.helpers.live_app import post, running_app

BODY: dict[str, Any] = {
    "prompt": "hello", "max_tokens": 3, "queue_timeout_s": 5e-324, "prompt_logprobs": 1, "logprobs": 1, "echo": True,
}  # fmt: skip


def answered(path: str, body: dict[str, Any]) -> Any:
    """The answer's choice; of a stream the last one that has text or an end."""

    async def scenario() -> Any:
        async with running_app() as app:
            answer = await post(app, path, body).end()
            assert answer.status == 200, answer.body
            if not body.get("stream"):
                return answer.json()
            events = [line[6:] for line in answer.body.split(b"\n") if line.startswith(b"data: ")]
            assert events.pop() == b"[DONE]"
            return [json.loads(event) for event in events]

    return asyncio.run(scenario())


def test_a_completion_tells_the_prompt_without_scores() -> None:
    (choice,) = answered("/v1/completions", BODY)["choices"]
    assert choice["finish_reason"] == "timeout"
    assert choice["text"] == "hello"
    assert choice["prompt_logprobs"] == [None] * 5
    assert choice["logprobs"] == {
        "tokens": list("hello"), "token_logprobs": [None] * 5, "top_logprobs": [None] * 5,
        "text_offset": [0, 1, 2, 3, 4],
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_ends_with_the_reason_and_no_error(path: str) -> None:
    body = {**BODY, "stream": True}
    if path.endswith("chat/completions"):
        del body["prompt"], body["echo"], body["logprobs"]
        body["messages"] = [{"role": "user", "content": "hello"}]
    events = answered(path, body)
    assert all("error" not in event for event in events)
    assert events[-1]["choices"][0]["finish_reason"] == "timeout"


def test_a_chat_tells_the_prompt_without_scores() -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "queue_timeout_s": 5e-324, "prompt_logprobs": 1}
    answer = answered("/v1/chat/completions", body)
    assert answer["choices"][0]["finish_reason"] == "timeout"
    assert set(map(str, answer["prompt_logprobs"])) == {"None"}
