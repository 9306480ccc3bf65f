"""What is told of a prompt: echo, prompt_logprobs, token ids, usage while streaming, timings, and ids of requests."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from openai import OpenAI

from app.openai_api.delivery import MANY_ENTRIES
from engine.sampling_params import SamplingParams
from tests.app.v1.fake_answers import CHAT_PROMPT, GREEDY, MESSAGES
from tests.helpers.fake_runner import expected_tokens, prompt_score
from tests.helpers.live_app import LiveApp, serve


def chunks(live: LiveApp, path: str, body: dict[str, object]) -> list[dict[str, object]]:
    answer = httpx.post(f"{live.address}/v1/{path}", json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def said(prompt: bytes, num_tokens: int) -> str:
    return bytes(expected_tokens(list(prompt), GREEDY, num_tokens)).decode()


@pytest.mark.parametrize("stream", [False, True])
def test_echo_repeats_the_prompt_before_each_choice(client: OpenAI, stream: bool) -> None:
    texts: dict[int, str] = {}
    answer = client.completions.create(
        model="fake", prompt=["ab", "cd"], temperature=0, max_tokens=4, n=2, echo=True, stream=stream
    )
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {i: prompt.decode() + said(prompt, 4) for i, prompt in enumerate([b"ab", b"ab", b"cd", b"cd"])}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_with_log_probabilities_tells_those_of_the_prompt_too(client: OpenAI, stream: bool, n: int) -> None:
    options = {"model": "fake", "prompt": "hello", "temperature": 0, "max_tokens": 3, "echo": True, "n": n}
    answer = client.completions.create(**options, logprobs=2, stream=stream)  # type: ignore[call-overload]
    told: dict[int, dict[str, list[object]]] = {}
    texts: dict[int, str] = {}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            known = told.setdefault(choice.index, {"tokens": [], "token_logprobs": [], "text_offset": []})
            for name in ("tokens", "token_logprobs", "text_offset"):
                known[name] += getattr(choice.logprobs, name)
            known.setdefault("tops", choice.logprobs.top_logprobs)
    assert set(told) == set(range(n))
    for index, known in told.items():
        assert "".join(map(str, known["tokens"])) == texts[index] == "hello" + said(b"hello", 3)
        assert known["token_logprobs"] == [None, *(prompt_score(t, 2).logprob for t in b"ello"), -0.5, -0.5, -0.5]
        assert [texts[index][offset] for offset in known["text_offset"]] == known["tokens"]  # type: ignore[index]
        assert known["tops"][0] is None
        assert known["tops"][1] == {"e": prompt_score(101, 2).logprob, "f": prompt_score(101, 2).logprob - 1}


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_alone_can_be_scored(client: OpenAI, stream: bool) -> None:
    options = {"model": "fake", "prompt": [104, 105, 106], "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = client.completions.create(**options, stream=stream)  # type: ignore[call-overload]
    (part,) = list(answer) if stream else [answer]
    choice = part.choices[0]
    assert choice.text == "hij"
    assert choice.logprobs.tokens == ["h", "i", "j"]
    assert choice.logprobs.token_logprobs == [None, -105 / 8, -106 / 8]
    assert choice.finish_reason == "length"
    if not stream:
        assert (part.usage.prompt_tokens, part.usage.completion_tokens) == (3, 0)


def test_a_length_of_zero_needs_echo(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="fake", prompt="a", max_tokens=0)
    assert refused.value.param == "max_tokens"


def test_prompt_log_probabilities_of_a_completion(live: LiveApp) -> None:
    body = {"prompt": ["abc", "x"], "max_tokens": 2, "temperature": 0, "prompt_logprobs": 1, "n": 2}
    whole = httpx.post(f"{live.address}/v1/completions", json=body).json()["choices"]
    score = {"logprob": -98 / 8, "rank": 1, "decoded_token": "b"}
    for choice in whole[:2]:
        assert choice["prompt_logprobs"][:2] == [None, {"98": score}]
        assert len(choice["prompt_logprobs"]) == 3
    assert whole[2]["prompt_logprobs"] == [None]
    told = [c for chunk in chunks(live, "completions", body) for c in chunk["choices"] if "prompt_logprobs" in c]  # type: ignore[attr-defined]
    assert {c["index"]: c["prompt_logprobs"] for c in told} == {c["index"]: c["prompt_logprobs"] for c in whole}
    assert len(told) == 4


def test_those_of_a_long_prompt_are_written_aside_and_are_the_same(live: LiveApp) -> None:
    body = {"prompt": "x" * 600, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 20}
    (choice,) = httpx.post(f"{live.address}/v1/completions", json=body).json()["choices"]
    assert len(choice["prompt_logprobs"]) > MANY_ENTRIES
    told = [c for chunk in chunks(live, "completions", body) for c in chunk["choices"]]  # type: ignore[attr-defined]
    assert told[0]["prompt_logprobs"] == choice["prompt_logprobs"]
    assert "".join(c["text"] for c in told) == choice["text"]


def test_prompt_log_probabilities_of_a_chat(live: LiveApp) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 0}
    whole = httpx.post(f"{live.address}/v1/chat/completions", json=body).json()
    assert [next(iter(entry)) for entry in whole["prompt_logprobs"][1:]] == [str(token) for token in CHAT_PROMPT[1:]]
    first, *others = chunks(live, "chat/completions", body)
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    assert not any("prompt_logprobs" in chunk for chunk in others)


def test_bad_words_do_not_come_in_any_spelling() -> None:
    def says_dog(tokens: list[int], params: SamplingParams) -> int:
        words = {tuple(word) for word in params.bad_words}
        assert tuple(b"dog") in words
        assert (267,) in words  # " dog" is one token
        return ord("x")

    with serve(choose=says_dog) as live:
        body = {"prompt": "a", "max_tokens": 1, "bad_words": ["dog", " dog"]}
        assert httpx.post(f"{live.address}/v1/completions", json=body).json()["choices"][0]["text"] == "x"


def test_each_chunk_tells_the_usage_so_far_if_asked(live: LiveApp) -> None:
    for path, body in (("completions", {"prompt": "hello"}), ("chat/completions", {"messages": MESSAGES})):
        usage = {"include_usage": True, "continuous_usage_stats": True}
        told = chunks(live, path, {**body, "max_tokens": 3, "stream_options": usage})
        counts = [chunk["usage"]["completion_tokens"] for chunk in told]  # type: ignore[index]
        assert counts == sorted(counts)
        assert counts[-2:] == [3, 3]
        assert told[-1]["choices"] == []
        quiet = chunks(live, path, {**body, "max_tokens": 3, "stream_options": {"continuous_usage_stats": True}})
        assert not any("usage" in chunk for chunk in quiet)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "hello", "max_tokens": 3}),
        ("chat/completions", {"messages": MESSAGES, "max_tokens": 3}),
        ("responses", {"input": "hello", "max_output_tokens": 3}),
        ("messages", {"messages": MESSAGES, "max_tokens": 3}),
    ],
)
def test_timings_come_if_asked_for(live: LiveApp, path: str, body: dict[str, object]) -> None:
    plain = httpx.post(f"{live.address}/v1/{path}", json=body).json()
    assert "timings" not in json.dumps(plain)
    whole = httpx.post(f"{live.address}/v1/{path}", json={**body, "return_timings": True}).json()
    told = (whole.get("choices") or [whole])[0]["timings"]
    assert set(told) == {"queue_s", "prefill_s", "ttft_s", "decode_s", "tpot_s", "e2e_s", "num_preemptions"}
    assert 0 <= told["queue_s"] <= told["ttft_s"] <= told["e2e_s"]
    assert told["tpot_s"] == pytest.approx(told["decode_s"] / 2)
    stream = httpx.post(f"{live.address}/v1/{path}", json={**body, "return_timings": True, "stream": True}).text
    assert stream.count('"timings"') == 1


def test_a_request_has_the_id_that_its_client_gave_it(live: LiveApp) -> None:
    body = {"prompt": ["a", "b"], "max_tokens": 1, "request_id": "mine-1"}
    answer = httpx.post(f"{live.address}/v1/completions", json=body)
    assert answer.json()["id"] == answer.headers["x-request-id"] == "cmpl-mine-1"
    assert httpx.post(f"{live.address}/v1/completions", json=body).status_code == 200  # the first one has ended


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling", "/score", "/v1/rerank", "/classify"])
def test_what_the_model_cannot_do_is_said_so(live: LiveApp, path: str) -> None:
    answer = httpx.post(f"{live.address}{path}", json={"model": "fake", "input": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_by_model"
    assert path.rpartition("/")[2] in answer.json()["error"]["message"]
