"""The API as the `openai` client sees it, against a real server on a fake engine."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from openai import OpenAI

from engine.sampling_params import SamplingParams
from tests.app.v1.fake_answers import CHAT_PROMPT, GREEDY, MESSAGES, expected_text
from tests.helpers.fake_runner import expected_tokens
from tests.helpers.live_app import LiveApp
from tests.helpers.tokenizers import byte_tokenizer

TOKENIZER = byte_tokenizer()


def test_the_one_model_is_listed_and_found(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id) == model
    assert model.object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_a_completion_is_what_the_model_says(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello", temperature=0, max_tokens=6)
    assert answer.choices[0].text == expected_text(list(b"hello"), 6)
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 6, 11)


def test_a_completion_is_16_tokens_unless_told_otherwise(client: OpenAI) -> None:
    answer = client.completions.create(model="fake", prompt="hello", temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [b"ab"]),
        (["ab", "cd"], [b"ab", b"cd"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99, 100]], [b"ab", b"cd"]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_every_form_of_prompt(client: OpenAI, prompt: object, prompts: list[bytes]) -> None:
    answer = client.completions.create(model="fake", prompt=prompt, temperature=0, max_tokens=4, n=2)  # type: ignore[call-overload]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(prompts)))
    assert [choice.text for choice in answer.choices] == [
        expected_text(list(prompt), 4) for prompt in prompts for _ in range(2)
    ]
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == 8 * len(prompts)


@pytest.mark.parametrize("stream", [False, True])
def test_siblings_have_seeds_of_their_own_and_all_reach_their_end(client: OpenAI, stream: bool) -> None:
    texts = {0: "", 1: "", 2: ""}
    ends: dict[int, str | None] = {}
    options = {"model": "fake", "prompt": "hello", "n": 3, "seed": 5, "max_tokens": 5, "temperature": 1.0}
    answer = client.completions.create(**options, stream=stream)  # type: ignore[call-overload]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    for i in range(3):
        assert texts[i] == expected_text(list(b"hello"), 5, SamplingParams(seed=5 + i))
    assert ends == {0: "length", 1: "length", 2: "length"}


def test_a_chat_is_rendered_with_the_template(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, temperature=0, max_tokens=6)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == expected_text(CHAT_PROMPT, 6)
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(CHAT_PROMPT)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_every_role_and_content_in_parts(client: OpenAI, role: str) -> None:
    parts = {"role": role, "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]}
    flat = {"role": role, "content": "he\nllo"}
    texts = [
        client.chat.completions.create(
            model="fake", messages=[message, *MESSAGES], temperature=0, max_completion_tokens=4  # type: ignore[list-item]
        ).choices[0].message.content
        for message in (parts, flat)
    ]  # fmt: skip
    assert texts[0] == texts[1]


def test_max_completion_tokens_wins_over_max_tokens(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="fake", messages=MESSAGES, max_completion_tokens=3, max_tokens=9  # type: ignore[arg-type]
    )  # fmt: skip
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_a_streamed_chat_begins_with_the_role_and_adds_up_to_the_whole(client: OpenAI) -> None:
    options = {"model": "fake", "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**options, stream=True))  # type: ignore[call-overload]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices[0].finish_reason == "length"
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_a_stream_says_nothing_of_usage_unless_asked(live: LiveApp, path: str, options: object) -> None:
    body = {"prompt": "a", "messages": MESSAGES, "max_tokens": 3, "stream": True, "stream_options": options}
    lines = httpx.post(f"{live.address}/v1/{path}", json=body).text
    assert lines.endswith("data: [DONE]\n\n")
    assert "usage" not in lines


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_usage_is_one_last_chunk_without_choices(live: LiveApp, path: str) -> None:
    body = {
        "prompt": "a", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 3, "n": 2, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer = httpx.post(f"{live.address}/v1/{path}", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert [chunk for chunk in chunks if "usage" in chunk] == [chunks[-1]]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    whole = httpx.post(
        f"{live.address}/v1/{path}", json={key: body[key] for key in body if not key.startswith("stream")}
    ).json()
    assert chunks[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]


def test_cached_tokens_are_those_of_the_prefix_cache(client: OpenAI) -> None:
    prompt = "only this test has a prompt which begins like this, so nobody has filled its blocks before"
    first, second = (
        client.completions.create(model="fake", prompt=prompt, temperature=0, max_tokens=2).usage for _ in range(2)
    )
    assert first is not None
    assert second is not None
    assert first.prompt_tokens_details is not None
    assert second.prompt_tokens_details is not None
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == 16 * ((len(prompt) - 1) // 16)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_chat(client: OpenAI, stream: bool) -> None:
    options = {"model": "fake", "messages": MESSAGES, "temperature": 0, "max_tokens": 4}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=2, stream=stream)  # type: ignore[call-overload]
    entries, text = [], ""
    for part in answer if stream else [answer]:
        choice = part.choices[0]
        text += (choice.delta if stream else choice.message).content or ""
        if choice.logprobs is not None:
            entries += choice.logprobs.content
    assert "".join(entry.token for entry in entries) == text
    assert bytes(byte for entry in entries for byte in entry.bytes).decode() == text
    assert [len(entry.top_logprobs) for entry in entries] == [2, 2, 2, 2]
    assert all(entry.logprob <= 0 for entry in entries)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_completion(client: OpenAI, stream: bool) -> None:
    options = {"model": "fake", "prompt": "a", "temperature": 0, "max_tokens": 4}
    answer = client.completions.create(**options, logprobs=1, stream=stream)  # type: ignore[call-overload]
    tokens, offsets, tops, text = [], [], [], ""
    for part in answer if stream else [answer]:
        choice = part.choices[0]
        text += choice.text
        if choice.logprobs is not None:
            tokens += choice.logprobs.tokens
            offsets += choice.logprobs.text_offset
            tops += choice.logprobs.top_logprobs
    assert "".join(tokens) == text
    assert [text[offset : offset + len(token)] for offset, token in zip(offsets, tokens, strict=True)] == tokens
    assert all(token in top for token, top in zip(tokens, tops, strict=True))


def test_no_log_probabilities_unless_asked(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2)  # type: ignore[arg-type]
    assert answer.choices[0].logprobs is None


@pytest.mark.parametrize("stop", ["X", ["nowhere", "X"]])
def test_stop_as_a_string_or_a_list(client: OpenAI, stop: object) -> None:
    full = expected_text(list(b"hello"), 12)
    mark = full[4]
    stop = mark if isinstance(stop, str) else ["nowhere", mark]
    options = {"model": "fake", "prompt": "hello", "temperature": 0, "max_tokens": 12, "stop": stop}
    answer = client.completions.create(**options)  # type: ignore[call-overload]
    assert answer.choices[0].text == full[: full.index(mark)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == mark
    kept = client.completions.create(**options, extra_body={"include_stop_str_in_output": True})  # type: ignore[call-overload]
    assert kept.choices[0].text == full[: full.index(mark) + 1]


def test_stop_token_ids_end_with_their_id_as_reason(client: OpenAI) -> None:
    tokens = expected_tokens(list(b"hello"), GREEDY, 12)
    answer = client.completions.create(
        model="fake", prompt="hello", temperature=0, max_tokens=12, extra_body={"stop_token_ids": [tokens[3]]}
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra is not None
    assert answer.choices[0].model_extra["stop_reason"] == tokens[3]


def test_token_ids_of_prompt_and_answer_are_returned_when_asked(live: LiveApp) -> None:
    expected = expected_tokens(CHAT_PROMPT, GREEDY, 4)
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    whole = httpx.post(f"{live.address}/v1/chat/completions", json=body).json()
    assert whole["prompt_token_ids"] == CHAT_PROMPT
    assert whole["choices"][0]["token_ids"] == expected
    text = httpx.post(f"{live.address}/v1/chat/completions", json={**body, "stream": True}).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert chunks[0]["prompt_token_ids"] == CHAT_PROMPT
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == expected


def test_the_last_message_can_be_continued(live: LiveApp) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "I say "}]
    prompt = TOKENIZER.encode(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nI say ", add_special_tokens=False
    )
    body = {"messages": messages, "temperature": 0, "max_tokens": 4, "return_token_ids": True}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    answer = httpx.post(f"{live.address}/v1/chat/completions", json=body).json()
    assert answer["prompt_token_ids"] == prompt
    both = {**body, "add_generation_prompt": True}
    refused = httpx.post(f"{live.address}/v1/chat/completions", json=both)
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_tokenize_and_detokenize_are_inverse(live: LiveApp) -> None:
    answer = httpx.post(f"{live.address}/tokenize", json={"prompt": "hello the", "return_token_strs": True}).json()
    assert answer == {
        "count": 6, "max_model_len": 8192, "tokens": [*b"hello", 260], "token_strs": ["h", "e", "l", "l", "o", " the"],
    }  # fmt: skip
    back = httpx.post(f"{live.address}/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": "hello the"}
    chat = httpx.post(f"{live.address}/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == CHAT_PROMPT
    assert chat["token_strs"] is None


def test_a_long_prompt_is_tokenised_as_a_short_one(live: LiveApp) -> None:
    text = "0123456789" * 100_000  # long enough for a worker thread and for parsing on one
    answer = httpx.post(f"{live.address}/tokenize", json={"prompt": text}, timeout=60).json()
    assert answer["tokens"] == list(text.encode())


def test_request_ids_are_those_of_the_client_or_of_the_answer(live: LiveApp) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    own = httpx.post(f"{live.address}/v1/completions", json=body)
    assert own.headers["x-request-id"] == own.json()["id"]
    given = httpx.post(f"{live.address}/v1/completions", json=body, headers={"X-Request-Id": "trace-7"})
    assert given.headers["x-request-id"] == "trace-7"
    assert given.json()["id"].startswith("cmpl-")
    odd = httpx.post(f"{live.address}/v1/completions", json=body, headers={"X-Request-Id": "a b\t<c>"})
    assert odd.headers["x-request-id"] == odd.json()["id"]


def test_version_is_the_packages(live: LiveApp) -> None:
    assert httpx.get(f"{live.address}/version").json() == {"version": "0.1.0"}


def test_errors_arrive_as_the_clients_own(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="fake", prompt="a", temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="another", prompt="a")
    assert unknown.value.code == "model_not_found"
