"""OpenAI's Responses API in its text form: body, object and events. Nothing is stored; the path is chat's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from app.errors import ApiError
from app.json_body import Body
from app.openai_api.answer import Answer
from app.openai_api.generation import PromptDelta
from app.openai_api.results import Gathered, Json, UsageCount, chat_logprobs, timings
from app.openai_api.schemas import ChatFields, SamplingFields, refuse
from app.openai_api.structured_fields import ANY_OBJECT, json_spec
from app.openai_api.tool_fields import ToolFields
from engine.errors import InvalidValueError
from engine.sampling_params import MAX_LOGPROBS, SamplingParams, StructuredSpec

_LOGPROBS = "message.output_text.logprobs"
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "truncation": ("disabled",),
    "max_tool_calls": (),
}
_TEXT_PARTS = ("input_text", "output_text", "text")


class TextFormat(Body):
    """`text.format`: like `response_format` of chat, but flat."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    """`text`."""

    format: TextFormat | None = None


class ResponsesBody(SamplingFields, ToolFields):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_needs_a_store(cls, data: Any) -> Any:
        return refuse(data, _UNSUPPORTED)

    def chat(self) -> ChatFields:
        """The conversation that `instructions` and `input` are.

        Raises:
            InvalidValueError: an item that is no message.
        """
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [_message(item) for item in self.input]
        return ChatFields.model_construct(messages=messages)

    def sampling_params(self, defaults: Mapping[str, float]) -> SamplingParams:
        """What the engine is asked for.

        Raises:
            InvalidValueError: a field that has another name in `SamplingParams` is out of range.
        """
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise InvalidValueError("max_output_tokens", self.max_output_tokens, "an integer >= 1")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise InvalidValueError("top_logprobs", self.top_logprobs, f"an integer in [0, {MAX_LOGPROBS}]")
        logprobs = (self.top_logprobs or 0) if _LOGPROBS in (self.include or ()) else self.top_logprobs or None
        max_tokens = self.max_output_tokens
        if max_tokens is None and "max_tokens" in defaults:
            max_tokens = int(defaults["max_tokens"])
        params = self._params(defaults, max_tokens=max_tokens, logprobs=logprobs)
        return replace(params, structured=self.structured_spec(self._spec_of_text()))

    def _spec_of_text(self) -> StructuredSpec | None:
        form = self.text.format if self.text is not None else None
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return StructuredSpec("json_schema", ANY_OBJECT, "text")
        if form.json_schema is None:
            raise InvalidValueError("text", form.type, "a format with a schema")
        return json_spec(form.json_schema, "text")


def _message(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind != "message":
        raise InvalidValueError("input", str(kind)[:40], "messages only: this server has no tools and no memory")
    content = item.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, dict) else {"type": str(type(part).__name__)} for part in content]
        content = [{**part, "type": "text"} if part.get("type") in _TEXT_PARTS else part for part in parts]
    return {"role": item.get("role"), "content": content}


class ResponsesFormat:
    """The object and its events; each event has its `type` as its name and a number of its own."""

    has_named_events = True
    end = b""

    def __init__(self, answer: Answer, body: ResponsesBody) -> None:
        self._answer = answer
        self._body = body
        self._message_id = answer.id.replace("resp_", "msg_", 1)
        self._num_events = 0
        self._got = Gathered()

    def opening(self) -> list[Json]:
        """See `Format`."""
        begun = self._object("in_progress", None, None)
        item = self._item("in_progress", None)
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._place, part=self._part(Gathered())),
        ]

    def chunks(self, news: PromptDelta, usage: UsageCount) -> list[Json]:
        """See `Format`."""
        delta = news.delta
        self._got.add(delta)
        if not delta.text and not (delta.token_ids and self._answer.logprobs is not None):
            return []
        logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        return [self._event("response.output_text.delta", **self._place, delta=delta.text, logprobs=logprobs)]

    def closing(self, usage: UsageCount) -> list[Json]:
        """See `Format`."""
        got = self._got
        part, status = self._part(got), _status(got)
        logprobs = self._logprobs(got.token_ids, got.logprobs)
        return [
            self._event("response.output_text.done", **self._place, text=got.text, logprobs=logprobs),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=0, item=self._item(status, got)),
            self._event(f"response.{status}", response=self._object(status, got, usage)),
        ]

    def failure(self, error: ApiError) -> list[Json]:
        """See `Format`."""
        failed = self._object("failed", None, None)
        failed["error"] = {"code": "server_error", "message": error.message}
        return [
            self._event("error", code=error.code, message=error.message, param=error.param),
            self._event("response.failed", response=failed),
        ]

    def whole(self, gathered: dict[tuple[int, int], Gathered], usage: UsageCount) -> Json:
        """See `Format`."""
        got = gathered[0, 0]
        return self._object(_status(got), got, usage)

    def _event(self, kind: str, **members: object) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **members}

    @property
    def _place(self) -> Json:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _logprobs(self, token_ids: Any, logprobs: Any) -> object:
        answer = self._answer
        if answer.logprobs is None:
            return []
        return chat_logprobs(answer.tokenizer, token_ids, logprobs, answer.logprobs)["content"]

    def _part(self, got: Gathered) -> Json:
        logprobs = self._logprobs(got.token_ids, got.logprobs)
        return {"type": "output_text", "text": got.text, "annotations": [], "logprobs": logprobs}

    def _item(self, status: str, got: Gathered | None) -> Json:
        content = [] if got is None else [self._part(got)]
        return {
            "type": "message",
            "id": self._message_id,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _object(self, status: str, got: Gathered | None, usage: UsageCount | None) -> Json:
        body, text = self._body, self._body.text
        form = text.format if text is not None and text.format is not None else TextFormat()
        reason = {"length": "max_output_tokens"}.get(got.finish_reason or "", got.finish_reason) if got else None
        told: Json = {
            "id": self._answer.id,
            "object": "response",
            "created_at": self._answer.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._answer.model,
            "output": [] if got is None else [self._item(status, got)],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }
        if self._answer.return_timings and got is not None and got.stats is not None:
            told["timings"] = timings(got.stats)
        return told


def _status(got: Gathered) -> str:
    return "completed" if got.finish_reason == "stop" else "incomplete"


def _usage(usage: UsageCount) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
