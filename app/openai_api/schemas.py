"""The bodies that clients send, and the sampling parameters they stand for.

Types are checked here, ranges by `SamplingParams.validate` and the engine, so that each range is written once. Unknown
fields are ignored; a known one that asks for what is not there is refused, because silence would be a lie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from app.json_body import Body
from app.openai_api.structured_fields import ResponseFormat, StructuredFields
from app.openai_api.tool_fields import FunctionFields, ToolFields
from engine.errors import InvalidValueError
from engine.sampling_params import MAX_LOGPROBS, SamplingParams

MAX_PROMPTS = 1024
MAX_STOPS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_ALLOWED_TOKEN_IDS = 2**18
DEFAULT_COMPLETION_TOKENS = 16

_NO_DEFAULTS: Mapping[str, float] = {}

Prompt = str | list[int]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

# Fields that would change the answer, and the values with which they don't.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "web_search_options": (),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "guided_whitespace_pattern": (),
}


def refuse(data: Any, unsupported: Mapping[str, tuple[object, ...]]) -> Any:
    """`data`, a body, if each field in `unsupported` is absent or has one of the values named there.

    Raises:
        InvalidValueError: the first that has not.
    """
    for name, harmless in unsupported.items():
        value = data.get(name) if isinstance(data, dict) else None
        if value is not None and value not in harmless:
            raise InvalidValueError(name, value, "absent: this server cannot do it")
    return data


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


def stops(value: object, field: str = "stop") -> object:
    """A string or a list of them as a list."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{field} should be a string or a list of strings")
    if len(texts) > MAX_STOPS:
        raise ValueError(f"{field} should be at most {MAX_STOPS} strings, got {len(texts)}")
    return texts


def _stops(value: object) -> object:
    return stops(value)


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
    continuous_usage_stats: bool = False


class SamplingFields(StructuredFields):
    """What every API takes, by the names of OpenAI and vLLM."""

    model: str | None = None
    stream: bool = False
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
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[int], Field(max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    priority: Int64 = 0
    queue_timeout_s: float | None = None
    request_timeout_s: float | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_:-]{1,128}$")] | None = None
    return_timings: bool = False

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        return refuse(data, _UNSUPPORTED)

    def _params(
        self, defaults: Mapping[str, float], *, n: int = 1, max_tokens: int | None, logprobs: int | None = None
    ) -> SamplingParams:
        """Args: defaults, of the model, where the client is silent; the rest, what the APIs name differently."""
        names = (
            "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
            "repetition_penalty", "include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens",
        )  # fmt: skip
        known = {name: value for name, value in defaults.items() if name in names}
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        allowed = self.allowed_token_ids
        return SamplingParams(
            n=n,
            logit_bias=tuple((self.logit_bias or {}).items()),
            stop=tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            max_tokens=max_tokens,
            logprobs=logprobs,
            allowed_token_ids=None if allowed is None else tuple(allowed),
            **known | given,
        )


class GenerationBody(SamplingFields):
    """What chat and completions take."""

    stream_options: StreamOptions | None = None
    n: int = 1
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool = False

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise InvalidValueError("stream_options", self.stream_options.model_dump(), "absent unless stream is true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether each chunk of the stream tells the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats and self.include_usage

    def _generation_params(
        self, defaults: Mapping[str, float], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        params = self._params(defaults, n=self.n, max_tokens=max_tokens, logprobs=logprobs)
        asked = None if self.response_format is None else self.response_format.spec()
        return replace(params, prompt_logprobs=self.prompt_logprobs, structured=self.structured_spec(asked))


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True

    @property
    def is_echo_only(self) -> bool:
        """Whether the prompt is all that is wanted, for its log-probabilities."""
        return self.echo and self.max_tokens == 0

    def sampling_params(self, defaults: Mapping[str, float] = _NO_DEFAULTS) -> SamplingParams:
        """What the engine is asked for; it always makes a token, also where only the prompt is wanted."""
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        if self.is_echo_only:
            max_tokens = 1
        params = self._generation_params(defaults, max_tokens=max_tokens, logprobs=self.logprobs)
        if self.echo and self.logprobs is not None:
            asked = -1 if self.prompt_logprobs is None else self.prompt_logprobs
            params = replace(params, prompt_logprobs=max(asked, self.logprobs))
        return params


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


class ChatBody(GenerationBody, ChatFields, ToolFields, FunctionFields):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    def sampling_params(self, defaults: Mapping[str, float] = _NO_DEFAULTS) -> SamplingParams:
        """What the engine is asked for; `defaults` are the model's, where the client is silent.

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
        if max_tokens is None and "max_tokens" in defaults:
            max_tokens = int(defaults["max_tokens"])
        return self._generation_params(defaults, max_tokens=max_tokens, logprobs=top if self.logprobs else None)


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
