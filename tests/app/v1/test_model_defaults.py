"""Where a request is silent the model's own sampling parameters hold; what it says wins."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from app.settings import load_settings
from engine.sampling_params import SamplingParams
from engine.weights.generation_config import generation_defaults
from tests.helpers.live_app import serve

PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]


def directory(path: Path, config: object) -> str:
    (path / "config.json").write_text("{}")
    (path / "generation_config.json").write_text(json.dumps(config))
    return str(path)


def test_they_are_read_from_the_models_directory(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "eos_token_id": [1, 2], "do_sample": True,
              "repetition_penalty": 1.05, "max_new_tokens": 64, "transformers_version": "5.0.0"}  # fmt: skip
    expected = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05, "max_tokens": 64}
    assert dict(generation_defaults(directory(tmp_path, config))) == expected


@pytest.mark.parametrize("value", [-1, 9, "hot", [0.5], True])
def test_a_value_out_of_range_is_left_out(
    tmp_path: Path, value: object, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    folder = directory(tmp_path, {"temperature": value, "top_k": 5})
    assert generation_defaults(folder) == (("top_k", 5),)
    assert "temperature" in caplog.text


def test_a_directory_without_the_file_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert generation_defaults(str(tmp_path)) == ()


def test_they_can_be_switched_off() -> None:
    assert load_settings({}, {}).engine_config().generation_config == "auto"
    assert load_settings({"generation_config": "vllm"}, {}).engine_config().generation_config == "vllm"


def test_a_request_takes_them_where_it_is_silent() -> None:
    seen: list[SamplingParams] = []

    def choose(tokens: list[int], params: SamplingParams) -> int:
        seen.append(params)
        return ord("x")

    defaults = (("temperature", 0.25), ("top_k", 7), ("top_p", 0.5), ("max_tokens", 3))
    messages = [{"role": "user", "content": "a"}]
    with serve(choose=choose, generation_defaults=defaults) as live:
        for path in PATHS:
            body: dict[str, object] = {"top_p": 0.75}
            if path == "/v1/responses":
                body["input"] = "a"
            else:
                body |= {"prompt": "a", "messages": messages}
            if path == "/v1/messages":
                body["max_tokens"] = 3  # its clients must say it
            assert httpx.post(live.address + path, json=body).status_code == 200
            assert (seen[-1].temperature, seen[-1].top_k, seen[-1].top_p) == (0.25, 7, 0.75)
            assert seen[-1].max_tokens == (16 if path == "/v1/completions" else 3)
