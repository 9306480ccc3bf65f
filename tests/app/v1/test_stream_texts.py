"""A stream's deltas are the whole answer in pieces: for characters of many bytes, for stop strings, in every API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from engine.sampling_params import SamplingParams
from tests.helpers.live_app import LiveApp, serve
from tests.helpers.tokenizers import EOS, IM_START, byte_tokenizer

TEXTS = {
    "emoji": "a 😀 b 🎉🎉 c",
    "joined": "family 👨‍👩‍👧‍👦 flag 🏳️‍🌈 skin 👍🏽",  # ZWJ sequences and modifiers
    "cjk": "日本語のテキスト、漢字。中文文本 한국어",
    "combining": "Přılıš žlut\u030cy\u0301 ku\u030an\u030c",
    "mixed": "ABCDEFGHIJ kočka 猫 🐈‍⬛ END",
    "broken": b"x \xf0\x9f\x98 y \xe6\x97 z",  # characters that never become whole
}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]


@contextmanager
def saying(text: str | bytes) -> Iterator[LiveApp]:
    """A model that says `text`, whose tokens are bytes, and ends."""
    script = [*(text.encode() if isinstance(text, str) else text), EOS]
    mark = byte_tokenizer().encode("|", add_special_tokens=False)[0]

    def choose(tokens: list[int], params: SamplingParams) -> int:
        # The prompt ends with the mark, or with the chat template's last header.
        start = len(tokens) - next(
            i for i, token in enumerate(reversed(tokens)) if token == mark or tokens[len(tokens) - i - 1] == IM_START
        )
        if tokens[start - 1] == IM_START:
            start += len("assistant\n")
        return script[len(tokens) - start]

    with serve(choose=choose) as live:
        yield live


def body_of(path: str, **options: object) -> dict[str, object]:
    stop, max_tokens = options.pop("stop", None), options.pop("max_tokens", 200)
    messages = [{"role": "user", "content": "hello"}]
    match path:
        case "/v1/completions":
            return {"prompt": "hello|", "max_tokens": max_tokens, "stop": stop, **options}
        case "/v1/responses":
            return {"input": "hello", "max_output_tokens": max_tokens, "stop": stop, **options}
        case "/v1/messages":
            return {"messages": messages, "max_tokens": max_tokens, "stop_sequences": stop, **options}
    return {"messages": messages, "max_tokens": max_tokens, "stop": stop, **options}


def whole(live: LiveApp, path: str, **options: object) -> str:
    answer = httpx.post(live.address + path, json=body_of(path, **options)).json()
    match path:
        case "/v1/completions":
            return str(answer["choices"][0]["text"])
        case "/v1/chat/completions":
            return str(answer["choices"][0]["message"]["content"])
        case "/v1/responses":
            return str(answer["output"][0]["content"][0]["text"])
    return str(answer["content"][0]["text"])


def pieces(live: LiveApp, path: str, **options: object) -> list[str]:
    raw = httpx.post(live.address + path, json=body_of(path, **options, stream=True)).content
    text = raw.decode()  # every piece is UTF-8 in itself, so the whole is
    found = []
    for line in text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        for choice in event.get("choices", []):
            found.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        if event.get("type") == "response.output_text.delta":
            found.append(event["delta"])
        if event.get("type") == "content_block_delta":
            found.append(event["delta"]["text"])
    return [piece for piece in found if piece]


@pytest.mark.parametrize("name", TEXTS)
def test_deltas_add_up_to_the_answer(name: str) -> None:
    text = TEXTS[name]
    expected = text if isinstance(text, str) else text.decode(errors="replace")
    with saying(text) as live:
        for path in PATHS:
            told = pieces(live, path)
            assert "".join(told) == whole(live, path) == expected
            if name != "broken":
                assert "\ufffd" not in expected
                assert all("\ufffd" not in piece for piece in told)
            assert len(told) > 3


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (["DEFGHIJ"], "ABC"),  # across tokens
        (["kočka"], "ABCDEFGHIJ "),  # across the bytes of a character
        (["🐈‍⬛"], "ABCDEFGHIJ kočka 猫 "),
        (["🐈"], "ABCDEFGHIJ kočka 猫 "),  # the first part of a joined character
        (["XX", "猫"], "ABCDEFGHIJ kočka "),
        (["DEFX", "GHY"], "ABCDEFGHIJ kočka 猫 🐈‍⬛ END"),  # looked like stops, were none
        (["END."], "ABCDEFGHIJ kočka 猫 🐈‍⬛ END"),  # held back to the very end
    ],
    ids=lambda value: str(value),
)
def test_stop_strings_cut_the_stream_where_they_cut_the_answer(stop: list[str], kept: str) -> None:
    with saying(TEXTS["mixed"]) as live:
        for path in PATHS:
            told = pieces(live, path, stop=stop)
            assert "".join(told) == whole(live, path, stop=stop) == kept
            for text in stop:
                assert all(text not in piece for piece in told)


def test_a_length_that_cuts_a_character_leaves_a_mark_at_the_very_end_only() -> None:
    with saying("ab😀") as live:
        for path in PATHS:
            told = pieces(live, path, max_tokens=4)
            assert "".join(told) == whole(live, path, max_tokens=4) == "ab\ufffd"
            assert told[-1].endswith("\ufffd")
