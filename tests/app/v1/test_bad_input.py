"""Whatever a body holds: 400 with the field's name, and the engine goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest

from tests.app.v1.wrong_values import APIS, HUGE, WRONG_TYPES
from tests.helpers.live_app import serve

REQUIRED = {"prompt", "messages", "input", "max_tokens"}


def rows() -> list[tuple[str, str, object]]:
    return [
        (path, field, value)
        for path, (_, fields) in APIS.items()
        for field, (kind, values) in fields.items()
        for value in [*WRONG_TYPES.get(kind, []), *values]
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


PATHS = [*APIS, "/tokenize", "/detokenize"]
FIRST_FIELD = {
    "/v1/completions": "prompt", "/v1/chat/completions": "messages", "/v1/responses": "input",
    "/v1/messages": "messages", "/tokenize": "prompt", "/detokenize": "tokens",
}  # fmt: skip


def check(answer: httpx.Response, field: str) -> None:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field, error
    assert error["message"]
    assert len(answer.content) < 2000


@pytest.mark.parametrize(("path", "field", "value"), rows(), ids=name)
def test_a_wrong_value_is_a_400_that_names_the_field(
    client: httpx.Client, path: str, field: str, value: object
) -> None:  # fmt: skip
    if field == "stream_options" and value == {}:
        value = []
    check(client.post(path, json={**APIS[path][0], field: value}), field)


INTEGERS = [
    (path, field) for path, (_, fields) in APIS.items() for field, (kind, _) in fields.items() if kind == "integer"
]


@pytest.mark.parametrize(("path", "field"), INTEGERS)
def test_a_whole_number_with_a_point_is_an_integer(client: httpx.Client, path: str, field: str) -> None:
    body = (
        {**APIS[path][0], "logprobs": True}
        if (path, field) == ("/v1/chat/completions", "top_logprobs")
        else APIS[path][0]
    )
    sent = json.dumps({**body, field: 1}).replace(f'"{field}": 1', f'"{field}": 1.0')
    assert "1.0" in sent
    answer = client.post(path, content=sent, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    huge = client.post(path, json={**body, field: 1e300})
    assert huge.status_code in (200, 400), huge.text  # a limit may be larger than what there is room for


NULLS = [(path, field) for path, (_, fields) in APIS.items() for field in sorted({*fields} - REQUIRED)]


@pytest.mark.parametrize(("path", "field"), NULLS)
def test_null_is_absent(client: httpx.Client, path: str, field: str) -> None:
    answer = client.post(path, json={**APIS[path][0], field: None})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", PATHS)
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


@pytest.mark.parametrize("path", PATHS)
def test_a_required_field_that_is_absent_or_null_is_a_400(client: httpx.Client, path: str) -> None:
    field = FIRST_FIELD[path]
    for body in ({}, {field: None}):
        answer = client.post(path, json=body)
        check(answer, field)
        assert answer.json()["error"]["code"] == "missing_required_parameter"


def test_unknown_fields_are_ignored(client: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 2, "user": "u", "metadata": {"a": 1}, "no_such_field": [None, {"x": 1}]}
    assert client.post("/v1/completions", json=body).status_code == 200


def test_a_prompt_that_cannot_fit_says_so_in_a_code(client: httpx.Client) -> None:
    message = {"role": "user", "content": "a" * 9000}
    for path, body in (
        ("/v1/completions", {"prompt": "a" * 9000}),
        ("/v1/chat/completions", {"messages": [message]}),
        ("/v1/responses", {"input": [message]}),
        ("/v1/messages", {"messages": [message], "max_tokens": 5}),
    ):
        error = client.post(path, json=body).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "max_model_len = 8192" in error["message"]


def test_another_model_is_a_404_with_openais_code(client: httpx.Client) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}),
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
