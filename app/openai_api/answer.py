"""What every response of one request repeats, and what a format of responses is."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Protocol

from app.errors import ApiError
from app.openai_api.generation import PromptDelta
from app.openai_api.results import Gathered, Json, UsageCount
from engine.core.batch import TokenLogprobs
from engine.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP request's facts, and what the client wants to be told."""

    id: str
    model: str
    tokenizer: Tokenizer
    prompts: tuple[tuple[int, ...], ...]
    n: int
    logprobs: int | None  # how many alternatives of each token; None = no log-probabilities
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    return_token_ids: bool = False
    return_timings: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, kind: str) -> Json:
        """The first members of each object."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def choice_index(self, prompt_index: int, index: int) -> int:
        """Choices are numbered through all prompts."""
        return prompt_index * self.n + index


class Format(Protocol):
    """One API's shape of answers."""

    has_named_events: bool  # a stream's events have their `type` as their name
    end: bytes  # after the last event of a stream

    def opening(self) -> list[Json]:
        """The events before the first token."""

    def chunks(self, news: PromptDelta, usage: UsageCount) -> list[Json]:
        """What a stream says about one delta; nothing for text that is held back. `usage` is that so far."""

    def closing(self, usage: UsageCount) -> list[Json]:
        """The events after the last token."""

    def failure(self, error: ApiError) -> list[Json]:
        """The events of an error after the stream has begun."""

    def whole(self, gathered: dict[tuple[int, int], Gathered], usage: UsageCount) -> Json:
        """The answer in one piece; `gathered` by (prompt index, index)."""


class PromptScores:
    """A prompt's log-probabilities come with its first sequence; its siblings' choices repeat them."""

    def __init__(self) -> None:
        self._scores: dict[int, tuple[TokenLogprobs, ...]] = {}

    def of(self, prompt_index: int, news: tuple[TokenLogprobs, ...]) -> tuple[TokenLogprobs, ...]:
        """Those of a prompt, `news` being what has just come of them."""
        if news:
            self._scores[prompt_index] = news
        return self._scores.get(prompt_index, ())
