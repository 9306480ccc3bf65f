"""Streamed text is the decode of all tokens, in valid pieces (cases U1, U2, U3)."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers

from engine.tokenizer.detokenizer import Detokenizer, WindowDecoder
from engine.tokenizer.tokenizer import Tokenizer
from tests.helpers.tokenizers import BOS, EOS, VOCAB_SIZE, byte_tokenizer

TEXTS = [
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "👩‍🚀 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇨🇿",
    "你好,世界。日本語テキスト 한국어",
    "नमस्ते สวัสดี العربية עברית",
    "e\u0301 combining, \u200b zero width, \ufeff mark, \ufffd itself",
    "𝒳 𐍈 \U0010ffff",
    "",
]


def sentencepiece_tokenizer(*, strip: bool = True) -> Tokenizer:
    """A vocabulary in the manner of Llama 2: "▁" for a space, tokens for bytes, a space put in front."""
    words = ["▁", "▁Hello", "Hello", "▁world", "w", "▁▁", "é", "▁日本", "\n"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return Tokenizer(backend, eos_token_ids=(2,), bos_token_id=1)


def metaspace_tokenizer() -> Tokenizer:
    """A tokenizer whose decoder asks whether a token is the first: there is no table for it."""
    words = ["<s>", "▁Hello", "Hello", "▁world", "!", "▁"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>"))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend, eos_token_ids=(0,))


BYTES, SENTENCEPIECE, NO_STRIP = byte_tokenizer(), sentencepiece_tokenizer(), sentencepiece_tokenizer(strip=False)
METASPACE = metaspace_tokenizer()


def stream(
    tokenizer: Tokenizer, token_ids: list[int], prompt: tuple[int, ...] = (), *, skip: bool = True
) -> tuple[list[str], str]:
    """The deltas, one per token, and the flush."""
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [detokenizer.feed(token_id) for token_id in token_ids], detokenizer.flush()


def assert_streams_as_decoded(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool = True) -> None:
    deltas, rest = stream(tokenizer, token_ids, skip=skip)
    for delta in deltas:
        delta.encode("utf-8")  # no lone surrogate
    assert "".join(deltas) + rest == tokenizer.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [BYTES, SENTENCEPIECE, NO_STRIP], ids=["bytes", "sentencepiece", "no strip"])
def test_characters_split_over_tokens_arrive_whole(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    deltas, rest = stream(tokenizer, token_ids)
    assert "".join(deltas) + rest == text == tokenizer.decode(token_ids)
    assert rest == ""
    assert "".join(deltas).count("\ufffd") == text.count("\ufffd")


def test_a_character_goes_out_with_its_last_byte() -> None:
    assert stream(BYTES, list("é🚀".encode())) == (["", "é", "", "", "", "🚀"], "")


def test_a_broken_character_is_replaced_only_when_that_is_certain() -> None:
    rocket = list("🚀".encode())
    assert stream(BYTES, rocket[:3]) == (["", "", ""], "\ufffd")
    assert stream(BYTES, [*rocket[:3], ord("x")]) == (["", "", "", "\ufffdx"], "")
    assert stream(BYTES, [0x80, ord("x"), 0xFF, ord("y")]) == (["\ufffd", "x", "\ufffd", "y"], "")


def test_the_stream_recovers_after_bytes_that_are_no_text() -> None:
    deltas, rest = stream(BYTES, [0xF0, 0x9F, *"kůň".encode()])
    assert "".join(deltas) + rest == "\ufffdkůň"


def test_special_tokens_are_left_out_or_written_out() -> None:
    token_ids = [BOS, ord("a"), EOS, ord("b")]
    assert stream(BYTES, token_ids) == (["", "a", "", "b"], "")
    assert stream(BYTES, token_ids, skip=False) == (["<|bos|>", "a", "<|eos|>", "b"], "")


def test_a_character_may_have_a_left_out_token_inside() -> None:
    assert stream(BYTES, [0xC3, EOS, 0xA9]) == (["", "", "é"], "")


def test_ids_that_are_no_token_add_nothing() -> None:
    assert stream(BYTES, [ord("a"), VOCAB_SIZE, 10**6, ord("b")]) == (["a", "", "", "b"], "")
    assert stream(BYTES, [0xC3, 10**6, 0xA9]) == (["", "", "é"], "")


def test_a_first_space_is_dropped_at_the_start_and_kept_after_a_prompt() -> None:
    hello, world = SENTENCEPIECE.token_id("▁Hello"), SENTENCEPIECE.token_id("▁world")
    assert hello is not None
    assert world is not None
    assert stream(SENTENCEPIECE, [hello, world]) == (["Hello", " world"], "")
    assert stream(SENTENCEPIECE, [world], prompt=(1, hello)) == ([" world"], "")
    assert stream(SENTENCEPIECE, [1, hello], prompt=(1,)) == (["", "Hello"], "")
    assert stream(NO_STRIP, [hello]) == ([" Hello"], "")


def test_a_decoder_without_a_table_goes_through_a_window() -> None:
    assert METASPACE.table is None
    assert stream(METASPACE, [1, 3, 4, 5, 3]) == (["Hello", " world", "!", " ", " world"], "")
    assert stream(METASPACE, [3, 0, 4], prompt=(1,)) == ([" world", "", "!"], "")
    assert stream(METASPACE, [1, 99, 3]) == (["Hello", "", " world"], "")


@given(st.lists(st.integers(0, VOCAB_SIZE + 5), max_size=60), st.booleans())
def test_any_token_ids_stream_as_they_decode(token_ids: list[int], skip: bool) -> None:
    assert_streams_as_decoded(BYTES, token_ids, skip=skip)


# Only the bytes that UTF-8 is subtle about: starts of 2 to 4, continuations, surrogates, overlong, never valid.
@given(st.lists(st.sampled_from([0x41, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xF0, 0x9F, 0xC0, 0xF4, 0xF5, 0xFF])))
def test_any_bytes_stream_as_the_library_decodes_them(token_ids: list[int]) -> None:
    assert_streams_as_decoded(BYTES, token_ids)
    assert BYTES.decode(token_ids) == BYTES._backend.decode(token_ids)


@given(st.lists(st.integers(0, SENTENCEPIECE.vocab_size + 2), max_size=40), st.booleans())
def test_any_sentencepiece_ids_stream_as_they_decode(token_ids: list[int], skip: bool) -> None:
    assert_streams_as_decoded(SENTENCEPIECE, token_ids, skip=skip)
    assert_streams_as_decoded(NO_STRIP, token_ids, skip=skip)


@given(st.text(max_size=30))
def test_sentencepiece_text_decodes_as_the_library_decodes_it(text: str) -> None:
    token_ids = SENTENCEPIECE.encode(text)
    for skip in (True, False):
        expected = SENTENCEPIECE._backend.decode(token_ids, skip_special_tokens=skip)
        assert SENTENCEPIECE.decode(token_ids, skip_special_tokens=skip) == expected


@given(st.lists(st.integers(0, SENTENCEPIECE.vocab_size - 1), max_size=6), st.text("Helo wrd日é", max_size=12))
def test_after_a_prompt_the_text_is_what_the_prompt_lacks(prompt: list[int], text: str) -> None:
    output = SENTENCEPIECE.encode(text)
    prompt = [token_id for token_id in prompt if SENTENCEPIECE.token_bytes(token_id).isascii()]
    deltas, rest = stream(SENTENCEPIECE, output, tuple(prompt), skip=False)
    whole = SENTENCEPIECE.decode([*prompt, *output], skip_special_tokens=False)
    assert SENTENCEPIECE.decode(prompt, skip_special_tokens=False) + "".join(deltas) + rest == whole


@given(st.lists(st.integers(0, 7), max_size=30))
def test_a_window_streams_as_it_decodes(token_ids: list[int]) -> None:
    assert_streams_as_decoded(METASPACE, token_ids)


@given(st.lists(st.integers(0, 299), max_size=40))
def test_a_window_over_a_table_agrees_wherever_the_bytes_are_text(token_ids: list[int]) -> None:
    window = WindowDecoder(BYTES, (), True)
    text = "".join(window.feed(token_id) for token_id in token_ids) + window.flush()
    expected = BYTES.decode(token_ids)
    if "\ufffd" not in expected:
        assert text == expected


@pytest.mark.model
@pytest.mark.parametrize("text", TEXTS)
def test_the_models_tokens_arrive_whole(smollm2: Tokenizer, text: str) -> None:
    token_ids = smollm2.encode(text)
    deltas, rest = stream(smollm2, token_ids)
    assert "".join(deltas) + rest == text
    assert "".join(deltas).count("\ufffd") == text.count("\ufffd")


@pytest.mark.model
@given(token_ids=st.lists(st.integers(0, 49151), max_size=50), skip=st.booleans())
def test_any_tokens_of_the_model_stream_as_the_library_decodes_them(
    smollm2: Tokenizer, token_ids: list[int], skip: bool
) -> None:
    assert_streams_as_decoded(smollm2, token_ids, skip=skip)
    assert smollm2.decode(token_ids, skip_special_tokens=skip) == smollm2._backend.decode(
        token_ids, skip_special_tokens=skip
    )
