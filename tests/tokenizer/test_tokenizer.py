"""The embedded model's tokenizer: known facts, two independent paths, and what loading refuses."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RequestError, StartupError
from engine.tokenizer.chat_template import ChatTemplateError
from engine.tokenizer.source import find_tokenizer
from engine.tokenizer.tokenizer import TextError, Tokenizer, load_tokenizer
from tests.helpers.tokenizers import BOS, EOS, IM_END, IM_START, VOCAB_SIZE, byte_tokenizer
from tests.tokenizer.byte_pairs import ReferenceBpe

BYTES = byte_tokenizer()
SAMPLES = [
    "Hello, world!",
    "a  3",
    "In 2024, 1234567 users (3.14%) paid $99.",
    "  leading, trailing  \n\n\ttabs\r\n",
    "def f(x):\n    return x ** 2  # it's, we'll, they've, I'd, don't, DON'T\n",
    "Příliš žluťoučký kůň úpěl ďábelské ódy",
    "你好世界 日本語 한국어 العربية ٣٤٥ Ⅷ ½ ²",
    "👩‍🚀 👨‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u00a0 \u3000 \ufeff",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_start|><|im_end|><|endoftext|><|not_special|>",
    "",
]

model = pytest.mark.model


# -- the embedded model


@model
def test_facts_of_the_embedded_vocabulary(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.bos_token_id == 1
    assert smollm2.special_token_ids == frozenset(range(17))
    assert [smollm2.token_text(i) for i in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@model
def test_digits_are_cut_one_by_one(smollm2: Tokenizer) -> None:
    assert smollm2.encode("a  3") == [81, 256, 35]
    assert [smollm2.token_text(i) for i in smollm2.encode("12345")] == list("12345")
    assert [smollm2.token_text(i) for i in smollm2.encode("x=10 20")] == ["x", "=", "1", "0", " ", "2", "0"]


@model
def test_nothing_is_added_around_a_prompt(smollm2: Tokenizer) -> None:
    assert smollm2.encode("Hi") == smollm2.encode("Hi", add_special_tokens=False)


@model
def test_special_tokens_in_a_text_are_parsed(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2


@model
@pytest.mark.parametrize("text", SAMPLES)
def test_tokens_are_those_of_byte_pair_merging_written_out(
    smollm2: Tokenizer, reference: ReferenceBpe, text: str
) -> None:
    assert smollm2.encode(text) == reference.encode(text)


@model
@given(text=st.text(st.sampled_from("aeinot' \n\t0123.,é日🚀²"), max_size=30) | st.text(max_size=20))
def test_any_text_has_the_reference_tokens_and_comes_back(
    smollm2: Tokenizer, reference: ReferenceBpe, text: str
) -> None:
    ids = smollm2.encode(text)
    assert ids == reference.encode(text)
    if reference.has_all_bytes_of(text):
        assert smollm2.decode(ids, skip_special_tokens=False) == text


@model
@pytest.mark.slow
def test_tokens_are_those_of_transformers_once_it_splits_digits(smollm2: Tokenizer) -> None:
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    path = find_tokenizer("smollm2")
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).backend_tokenizer
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in SAMPLES:
        assert smollm2.encode(text) == theirs.encode(text, add_special_tokens=False).ids


@model
def test_the_embedded_chat_template(smollm2: Tokenizer) -> None:
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    expected = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert smollm2.render_chat([{"role": "user", "content": parts}]) == expected
    assert smollm2.render_chat([{"role": "user", "content": "a\nb"}]) == expected
    brief = smollm2.render_chat([{"role": "developer", "content": "Be brief"}, {"role": "user", "content": "a"}])
    assert brief.startswith("<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\na<|im_end|>")


# -- encoding and decoding


def test_bytes_of_a_token_and_its_text_for_display() -> None:
    assert BYTES.token_bytes(0xE2) == b"\xe2"
    assert BYTES.token_text(0xE2) == "bytes:\\xe2"
    assert BYTES.token_text(EOS) == "<|eos|>"
    assert BYTES.token_text(ord("a")) == "a"
    assert BYTES.token_bytes(VOCAB_SIZE) == b""


def test_no_two_tokens_look_the_same() -> None:
    assert len({BYTES.token_text(token_id) for token_id in range(VOCAB_SIZE)}) == VOCAB_SIZE


def test_decoding_leaves_out_special_tokens_and_unknown_ids() -> None:
    ids = [BOS, ord("a"), 10**6, -1, EOS]
    assert BYTES.decode(ids) == "a"
    assert BYTES.decode(ids, skip_special_tokens=False) == "<|bos|>a<|eos|>"


def test_half_a_surrogate_pair_costs_one_request() -> None:
    with pytest.raises(TextError, match="half of a surrogate pair at character 2") as caught:
        BYTES.encode("ab\ud83d")
    assert isinstance(caught.value, RequestError)


def test_threads_encode_the_same() -> None:
    texts = [f"{number} žluťoučký kůň <|im_end|> 🚀" * 20 for number in range(40)]
    expected = [BYTES.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(BYTES.encode, texts)) == expected
        assert list(pool.map(BYTES.decode, expected, chunksize=1)) == [BYTES.decode(ids) for ids in expected]


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    # Were the interpreter's lock held, the longest pause of this thread would be the whole encoding.
    text = "the quick brown fox " * 40_000
    with ThreadPoolExecutor(1) as pool:
        begin = last = time.perf_counter()
        encoding = pool.submit(BYTES.encode, text)
        longest = 0.0
        while not encoding.done():
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        end = time.perf_counter()
    assert max(longest, end - last) < (end - begin) / 2


def test_a_model_without_a_template_says_so() -> None:
    plain = Tokenizer(BYTES._backend, eos_token_ids=(EOS,))
    with pytest.raises(ChatTemplateError, match="no chat template"):
        plain.render_chat([{"role": "user", "content": "Hi"}])


def test_the_byte_tokenizer_is_what_it_says() -> None:
    assert BYTES.vocab_size == VOCAB_SIZE
    assert BYTES.eos_token_ids == (EOS, IM_END)
    assert BYTES.encode("é <|im_start|> the") == [0xC3, 0xA9, 0x20, IM_START, 260]
    assert BYTES.special_token_ids == frozenset(range(256, 260))


# -- finding


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("no such place", "neither"),
        ("/nowhere/at/all", "neither"),
        ("nowhere/model.gguf", "neither"),
        (__file__, "neither a .gguf file nor a directory"),
    ],
)
def test_a_tokenizer_that_is_not_there_is_refused_by_name(name: str, complaint: str) -> None:
    with pytest.raises(StartupError, match=complaint):
        load_tokenizer(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUX" + bytes(60))
    with pytest.raises(StartupError, match=r"cannot read .* as GGUF"):
        load_tokenizer(str(path))


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
