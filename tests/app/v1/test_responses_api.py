"""The Responses API as the `openai` client sees it."""

from __future__ import annotations

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from engine.core.batch import Batch
from tests.app.v1.fake_answers import chat_prompt, expected_text
from tests.helpers.live_app import serve

EVENTS = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done",
]  # fmt: skip


def said(*messages: tuple[str, str], num_tokens: int) -> str:
    return expected_text(chat_prompt(*messages), num_tokens)


def test_text_in_text_out(client: OpenAI) -> None:
    answer = client.responses.create(model="fake", input="hello", temperature=0, max_output_tokens=6)
    assert answer.output_text == said(("user", "hello"), num_tokens=6)
    assert answer.id.startswith("resp_")
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 6
    assert answer.usage.total_tokens == answer.usage.input_tokens + 6


def test_instructions_are_a_system_message_and_items_are_messages(client: OpenAI) -> None:
    items = [
        {"role": "user", "content": "hi"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "yes"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "go"}, {"type": "input_text", "text": "on"}]},
    ]
    answer = client.responses.create(
        model="fake", input=items, instructions="be short", temperature=0, max_output_tokens=4  # type: ignore[arg-type]
    )  # fmt: skip
    messages = (("system", "be short"), ("user", "hi"), ("assistant", "yes"), ("user", "go\non"))
    assert answer.output_text == said(*messages, num_tokens=4)
    assert answer.instructions == "be short"


def test_an_answer_that_ends_by_itself_is_completed(client: OpenAI) -> None:
    answer = client.responses.create(model="fake", input="a", extra_body={"guided_choice": ["done"]})
    assert (answer.status, answer.output_text, answer.incomplete_details) == ("completed", "done", None)
    assert answer.output[0].status == "completed"  # type: ignore[union-attr]


def test_a_stream_tells_the_same_in_openais_order(client: OpenAI) -> None:
    options = {"model": "fake", "input": "hello", "temperature": 0, "max_output_tokens": 6}
    whole = client.responses.create(**options)  # type: ignore[call-overload]
    events = list(client.responses.create(**options, stream=True))  # type: ignore[call-overload]
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == [*EVENTS, "response.incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    done = next(event for event in events if event.type == "response.output_text.done")
    assert done.text == whole.output_text
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert last.usage.output_tokens == 6
    item_ids = {event.item_id for event in deltas} | {last.output[0].id}
    assert len(item_ids) == 1


def test_the_clients_stream_helper_gathers_the_final_response(client: OpenAI) -> None:
    with client.responses.stream(model="fake", input="a", extra_body={"guided_choice": ["done"]}) as stream:
        final = stream.get_final_response()
    assert final.output_text == "done"


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_told_if_included(client: OpenAI, stream: bool) -> None:
    answer = client.responses.create(
        model="fake", input="a", temperature=0, max_output_tokens=3, top_logprobs=2,
        include=["message.output_text.logprobs"], stream=stream,
    )  # fmt: skip
    if stream:
        answer = list(answer)[-1].response  # type: ignore[union-attr]
    part = answer.output[0].content[0]  # type: ignore[union-attr]
    assert "".join(entry.token for entry in part.logprobs) == part.text
    assert [len(entry.top_logprobs) for entry in part.logprobs] == [2, 2, 2]


def test_what_needs_a_store_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model="fake", input="a", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


def test_a_request_that_fails_within_a_stream_says_so() -> None:
    def fail(batch: Batch) -> None:
        if batch.step == 3:
            raise RuntimeError("the test breaks the engine")

    with serve(before_step=fail) as live:
        body = {"input": "hello", "max_output_tokens": 9, "stream": True}
        text = httpx.post(f"{live.address}/v1/responses", json=body).text
    assert "event: error\n" in text
    assert text.rstrip().splitlines()[-2] == "event: response.failed"


def test_the_clients_own_parsing_finds_its_model(client: OpenAI) -> None:
    class Choice(BaseModel):
        model_config = ConfigDict(extra="forbid")
        is_tall: bool

    answer = client.responses.parse(model="fake", input="a", text_format=Choice, temperature=0)
    assert isinstance(answer.output_parsed, Choice)
