"""Sentencepiece's byte-pair tokenizer built from pieces and scores, against its rule written out."""

from __future__ import annotations

from typing import Any

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import StartupError
from engine.tokenizer.gguf_tokenizer import tokenizer_from_metadata
from engine.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.byte_pairs import ReferenceSentencepiece

# Best score first; "the" can be cut in two ways, "▁▁▁" as well, and "aaa" overlaps itself.
PIECES = ["th", "▁t", "▁▁", "he", "the", "▁the", "aa", "aaa", "aaaa", "▁a", "▁▁▁", "▁▁▁▁", "tt", "é日"]
LETTERS = ["▁", "t", "h", "e", "a", "é", "日"]
CONTROL = ["<unk>", "<s>", "</s>", "<turn>"]
TOKENS = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *LETTERS]
SCORES = [0.0] * 260 + [-float(rank) for rank in range(len(PIECES) + len(LETTERS))]
TYPES = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 3, *[TokenType.BYTE] * 256]
TYPES += [TokenType.NORMAL] * (len(PIECES) + len(LETTERS))

texts = st.text(st.sampled_from("the a▁é日zž🚀\n"), max_size=25)


def build(**changes: Any) -> Tokenizer:
    fields = {"model": "llama", "pre": "default", "tokens": TOKENS, "scores": SCORES, "token_type": TYPES}
    fields |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "eot_token_id": 3, **changes}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}
    return tokenizer_from_metadata(metadata, name="pieces")


PREFIXED, PLAIN = build(), build(add_space_prefix=False, add_bos_token=False)


@given(texts)
def test_pieces_join_as_sentencepiece_joins_them(text: str) -> None:
    for tokenizer, prefix in ((PREFIXED, True), (PLAIN, False)):
        reference = ReferenceSentencepiece(TOKENS, SCORES, add_space_prefix=prefix)
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text)


@given(texts.filter(lambda text: "▁" not in text))
def test_text_comes_back(text: str) -> None:
    assert PREFIXED.decode(PREFIXED.encode(text)) == text
    assert PLAIN.decode(PLAIN.encode(text)) == text


def test_what_the_file_does_not_say_is_llamas_way() -> None:
    assert PREFIXED.encode("the")[0] == 1
    assert [PREFIXED.token_text(token_id) for token_id in PREFIXED.encode("the")] == ["<s>", " the"]
    assert [PLAIN.token_text(token_id) for token_id in PLAIN.encode("the")] == ["the"]
    assert PREFIXED.eos_token_ids == (2, 3)


def test_special_tokens_in_a_text_are_parsed_and_left_out_of_the_decoding() -> None:
    ids = PLAIN.encode("the<turn>a")
    assert ids == [TOKENS.index("the"), 3, TOKENS.index("a")]
    assert PLAIN.decode(ids) == "thea"


def test_user_defined_spaces_are_found_before_anything_is_joined() -> None:
    tokens = [*TOKENS, "  ", "   "]
    types = [*TYPES, TokenType.USER_DEFINED, TokenType.USER_DEFINED]
    tokenizer = build(
        tokens=tokens, token_type=types, scores=[*SCORES, 0.0, 0.0], add_space_prefix=False, add_bos_token=False
    )
    assert [tokenizer.token_text(token_id) for token_id in tokenizer.encode("a   the  a")] == [
        "a",
        "   ",
        "the",
        "  ",
        "a",
    ]
    assert tokenizer.decode(tokenizer.encode("a   the  a")) == "a   the  a"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"scores": None}, r"pieces: the file has no tokenizer\.ggml\.scores"),
        ({"scores": [0.0]}, rf"tokenizer\.ggml\.scores has 1 values for {len(TOKENS)} tokens"),
        ({"token_type": None}, r"has no tokenizer\.ggml\.token_type"),
    ],
)
def test_a_file_that_lacks_something_is_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(StartupError, match=complaint):
        build(**changes)
