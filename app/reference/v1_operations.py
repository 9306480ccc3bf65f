"""The OpenAI-compatible API, one entry per route."""

from __future__ import annotations

from app.openai_api.messages_api import CountTokensBody, MessagesBody
from app.openai_api.responses_api import ResponsesBody
from app.openai_api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from app.reference.operation import Operation, Parameter
from app.reference.v1_answers import (
    ChatChunk,
    ChatCompletion,
    Completion,
    InputTokens,
    Message,
    MessageError,
    MessageEvent,
    Model,
    ModelList,
    ResponseEvent,
    ResponseObject,
    Text,
    Tokens,
    Version,
)

GENERATION, TOKENS, MODELS = "Generation", "Tokens", "Models"

_STREAM = (
    "A stream is server-sent events: `data:` with one JSON object each, then `data: [DONE]`. An error after its begin "
    'is an event `data: {"error": ...}`. A client that closes the connection ends the request in the engine.'
)
_GENERATION_ERRORS = {
    404: "another model's name",
    500: "the engine could not finish this request",
    503: "the queue is full, or the engine drains (with Retry-After), or it is dead",
}
_NO_MODEL = {404: "another model's name"}

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "create_chat_completion", GENERATION, "Answer a conversation",
        f"The messages go through the model's own chat template. {_STREAM}",
        body=(ChatBody,), answer=ChatCompletion, event=ChatChunk, errors=_GENERATION_ERRORS,
        example={
            "messages": [{"role": "user", "content": "What is a page table? One sentence."}],
            "max_tokens": 60, "temperature": 0.7, "stream": True,
        },
    ),
    Operation(
        "create_completion", GENERATION, "Go on with a text",
        f"No template: the prompt is what the model reads. {_STREAM}",
        body=(CompletionBody,), answer=Completion, event=Completion, errors=_GENERATION_ERRORS,
        example={"prompt": "The three laws of paging are", "max_tokens": 40, "stream": True},
    ),
    Operation(
        "create_response", GENERATION, "Responses, text only",
        "OpenAI's newer API for the same. Nothing is stored, no tool is called. A stream is server-sent events with "
        "their type as name, from `response.created` to `response.completed` or `response.incomplete`.",
        body=(ResponsesBody,), answer=ResponseObject, event=ResponseEvent, is_closed_by_done=False,
        errors=_GENERATION_ERRORS,
        example={"input": "Name three uses of a page table.", "max_output_tokens": 60, "stream": True},
    ),
    Operation(
        "create_message", GENERATION, "Messages, text only",
        "Anthropic's API for the same; its clients send their key as `x-api-key`. A stream is server-sent events with "
        "their type as name, from `message_start` to `message_stop`.",
        body=(MessagesBody,), answer=Message, event=MessageEvent, is_closed_by_done=False, error=MessageError,
        errors=_GENERATION_ERRORS,
        example={
            "max_tokens": 60, "system": "Answer in one sentence.",
            "messages": [{"role": "user", "content": "What is a page table?"}], "stream": True,
        },
    ),
    Operation(
        "list_models", MODELS, "List the models", "One server has one model.", answer=ModelList,
    ),
    Operation(
        "get_model", MODELS, "One model", "Names may hold slashes.", answer=Model, errors=_NO_MODEL,
        parameters=(Parameter("model", "path", "Its name.", required=True, example="{model}"),),
    ),
    Operation("version", MODELS, "pagedeck's version", answer=Version),
    Operation(
        "tokenize", TOKENS, "Text to token ids",
        "With `messages` through the chat template, with `prompt` as it is.",
        body=(TokenizeTextBody, TokenizeChatBody), answer=Tokens, errors=_NO_MODEL,
        example={"prompt": "paged attention", "return_token_strs": True},
    ),
    Operation(
        "count_message_tokens", TOKENS, "Tokens of messages", "As `/v1/messages` would read them.",
        body=(CountTokensBody,), answer=InputTokens, error=MessageError, errors=_NO_MODEL,
        example={"messages": [{"role": "user", "content": "paged attention"}]},
    ),
    Operation(
        "detokenize", TOKENS, "Token ids to text", "Special tokens are part of the text.",
        body=(DetokenizeBody,), answer=Text, errors=_NO_MODEL, example={"tokens": [504, 1056, 253]},
    ),
)  # fmt: skip
