"""Whatever a body holds: 400 with the field's name, and the engine goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.helpers.live_app import serve

HUGE = 10**30
WRONG_TYPES: dict[str, list[object]] = {
    "boolean": ["yes", 1, 0.5, [], {}],
    "integer": ["7", 1.5, True, [], {}],
    "number": ["hot", True, [], {}],
    "string": [7, True, [], {}],
    "object": ["x", 7, True, []],
}
COMMON_FIELDS: dict[str, tuple[str, list[object]]] = {  # field -> (its type, values outside its range)
    "model": ("string", []),
    "stream": ("boolean", []),
    "n": ("integer", [0, -1, 257, HUGE]),
    "temperature": ("number", [-0.1, 2.1, HUGE]),
    "top_p": ("number", [0, -1, 1.01]),
    "top_k": ("integer", [-2]),
    "min_p": ("number", [-0.1, 1.1]),
    "seed": ("integer", [HUGE, -HUGE]),
    "presence_penalty": ("number", [-2.1, 2.1]),
    "frequency_penalty": ("number", [-2.1, 2.1]),
    "repetition_penalty": ("number", [0, -1]),
    "min_tokens": ("integer", [-1, 10_000]),
    "max_tokens": ("integer", [0, -1]),
    "ignore_eos": ("boolean", []),
    "include_stop_str_in_output": ("boolean", []),
    "skip_special_tokens": ("boolean", []),
    "return_token_ids": ("boolean", []),
    "priority": ("integer", [HUGE, -HUGE]),
    "queue_timeout_s": ("number", [0, -1]),
    "request_timeout_s": ("number", [0, -1]),
    "cache_salt": ("string", ["", "s" * 1025]),
    "stream_options": ("object", []),
    "logit_bias": ("object", [{"x": 1}, {"": 1}, {"1.5": 1}, {"5": "much"}, {"5": None}, {"5": 101}, {"-1": 1},
                              {"300": 1}, {str(HUGE): 1}, {"5": True}]),
    "stop": ("", [7, True, {}, [7], [""], "", [["a"]], ["a"] * 65, [None]]),
    "stop_token_ids": ("", [7, "7", ["7"], [1.5], [True], [-1], [300], [HUGE], [[1]], [1] * 1025, {}]),
}  # fmt: skip
COMPLETION_FIELDS: dict[str, tuple[str, list[object]]] = {
    **COMMON_FIELDS,
    "prompt": ("", [7, True, {}, [], "", [""], [True], [1.5], ["a", 1], [1, "a"], [[]], [[1], "a"], [["a"]], [[1.5]],
                    [-1], [300], [HUGE], [[1], [300]], [None], "a" * 9000, [65] * 9000, ["a"] * 1025]),
    "logprobs": ("integer", [-1, 21]),
    "add_special_tokens": ("boolean", []),
    "echo": ("", [True]),
    "suffix": ("", ["x"]),
}  # fmt: skip
CHAT_FIELDS: dict[str, tuple[str, list[object]]] = {
    **COMMON_FIELDS,
    "messages": ("", [7, True, "hi", {}, [], [7], ["hi"], [None], [[]], [{}], [{"role": "user"}],
                      [{"role": "nobody", "content": "a"}], [{"role": 7, "content": "a"}], [{"content": "a"}],
                      [{"role": ["user"], "content": "a"}], [{"role": "user", "content": 7}],
                      [{"role": "user", "content": {}}], [{"role": "user", "content": [7]}],
                      [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
                      [{"role": "user", "content": [{"type": "text"}]}],
                      [{"role": "user", "content": [{"type": "text", "text": 7}]}],
                      [{"role": "assistant", "content": "a", "tool_calls": 7}],
                      [{"role": "user", "content": "a" * 9000}]]),
    "max_completion_tokens": ("integer", [0, -1]),
    "logprobs": ("boolean", []),
    "top_logprobs": ("integer", [-1, 21, 3]),  # 3: without logprobs
    "add_generation_prompt": ("boolean", []),
    "continue_final_message": ("boolean", [True]),  # the last message is a user's
    "chat_template_kwargs": ("object", [{"self": 1}, {"messages": []}, {"add_generation_prompt": False}]),
    "response_format": ("", [{"type": "json_object"}]),
}  # fmt: skip


def rows(fields: dict[str, tuple[str, list[object]]]) -> list[tuple[str, object]]:
    return [
        (field, value) for field, (kind, values) in fields.items() for value in [*WRONG_TYPES.get(kind, []), *values]
    ]


def name(value: object) -> str:
    return repr(value)[:40]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serve() as live, httpx.Client(base_url=live.address) as client:
        yield client
        assert not live.engine.is_dead
        assert not live.engine.state.sequences, "a refused request is still in the engine"
        answer = client.post("/v1/completions", json={"prompt": "still there?", "max_tokens": 3})
        assert answer.json()["usage"]["completion_tokens"] == 3


def check(answer: httpx.Response, field: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field, error
    assert error["message"]
    assert len(answer.content) < 2000


@pytest.mark.parametrize(("field", "value"), rows(COMPLETION_FIELDS), ids=name)
def test_a_wrong_value_of_a_completion_is_a_400_that_names_the_field(
    client: httpx.Client, field: str, value: object
) -> None:
    if field == "stream_options" and value == {}:
        value = []
    check(client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, field: value}), field)


@pytest.mark.parametrize(("field", "value"), rows(CHAT_FIELDS), ids=name)
def test_a_wrong_value_of_a_chat_is_a_400_that_names_the_field(
    client: httpx.Client, field: str, value: object
) -> None:  # fmt: skip
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, field: value}
    check(client.post("/v1/chat/completions", json=body), field)


@pytest.mark.parametrize("field", sorted({*COMPLETION_FIELDS} - {"prompt"}))
def test_null_is_absent_in_a_completion(client: httpx.Client, field: str) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, field: None})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("field", sorted({*CHAT_FIELDS} - {"messages"}))
def test_null_is_absent_in_a_chat(client: httpx.Client, field: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, field: None}
    assert client.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b'"x"', "body"),
        (b"7", "body"),
        (b"\xff\xfe", "body"),
        (b'{"prompt": NaN}', "body"),
        (b'{"prompt": Infinity}', "body"),
        (b'{"prompt": "\\ud800"}', "body"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "body"),
        (b"[" * 100_000, "body"),
        (b'{"n": ' + b"9" * 10_000 + b"}", "body"),
        (b'{"prompt": "a"} x', "body"),
    ],
    ids=lambda value: value[:20].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_what_is_no_json_object_is_a_400(client: httpx.Client, path: str, body: bytes, param: str) -> None:
    check(client.post(path, content=body, headers={"content-type": "application/json"}), param)


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_another_content_type_is_a_400(client: httpx.Client, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    check(client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers), "content-type")


def test_a_float_that_overflows_is_a_400(client: httpx.Client) -> None:
    body = b'{"prompt": "a", "temperature": 1e999}'
    check(client.post("/v1/completions", content=body, headers={"content-type": "application/json"}), "temperature")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_required_field_that_is_absent_or_null_is_a_400(client: httpx.Client, path: str) -> None:
    field = {"/v1/chat/completions": "messages", "/detokenize": "tokens"}.get(path, "prompt")
    for body in ({}, {field: None}):
        answer = client.post(path, json=body)
        check(answer, field)
        assert answer.json()["error"]["code"] == "missing_required_parameter"


def test_unknown_fields_are_ignored(client: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 2, "user": "u", "metadata": {"a": 1}, "no_such_field": [None, {"x": 1}]}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_a_prompt_that_cannot_fit_says_so_in_a_code(client: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a" * 9000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 9000}]}),
    ):
        error = client.post(path, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "max_model_len = 8192" in error["message"]


def test_another_model_is_a_404_with_openais_code(client: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        answer = client.post(path, json={**body, "model": "gpt-9"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert answer.json()["error"]["param"] == "model"
    assert client.get("/v1/models/gpt-9").status_code == 404


@pytest.mark.parametrize("tokens", [7, "7", [1.5], ["7"], [True], [-1], [300], [HUGE], {}])
def test_wrong_tokens_to_detokenize_are_a_400(client: httpx.Client, tokens: object) -> None:
    check(client.post("/detokenize", json={"tokens": tokens}), "tokens")


def test_a_refusal_of_a_huge_value_does_not_repeat_it(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={"prompt": "a", "response_format": {"type": "x" * 100_000}})
    check(answer, "response_format")


def test_the_body_may_have_a_charset_and_a_json_suffix(client: httpx.Client) -> None:
    for content_type in ("application/json; charset=utf-8", "application/vnd.x+json", "APPLICATION/JSON"):
        body = json.dumps({"prompt": "ä", "max_tokens": 2}).encode()
        assert client.post("/v1/completions", content=body, headers={"content-type": content_type}).status_code == 200
