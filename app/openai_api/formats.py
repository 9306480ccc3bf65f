"""The two response formats: text completions and chat, whole and in chunks.

A format turns deltas into JSON values; it knows nothing of HTTP, of the engine's life or of how chunks are framed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from app.openai_api.generation import PromptDelta
from app.openai_api.results import Gathered, Json, UsageCount, chat_logprobs, completion_logprobs
from engine.core.batch import TokenLogprobs
from engine.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Answer:
    """What every response of one request repeats, and what the client wants in it."""

    id: str
    model: str
    tokenizer: Tokenizer
    prompts: tuple[tuple[int, ...], ...]
    n: int
    logprobs: int | None  # how many alternatives of each token; None = no log-probabilities
    return_token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> Json:
        """The first members of each object."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def choice_index(self, prompt_index: int, index: int) -> int:
        """Choices are numbered through all prompts."""
        return prompt_index * self.n + index


class Format(Protocol):
    """One API's shape of answers."""

    def chunks(self, news: PromptDelta) -> list[Json]:
        """What a stream says about one delta; nothing for text that is held back."""

    def whole(self, gathered: dict[tuple[int, int], Gathered], usage: UsageCount) -> Json:
        """The answer in one piece; `gathered` by (prompt index, index)."""

    def usage_chunk(self, usage: UsageCount) -> Json:
        """The last chunk, if usage was asked for."""


class CompletionFormat:
    """/v1/completions."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._offsets: dict[int, int] = defaultdict(int)  # choice -> where the next token's text begins
        self._begun: set[int] = set()

    def chunks(self, news: PromptDelta) -> list[Json]:
        """See `Format`."""
        answer, delta = self._answer, news.delta
        index = answer.choice_index(news.prompt_index, delta.index)
        wants_tokens = bool(delta.token_ids) and (answer.logprobs is not None or answer.return_token_ids)
        if not (delta.text or delta.finish_reason or wants_tokens):
            return []
        logprobs: Json | None = None
        if answer.logprobs is not None and delta.token_ids:
            logprobs, self._offsets[index] = completion_logprobs(
                answer.tokenizer, delta.token_ids, delta.logprobs, answer.logprobs, self._offsets[index]
            )
        choice = self._choice(index, delta.text, logprobs, delta.finish_reason, delta.stop_reason)
        if answer.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if index not in self._begun:
                choice["prompt_token_ids"] = list(answer.prompts[news.prompt_index])
        self._begun.add(index)
        return [{**answer.head("text_completion"), "choices": [choice]}]

    def whole(self, gathered: dict[tuple[int, int], Gathered], usage: UsageCount) -> Json:
        """See `Format`."""
        answer = self._answer
        choices: list[Json] = []
        for (prompt_index, index), got in sorted(gathered.items()):
            logprobs: Json | None = None
            if answer.logprobs is not None:
                logprobs, _ = completion_logprobs(answer.tokenizer, got.token_ids, got.logprobs, answer.logprobs)
            number = answer.choice_index(prompt_index, index)
            choice = self._choice(number, got.text, logprobs, got.finish_reason, got.stop_reason)
            if answer.return_token_ids:
                choice["token_ids"] = got.token_ids
                choice["prompt_token_ids"] = list(answer.prompts[prompt_index])
            choices.append(choice)
        return {**answer.head("text_completion"), "choices": choices, "usage": usage.as_json()}

    def usage_chunk(self, usage: UsageCount) -> Json:
        """See `Format`."""
        return {**self._answer.head("text_completion"), "choices": [], "usage": usage.as_json()}

    def _choice(
        self, index: int, text: str, logprobs: Json | None, finish_reason: str | None, stop_reason: str | int | None
    ) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }


class ChatFormat:
    """/v1/chat/completions."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._begun: set[int] = set()

    def chunks(self, news: PromptDelta) -> list[Json]:
        """See `Format`. The first chunk of each choice names the role."""
        answer, delta = self._answer, news.delta
        wants_tokens = bool(delta.token_ids) and (answer.logprobs is not None or answer.return_token_ids)
        chunks: list[Json] = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            first = self._chunk(self._choice(delta.index, {"role": "assistant", "content": ""}))
            chunks.append({**first, "prompt_token_ids": list(answer.prompts[0])} if answer.return_token_ids else first)
        if not (delta.text or delta.finish_reason or wants_tokens):
            return chunks
        content: Json = {"content": delta.text} if delta.text or wants_tokens else {}
        choice = self._choice(delta.index, content)
        choice["logprobs"] = self._logprobs(delta.token_ids, delta.logprobs)
        choice["finish_reason"], choice["stop_reason"] = delta.finish_reason, delta.stop_reason
        if answer.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return [*chunks, self._chunk(choice)]

    def whole(self, gathered: dict[tuple[int, int], Gathered], usage: UsageCount) -> Json:
        """See `Format`."""
        answer = self._answer
        choices: list[Json] = []
        for (_, index), got in sorted(gathered.items()):
            choice: Json = {
                "index": index,
                "message": {"role": "assistant", "content": got.text, "refusal": None},
                "logprobs": self._logprobs(got.token_ids, got.logprobs),
                "finish_reason": got.finish_reason,
                "stop_reason": got.stop_reason,
            }
            if answer.return_token_ids:
                choice["token_ids"] = got.token_ids
            choices.append(choice)
        body = {**answer.head("chat.completion"), "choices": choices, "usage": usage.as_json()}
        return {**body, "prompt_token_ids": list(answer.prompts[0])} if answer.return_token_ids else body

    def usage_chunk(self, usage: UsageCount) -> Json:
        """See `Format`."""
        return {**self._answer.head("chat.completion.chunk"), "choices": [], "usage": usage.as_json()}

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json | None:
        top = self._answer.logprobs
        return None if top is None else chat_logprobs(self._answer.tokenizer, token_ids, logprobs, top)

    def _choice(self, index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def _chunk(self, choice: Json) -> Json:
        return {**self._answer.head("chat.completion.chunk"), "choices": [choice]}
