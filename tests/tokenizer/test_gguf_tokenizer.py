"""Tokenizers built from GGUF metadata: what is read, what is refused, and that the quick reader reads the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFWriter, TokenType

from engine.errors import StartupError
from engine.tokenizer.pre_tokenizers import PRE_TOKENIZATIONS
from engine.tokenizer.source import find_tokenizer
from engine.tokenizer.token_table import byte_level_alphabet
from engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from engine.weights.gguf_file import GgufFile

LETTERS = list(byte_level_alphabet())
TOKENS = [*LETTERS, "<s>", "</s>", "<eot>", "<tool>", "Ġa", "12", "123", "1234", "ab"]
TYPES = [TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 3 + [TokenType.USER_DEFINED] + [TokenType.NORMAL] * 5
MERGES = ["Ġ a", "1 2", "12 3", "123 4"]  # none for "ab"

Write = Callable[..., Tokenizer]


@pytest.fixture
def build(tmp_path: Path) -> Write:
    """Write a small GGUF file with these changes to its metadata and load its tokenizer."""

    def build(
        model: str | None = "gpt2",
        pre: str | None = "gpt-2",
        merges: list[str] | None = MERGES,
        template: str | None = None,
        **more: int | bool,
    ) -> Tokenizer:
        path = tmp_path / "model.gguf"
        writer = GGUFWriter(path, "llama")
        if model is not None:
            writer.add_tokenizer_model(model)
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types(TYPES)
        if merges is not None:
            writer.add_token_merges(merges)
        if template is not None:
            writer.add_chat_template(template)
        for name, value in {"bos": 256, "eos": 257, **more}.items():
            if isinstance(value, bool):
                writer.add_bool(f"tokenizer.ggml.{name}", value)
            else:
                writer.add_uint32(f"tokenizer.ggml.{name}_token_id", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return load_tokenizer(str(path))

    return build


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(token_id) for token_id in tokenizer.encode(text)]


def test_pieces_merge_by_rank(build: Write) -> None:
    assert texts(build(), "b a12345") == ["b", " a", "1234", "5"]


def test_each_rule_cuts_numbers_its_own_way(build: Write) -> None:
    cuts = {name: texts(build(pre=name, add_bos_token=False), "12345") for name in PRE_TOKENIZATIONS}
    by_rule = {tuple(cut): sorted(name for name in cuts if cuts[name] == cut) for cut in cuts.values()}
    assert by_rule == {
        ("1234", "5"): ["gpt-2", "olmo"],
        ("1", "2", "3", "4", "5"): ["codeshell", "deepseek-r1-qwen", "qwen2", "refact", "smollm", "starcoder"],
        ("123", "4", "5"): ["llama-bpe", "llama-v3", "llama3"],
    }


def test_a_space_before_digits_belongs_to_none_of_them_in_smollm(build: Write) -> None:
    assert texts(build(pre="smollm"), "b  1 2") == ["b", " ", " ", "1", " ", "2"]


def test_a_whole_piece_that_is_a_token_needs_no_merges_in_llama_3(build: Write) -> None:
    assert texts(build(pre="llama-bpe", add_bos_token=False), "ab") == ["ab"]
    assert texts(build(pre="gpt-2"), "ab") == ["a", "b"]


def test_qwen_2_composes_characters(build: Write) -> None:
    assert build(pre="qwen2").decode(build(pre="qwen2").encode("e\u0301")) == "é"
    assert build(pre="gpt-2").decode(build(pre="gpt-2").encode("e\u0301")) == "e\u0301"


def test_flags_decide_what_is_added_around_a_prompt(build: Write) -> None:
    assert texts(build(), "b") == ["b"]
    assert texts(build(add_bos_token=True), "b") == ["<s>", "b"]
    assert texts(build(add_bos_token=True, add_eos_token=True), "b") == ["<s>", "b", "</s>"]
    assert texts(build(pre="llama-bpe"), "b") == ["<s>", "b"]  # by default
    assert texts(build(pre="llama-bpe", add_bos_token=False), "b") == ["b"]
    assert build(add_bos_token=True).encode("b", add_special_tokens=False) == [ord("b")]


def test_end_tokens_are_all_that_the_file_names(build: Write) -> None:
    assert build().eos_token_ids == (257,)
    assert build(eot=258).eos_token_ids == (257, 258)
    assert build(eot=257).eos_token_ids == (257,)
    assert build().bos_token_id == 256


def test_control_tokens_are_special_and_user_defined_ones_are_text(build: Write) -> None:
    tokenizer = build()
    assert tokenizer.special_token_ids == {256, 257, 258}
    ids = tokenizer.encode("b<eot><tool>b")
    assert ids[1:3] == [258, 259]
    assert tokenizer.decode(ids) == "b<tool>b"


def test_the_template_knows_the_special_tokens(build: Write) -> None:
    tokenizer = build(template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}")
    assert tokenizer.render_chat([{"role": "user", "content": "b"}]) == "<s>b</s>"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model": "t5"}, r"of type 't5' .*'gpt2' .* and 'llama'"),
        ({"model": "bert"}, r"of type 'bert'"),
        ({"model": None}, r"is not in the file"),
        ({"pre": "mystery-7b"}, r"'mystery-7b', which is not known here; known are .*smollm"),
        ({"pre": None}, r"has no tokenizer\.ggml\.pre"),
        ({"merges": None}, r"has no tokenizer\.ggml\.merges"),
        ({"merges": ["x nothing"]}, r"do not fit the vocabulary"),
        ({"eos": 999}, r"tokenizer\.ggml\.eos_token_id is 999, the vocabulary has 265 tokens"),
    ],
)
def test_what_cannot_be_built_right_is_refused_by_name(
    build: Write, changes: dict[str, object], complaint: str
) -> None:
    with pytest.raises(StartupError, match=complaint):
        build(**changes)


def test_a_file_cut_short_is_refused(build: Write, tmp_path: Path) -> None:
    build()
    path = tmp_path / "short.gguf"
    whole = (tmp_path / "model.gguf").read_bytes()
    for size in (3, 20, 300, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(StartupError, match=r"cannot read .* as GGUF"):
            load_tokenizer(str(path))


@pytest.mark.model
@pytest.mark.slow
def test_the_embedded_models_fields_are_what_the_library_reads() -> None:
    path = find_tokenizer("smollm2")
    ours, theirs = GgufFile(path).metadata, GGUFReader(path).fields
    for name in ("tokens", "token_type", "merges", "pre", "model", "eos_token_id", "add_bos_token"):
        assert ours[f"tokenizer.ggml.{name}"] == theirs[f"tokenizer.ggml.{name}"].contents(), name
