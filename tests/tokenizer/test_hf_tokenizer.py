"""Tokenizers of Hugging Face directories: the Rust file, and what the JSON files beside it say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from engine.errors import StartupError
from engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.tokenizers import BOS, CHAT_TEMPLATE, EOS, IM_END, byte_tokenizer

CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
USER = [{"role": "user", "content": "Hi"}]

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a directory with the byte tokenizer's tokenizer.json and these JSON files."""

    def write(*, add_bos: bool = False, **files: dict[str, Any]) -> Path:
        backend = byte_tokenizer()._backend
        if add_bos:
            backend.post_processor = processors.TemplateProcessing(
                single="<|bos|> $A", pair=None, special_tokens=[("<|bos|>", BOS)]
            )
        backend.save(str(tmp_path / "tokenizer.json"))
        for name, content in {"tokenizer_config": CONFIG, **files}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(str(folder))


def test_tokens_are_those_of_the_file(write: Write) -> None:
    tokenizer = load(write())
    text = "Hi the žluť 🚀<|im_end|>"
    assert tokenizer.encode(text) == byte_tokenizer().encode(text)
    assert tokenizer.bos_token_id == BOS
    assert tokenizer.table is not None


def test_every_end_token_of_the_generation_config_counts(write: Write) -> None:
    assert load(write()).eos_token_ids == (EOS,)
    folder = write(generation_config={"eos_token_id": [IM_END, EOS]}, config={"eos_token_id": 0})
    assert load(folder).eos_token_ids == (IM_END, EOS)


def test_the_model_config_names_the_end_where_nothing_else_does(write: Write) -> None:
    assert load(write(tokenizer_config={}, config={"eos_token_id": IM_END})).eos_token_ids == (IM_END,)


def test_a_token_may_be_written_out(write: Write) -> None:
    config = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": None}
    assert load(write(tokenizer_config=config)).eos_token_ids == (IM_END,)
    assert load(write(tokenizer_config={}, special_tokens_map={"eos_token": "<|im_end|>"})).eos_token_ids == (IM_END,)


@pytest.mark.parametrize("add_bos", [False, True])
def test_what_is_added_around_a_prompt_is_what_transformers_adds(write: Write, add_bos: bool) -> None:
    from transformers import AutoTokenizer

    folder = write(add_bos=add_bos, tokenizer_config={**CONFIG, "add_bos_token": True, "add_eos_token": True})
    theirs, ours = AutoTokenizer.from_pretrained(str(folder)), load(folder)
    assert ours.encode("b") == theirs.encode("b")
    assert ours.encode("b", add_special_tokens=False) == [ord("b")]


def test_a_template_of_its_own_file_comes_first(write: Write) -> None:
    folder = write(tokenizer_config={**CONFIG, "chat_template": "config {{ messages[0].content }}"})
    assert load(folder).render_chat(USER) == "config Hi"
    (folder / "chat_template.jinja").write_text("file {{ bos_token }}{{ messages[0].content }}")
    assert load(folder).render_chat(USER) == "file <|bos|>Hi"


def test_of_named_templates_the_default_is_taken(write: Write) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": CHAT_TEMPLATE}]
    tokenizer = load(write(tokenizer_config={**CONFIG, "chat_template": templates}))
    assert tokenizer.render_chat(USER) == byte_tokenizer().render_chat(USER)


def test_no_template_is_no_reason_not_to_load(write: Write) -> None:
    assert load(write()).chat_template is None


def test_rendering_is_that_of_transformers(write: Write) -> None:
    from transformers import AutoTokenizer

    folder = write(tokenizer_config={**CONFIG, "chat_template": "{{ bos_token }}" + CHAT_TEMPLATE})
    theirs = AutoTokenizer.from_pretrained(str(folder))
    expected = theirs.apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    ours = load(folder)
    assert ours.render_chat(USER) == expected
    assert ours.encode(ours.render_chat(USER), add_special_tokens=False) == theirs.apply_chat_template(
        USER, add_generation_prompt=True, return_dict=False
    )


def test_another_tokenizer_can_be_named(write: Write) -> None:
    assert load_tokenizer("nowhere/at-all", str(write())).bos_token_id == BOS


def test_padding_and_truncation_of_training_are_off(write: Write) -> None:
    folder = write()
    backend = byte_tokenizer()._backend
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    assert load(folder).encode("abcd") == [97, 98, 99, 100]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["{ not json", "[]"])
def test_a_broken_file_is_refused_by_name(write: Write, name: str, content: str) -> None:
    folder = write()
    (folder / name).write_text(content)
    with pytest.raises(StartupError, match=name):
        load(folder)


def test_older_formats_go_through_transformers(tmp_path: Path) -> None:
    from engine.tokenizer.token_table import byte_level_alphabet

    vocab = {**byte_level_alphabet(), "Ġa": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nĠ a\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load(tmp_path)
    assert tokenizer.encode("b a") == [ord("b"), 256]
    assert tokenizer.decode([ord("b"), 256, 257]) == "b a"
    assert tokenizer.eos_token_ids == (257,)
