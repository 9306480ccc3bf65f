"""The answers of the OpenAI-compatible API as schemas; tests hold the real answers against them."""

from __future__ import annotations

from typing import Literal

from app.reference.operation import Answer

FinishReason = Literal["stop", "length", "abort", "timeout", "tool_calls", "content_filter"]


class PromptTokensDetails(Answer):
    """Of the prompt's tokens."""

    cached_tokens: int


class Usage(Answer):
    """Tokens of one request: each prompt once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChatTopLogprob(Answer):
    """A token that was likely."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    """A token of the answer, with the likeliest ones in its place."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Answer):
    """One entry per token."""

    content: list[ChatTokenLogprob]
    refusal: None


class ChatMessage(Answer):
    """The answer."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Answer):
    """One of the n answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    """A whole answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class ChatDelta(Answer):
    """What a chunk adds to a message; the first chunk of a choice names the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(Answer):
    """News of one of the n answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatChunk(Answer):
    """One event of a streamed chat completion; with `include_usage` the last one has no choices but the usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(Answer):
    """Columns, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Answer):
    """One of the n texts of one of the prompts."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Answer):
    """A whole answer of /v1/completions; a stream's events have the same shape, and usage at the end only."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(Answer):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int


class ModelList(Answer):
    """All models: the one."""

    object: Literal["list"]
    data: list[Model]


class Tokens(Answer):
    """Token ids of a text or of a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(Answer):
    """The text of token ids."""

    prompt: str


class Version(Answer):
    """Of pagedeck."""

    version: str
