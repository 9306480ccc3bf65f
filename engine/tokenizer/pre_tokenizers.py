"""How text is cut before byte-pair merging, by the name a GGUF file gives it (`tokenizer.ggml.pre`).

The merges were learned on pieces cut in one particular way; another way gives other tokens for the same text, and a
model that reads them worse without any error. So each name is listed with its rule, and one that is not is refused.

The rules are those of the models' own tokenizers: GPT-2's expression (byte-level's built-in one), the same after
splitting off digits one by one (StarCoder, SmolLM), and the expressions Llama 3 and Qwen 2 publish in their
tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from engine.errors import StartupError

# Contractions, words with one leading non-letter, numbers, punctuation with its line ends, line ends, other space.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """What one name stands for."""

    build: Callable[[], PreTokenizer]
    ignore_merges: bool = False  # a piece that is a token as a whole is taken without merging
    add_bos: bool = False  # where the file does not say
    normalizer: Callable[[], Normalizer] | None = None


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        split = Split(Regex(pattern), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_GPT2 = PreTokenization(_gpt2)
_DIGITS = PreTokenization(_digits_then_gpt2)
_LLAMA3 = PreTokenization(_split(_LLAMA_3), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenization(_split(_QWEN_2), normalizer=NFC)

PRE_TOKENIZATIONS: dict[str, PreTokenization] = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def pre_tokenization(name: str) -> PreTokenization:
    """The rule of that name.

    Raises:
        StartupError: there is none; the message has the name and those that are known.
    """
    found = PRE_TOKENIZATIONS.get(name)
    if found is None:
        known = ", ".join(sorted(PRE_TOKENIZATIONS))
        raise StartupError(
            f"this GGUF file's pre-tokenizer (tokenizer.ggml.pre) is {name!r}, which is not known here; known are "
            f"{known}. A tokenizer.json of the same model can be given with --tokenizer"
        )
    return found
