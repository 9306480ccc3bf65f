"""The answers of the OpenAI-compatible API as schemas; tests hold the real answers against them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from app.reference.operation import Answer, ErrorDetail

FinishReason = Literal["stop", "length", "abort", "timeout"]


class Timings(Answer):
    """With `return_timings`: seconds of one sequence on the engine's clock; null for what never happened."""

    queue_s: float | None
    prefill_s: float | None
    ttft_s: float | None
    decode_s: float | None
    tpot_s: float | None
    e2e_s: float
    num_preemptions: int


class PromptLogprob(Answer):
    """What is known of one token in a place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; none for the first token


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
    timings: Timings | None = None


class ChatCompletion(Answer):
    """A whole answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


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
    timings: Timings | None = None


class ChatChunk(Answer):
    """One event of a streamed chat completion; with `include_usage` the last one has no choices but the usage."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


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
    prompt_logprobs: PromptLogprobs | None = None
    timings: Timings | None = None


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


class OutputText(Answer):
    """The text of an answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class OutputMessage(Answer):
    """The one item of an answer."""

    type: Literal["message"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"]
    content: list[OutputText]


class CachedInput(Answer):
    """Of the input tokens."""

    cached_tokens: int


class ReasoningOutput(Answer):
    """Of the output tokens: none is for reasoning."""

    reasoning_tokens: int


class ResponseUsage(Answer):
    """Tokens, by the names of the Responses API."""

    input_tokens: int
    input_tokens_details: CachedInput
    output_tokens: int
    output_tokens_details: ReasoningOutput
    total_tokens: int


class IncompleteDetails(Answer):
    """Why an answer ended before its end."""

    reason: str


class ResponseError(Answer):
    """Why a response failed."""

    code: str
    message: str


class ResponseObject(Answer):
    """A whole answer of /v1/responses. Nothing is stored."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputMessage]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, None]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Literal["none"]
    tools: list[Any]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    timings: Timings | None = None


class ResponseEvent(BaseModel):
    """An event of a streamed response, numbered; OpenAI's reference says what each type holds."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed", "response.incomplete", "response.failed", "error",
    ]  # fmt: skip
    sequence_number: int


class TextBlock(Answer):
    """The text of a message."""

    type: Literal["text"]
    text: str


class MessageUsage(Answer):
    """Tokens, as Anthropic counts them: what came from the cache is apart from the other input."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(Answer):
    """A whole answer of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "abort", "timeout"] | None
    stop_sequence: str | None
    usage: MessageUsage
    timings: Timings | None = None


class MessageEvent(BaseModel):
    """An event of a streamed message; Anthropic's reference says what each type holds."""

    model_config = ConfigDict(extra="allow")

    type: Literal[
        "message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "error",
    ]  # fmt: skip


class MessageError(Answer):
    """An error as Anthropic's clients read it: `type` is "error" where the request had reached this API."""

    type: Literal["error"] = "error"
    error: ErrorDetail


class InputTokens(Answer):
    """How long a conversation is."""

    input_tokens: int
