"""The bodies that clients send, and the sampling parameters they stand for.

Types are checked here, ranges by `SamplingParams.validate` and the engine, so that each range is written once. Unknown
fields are ignored; a known one that asks for what is not there is refused, because silence would be a lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from app.json_body import Body
from engine.errors import InvalidValueError
from engine.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_PROMPTS = 1024
MAX_STOPS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
DEFAULT_COMPLETION_TOKENS = 16

Prompt = str | list[int]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

# Fields of the two APIs that would change the answer, and the values with which they don't.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
}


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _prompts(value: object) -> object:
    """A string, token ids, or a list of either, as a list of prompts."""
    allowed = "prompt should be a string, a list of strings, a list of token ids, or a list of lists of token ids"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(allowed)
    if not value:
        raise ValueError("prompt should not be empty")
    if all(_is_int(item) for item in value):
        return [value]
    is_texts = all(isinstance(item, str) for item in value)
    is_ids = all(isinstance(item, list) and item and all(_is_int(token) for token in item) for item in value)
    if not (is_texts or is_ids):
        raise ValueError(allowed)
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"prompt should be at most {MAX_PROMPTS} prompts, got {len(value)}")
    return value


def _stops(value: object) -> object:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("stop should be a string or a list of strings")
    if len(texts) > MAX_STOPS:
        raise ValueError(f"stop should be at most {MAX_STOPS} strings, got {len(texts)}")
    return texts


def _logit_bias(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("logit_bias should be an object of token ids and numbers")
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"logit_bias should be at most {MAX_LOGIT_BIASES} tokens, got {len(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        digits = key.removeprefix("-")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
            raise ValueError(f"logit_bias should have token ids as keys, got {key[:40]!r}")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"logit_bias should have numbers as values, got {str(bias)[:40]!r}")
        biases[int(key)] = bias
    return biases


class StreamOptions(Body):
    """What a stream carries besides the answer."""

    include_usage: bool = False


class GenerationBody(Body):
    """What both APIs take."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_logit_bias)] | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    skip_special_tokens: bool | None = None
    priority: Int64 = 0
    queue_timeout_s: float | None = None
    request_timeout_s: float | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        for name, harmless in _UNSUPPORTED.items():
            value = data.get(name) if isinstance(data, dict) else None
            if value is not None and value not in harmless:
                raise InvalidValueError(name, value, "absent: this server cannot do it")
        return data

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidValueError("stream_options", self.stream_options.model_dump(), "absent unless stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def _params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        names = (
            "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
        )  # fmt: skip
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return SamplingParams(
            n=self.n,
            logit_bias=tuple((self.logit_bias or {}).items()),
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            max_tokens=max_tokens,
            logprobs=logprobs,
            **given,
        )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    logprobs: int | None = None
    add_special_tokens: bool = True

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for."""
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self._params(max_tokens=max_tokens, logprobs=self.logprobs)


class ChatFields(Body):
    """How messages become a prompt; shared with /tokenize."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_prompt_end(self) -> ChatFields:
        given = self.model_fields_set
        if self.continue_final_message and self.add_generation_prompt and "add_generation_prompt" in given:
            raise InvalidValueError("continue_final_message", True, "false where add_generation_prompt is true")
        return self


class ChatBody(GenerationBody, ChatFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for.

        Raises:
            InvalidValueError: a field that has another name in `SamplingParams` is out of range.
        """
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            raise InvalidValueError("max_completion_tokens", self.max_completion_tokens, "an integer >= 1")
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise InvalidValueError("top_logprobs", top, f"an integer in [0, {MAX_LOGPROBS}]")
        if top and not self.logprobs:
            raise InvalidValueError("top_logprobs", top, "absent unless logprobs is true")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._params(max_tokens=max_tokens, logprobs=top if self.logprobs else None)


class TokenizeTextBody(Body):
    """POST /tokenize with a prompt."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatFields):
    """POST /tokenize with messages."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def text_of_final_message(messages: Sequence[dict[str, Any]]) -> str:
    """The text of the last message, which must be an assistant's.

    Raises:
        InvalidValueError: it is of another role, or has no text.
    """
    final = messages[-1] if messages else {}
    content = final.get("content")
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if final.get("role") != "assistant" or not isinstance(content, str):
        raise InvalidValueError("continue_final_message", True, "false unless the last message is an assistant's text")
    return content
