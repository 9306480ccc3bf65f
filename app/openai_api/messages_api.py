"""Anthropic's Messages API in its text form: bodies, object, events and errors. The path is chat's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator
from starlette.responses import JSONResponse

from app.errors import ApiError
from app.json_body import Body
from app.openai_api.answer import Answer
from app.openai_api.generation import PromptDelta
from app.openai_api.results import Gathered, Json, UsageCount, timings
from app.openai_api.schemas import ChatFields, SamplingFields, stops
from app.openai_api.tool_fields import ToolFields
from engine.errors import InvalidValueError
from engine.sampling_params import SamplingParams

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


def _sequences(value: object) -> object:
    return stops(value, "stop_sequences")


class ConversationFields(Body):
    """How a conversation is written here."""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None

    def chat(self) -> ChatFields:
        """The same for the chat template: an assistant's last message is gone on with, as in Anthropic's API.

        Raises:
            InvalidValueError: `system` holds something else than text.
        """
        messages = list(self.messages)
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": _system_text(self.system)})
        goes_on = bool(messages) and messages[-1].get("role") == "assistant"
        return ChatFields.model_construct(messages=messages, continue_final_message=goes_on)


class MessagesBody(SamplingFields, ConversationFields, ToolFields):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], BeforeValidator(_sequences)] | None = None
    thinking: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _cannot_think(self) -> MessagesBody:
        if self.thinking is not None and self.thinking.get("type") != "disabled":
            raise InvalidValueError("thinking", self.thinking.get("type"), "disabled or absent")
        return self

    def sampling_params(self, defaults: Mapping[str, float]) -> SamplingParams:
        """What the engine is asked for."""
        params = self._params(defaults, max_tokens=self.max_tokens)
        stop = tuple(dict.fromkeys((*params.stop, *(self.stop_sequences or ()))))
        return replace(params, stop=stop, structured=self.structured_spec())


class CountTokensBody(ConversationFields, ToolFields):
    """POST /v1/messages/count_tokens."""

    model: str | None = None


class MessagesFormat:
    """The message and its events, each with its `type` as its name."""

    has_named_events = True
    end = b""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._got = Gathered()

    def opening(self) -> list[Json]:
        """See `Format`. How much was cached is known at the end only."""
        usage = UsageCount(sum(map(len, self._answer.prompts)))
        return [
            {"type": "message_start", "message": self._message(None, usage)},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "ping"},
        ]

    def chunks(self, news: PromptDelta, usage: UsageCount) -> list[Json]:
        """See `Format`."""
        self._got.add(news.delta)
        if not news.delta.text:
            return []
        delta = {"type": "text_delta", "text": news.delta.text}
        return [{"type": "content_block_delta", "index": 0, "delta": delta}]

    def closing(self, usage: UsageCount) -> list[Json]:
        """See `Format`."""
        return [
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": _end(self._got), "usage": _usage(usage), **self._timings(self._got)},
            {"type": "message_stop"},
        ]

    def failure(self, error: ApiError) -> list[Json]:
        """See `Format`."""
        return [{"type": "error", **error.body()}]

    def whole(self, gathered: dict[tuple[int, int], Gathered], usage: UsageCount) -> Json:
        """See `Format`."""
        return self._message(gathered[0, 0], usage)

    def _message(self, got: Gathered | None, usage: UsageCount) -> Json:
        return {
            "id": self._answer.id,
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            "content": [] if got is None else [{"type": "text", "text": got.text}],
            **({"stop_reason": None, "stop_sequence": None} if got is None else _end(got)),
            "usage": _usage(usage),
            **({} if got is None else self._timings(got)),
        }

    def _timings(self, got: Gathered) -> Json:
        return {"timings": timings(got.stats)} if self._answer.return_timings and got.stats is not None else {}


def messages_error(error: ApiError) -> JSONResponse:
    """An error as Anthropic's clients read it; the object inside is that of all other APIs."""
    return JSONResponse({"type": "error", **error.body()}, status_code=error.status, headers=error.headers)


def _system_text(system: str | list[dict[str, Any]]) -> str:
    if isinstance(system, str):
        return system
    texts = [part.get("text") if part.get("type") == "text" else None for part in system]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidValueError("system", [part.get("type") for part in system], "a string or a list of text parts")
    return "\n".join(map(str, texts))


def _end(got: Gathered) -> Json:
    if isinstance(got.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": got.stop_reason}
    return {"stop_reason": _STOP_REASONS.get(got.finish_reason or "", got.finish_reason), "stop_sequence": None}


def _usage(usage: UsageCount) -> Json:
    """Anthropic counts what came from a cache apart from the other input."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
