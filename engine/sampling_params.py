"""How one request wants its tokens chosen and when it wants them to end.

Plain data: the scheduler reads the limits, the sampler the rest. Ranges are checked in one place, `validate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import InvalidValueError

MAX_LOGPROBS = 20
MAX_BAD_WORDS = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters of one


@dataclass(frozen=True, slots=True)
class StructuredSpec:
    """What form the output must have."""

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    text: str  # the schema as JSON, the regex, the choices as a JSON list, the grammar as Lark or GBNF
    param: str = field(default="structured_outputs", compare=False)  # the field it came in, for messages


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request; the defaults are those of the OpenAI API where it has the field.

    The random numbers of a sequence depend only on (seed, position); child i of n uses seed + i. `seed=None` lets
    the engine draw one when the request is added.
    """

    n: int = 1
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0  # over the output (OpenAI)
    frequency_penalty: float = 0.0  # over the output (OpenAI)
    repetition_penalty: float = 1.0  # over prompt + output (Hugging Face)
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    stop: tuple[str, ...] = ()  # matched in the text, across tokens
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0  # no end token and no stop string before that many output tokens
    max_tokens: int | None = 16  # None = what is left of max_model_len and of the pool
    logprobs: int | None = None  # None = none; k = the sampled token's and the k best, 0 <= k <= 20
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first, 0 <= k <= 20
    allowed_token_ids: tuple[int, ...] | None = None  # None = all
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that the output must not contain
    structured: StructuredSpec | None = None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, with no random number."""
        return self.temperature == 0.0

    def validate(self, vocab_size: int) -> None:
        """Check every range against `vocab_size` (tokens).

        Raises:
            InvalidValueError: names the field, its value and the range.
        """
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _integer("n", self.n, 1)
        _integer("top_k", self.top_k, -1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise InvalidValueError("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidValueError("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise InvalidValueError("stop", text, "non-empty strings")
            if len(text) > MAX_STOP_LENGTH:
                raise InvalidValueError("stop", text, f"strings of at most {MAX_STOP_LENGTH} characters")
        _token_ids("stop_token_ids", self.stop_token_ids, vocab_size)
        for token_id, bias in self.logit_bias:
            _token_id("logit_bias", token_id, vocab_size)
            _number("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidValueError("allowed_token_ids", [], "at least one token id, or absent")
        _token_ids("allowed_token_ids", self.allowed_token_ids or (), vocab_size)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidValueError("bad_words", f"{len(self.bad_words)}", f"at most {MAX_BAD_WORDS} token sequences")
        for word in self.bad_words:
            if not word:
                raise InvalidValueError("bad_words", "", "words of at least one token")
            for token_id in word:
                _token_id("bad_words", token_id, vocab_size)


def _number(param: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (ok and (low < value if open_low else low <= value) and value <= high):  # type: ignore[operator]
        top = "∞)" if math.isinf(high) else f"{high:g}]"
        raise InvalidValueError(param, value, f"a number in {'(' if open_low else '['}{low:g}, {top}")


def _integer(param: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        limit = f"an integer >= {low}" if high is None else f"an integer in [{low}, {high}]"
        raise InvalidValueError(param, value, limit)


def _token_id(param: str, value: object, vocab_size: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise InvalidValueError(param, value, f"a token id in [0, {vocab_size - 1}]")


def _token_ids(param: str, values: tuple[int, ...], vocab_size: int) -> None:
    if len(values) > vocab_size:
        raise InvalidValueError(param, f"{len(values)} ids", f"at most as many ids as there are tokens ({vocab_size})")
    # Without a loop where all is well: there may be as many as the vocabulary has.
    if values and not ({*map(type, values)} == {int} and min(values) >= 0 and max(values) < vocab_size):
        for value in values:
            _token_id(param, value, vocab_size)
