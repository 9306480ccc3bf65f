"""OpenAI's two older response formats: text completions and chat, whole and in chunks.

A format turns deltas into JSON values; it knows nothing of HTTP, of the engine's life or of how chunks are framed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from app.errors import ApiError
from app.openai_api.answer import Answer, PromptScores
from app.openai_api.generation import PromptDelta
from app.openai_api.results import (
    Gathered,
    Json,
    UsageCount,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    joined,
    prompt_logprobs,
    timings,
)
from engine.core.batch import TokenLogprobs
from engine.outputs import SequenceDelta, SequenceStats

DONE = b"data: [DONE]\n\n"


class _ChunkFormat:
    """What the two have in common: chunks without names, usage as a last chunk, `[DONE]`."""

    has_named_events = False
    end = DONE
    _chunk_kind: str

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._scores = PromptScores()

    def opening(self) -> list[Json]:
        """See `Format`."""
        return []

    def closing(self, usage: UsageCount) -> list[Json]:
        """See `Format`."""
        if not self._answer.include_usage:
            return []
        return [{**self._answer.head(self._chunk_kind), "choices": [], "usage": usage.as_json()}]

    def failure(self, error: ApiError) -> list[Json]:
        """See `Format`."""
        return [error.body()]

    def _chunk(self, choice: Json, usage: UsageCount) -> Json:
        chunk = {**self._answer.head(self._chunk_kind), "choices": [choice]}
        return {**chunk, "usage": usage.as_json()} if self._answer.continuous_usage else chunk

    def _told_timings(self, stats: SequenceStats | None) -> Json:
        return {"timings": timings(stats)} if self._answer.return_timings and stats is not None else {}

    def _prompt_logprobs(self, prompt_index: int, logprobs: Sequence[TokenLogprobs]) -> list[Json | None]:
        answer = self._answer
        assert answer.prompt_logprobs is not None
        return prompt_logprobs(answer.tokenizer, answer.prompts[prompt_index], logprobs, answer.prompt_logprobs)

    def _wants_tokens(self, delta: SequenceDelta) -> bool:
        return bool(delta.token_ids) and (self._answer.logprobs is not None or self._answer.return_token_ids)


class CompletionFormat(_ChunkFormat):
    """/v1/completions.

    Args:
        echo: the prompts' texts, where they are to be repeated.
        is_echo_only: whether the answer is left out.
    """

    _chunk_kind = "text_completion"

    def __init__(self, answer: Answer, echo: Sequence[str] = (), *, is_echo_only: bool = False) -> None:
        super().__init__(answer)
        self._echo = echo
        self._is_echo_only = is_echo_only
        self._offsets: dict[int, int] = defaultdict(int)  # choice -> where the next token's text begins
        self._begun: set[int] = set()

    def chunks(self, news: PromptDelta, usage: UsageCount) -> list[Json]:
        """See `Format`. The first chunk of each choice holds what is told of the prompt."""
        delta, number = news.delta, self._answer.choice_index(news.prompt_index, news.delta.index)
        scores = self._scores.of(news.prompt_index, delta.prompt_logprobs)
        is_first = number not in self._begun and bool(delta.token_ids or delta.finish_reason)
        if not (delta.text or delta.finish_reason or self._wants_tokens(delta) or (is_first and self._tells_prompt)):
            return []
        if is_first:
            self._begun.add(number)
        got = Gathered()
        got.add(delta)
        return [self._chunk(self._choice(news.prompt_index, number, got, scores, is_first=is_first), usage)]

    def whole(self, gathered: dict[tuple[int, int], Gathered], usage: UsageCount) -> Json:
        """See `Format`."""
        choices = []
        for (prompt_index, index), got in sorted(gathered.items()):
            scores = self._scores.of(prompt_index, got.prompt_logprobs)
            number = self._answer.choice_index(prompt_index, index)
            choices.append(self._choice(prompt_index, number, got, scores, is_first=True))
        return {**self._answer.head("text_completion"), "choices": choices, "usage": usage.as_json()}

    @property
    def _tells_prompt(self) -> bool:
        return bool(self._echo) or self._answer.prompt_logprobs is not None or self._answer.return_token_ids

    def _choice(
        self, prompt_index: int, number: int, got: Gathered, scores: Sequence[TokenLogprobs], *, is_first: bool
    ) -> Json:
        """A choice, or what a chunk adds to it."""
        answer, token_ids = self._answer, [] if self._is_echo_only else got.token_ids
        is_echoed = is_first and bool(self._echo)
        choice: Json = {
            "index": number,
            "text": (self._echo[prompt_index] if is_echoed else "") + ("" if self._is_echo_only else got.text),
            "logprobs": self._logprobs(prompt_index, number, token_ids, got, scores, is_echoed=is_echoed),
            "finish_reason": got.finish_reason,
            "stop_reason": got.stop_reason,
            **self._told_timings(got.stats),
        }
        if answer.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = list(answer.prompts[prompt_index])
        if answer.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt_index, scores)
        return choice

    def _logprobs(
        self,
        prompt_index: int,
        number: int,
        token_ids: Sequence[int],
        got: Gathered,
        scores: Sequence[TokenLogprobs],
        *,
        is_echoed: bool,
    ) -> Json | None:
        answer, top = self._answer, self._answer.logprobs
        if top is None:
            return None
        echoed: Json | None = None
        if is_echoed:
            prompt = answer.prompts[prompt_index]
            echoed, self._offsets[number] = echoed_logprobs(answer.tokenizer, prompt, scores, top)
        if not token_ids:
            return echoed
        logprobs, self._offsets[number] = completion_logprobs(
            answer.tokenizer, token_ids, got.logprobs, top, self._offsets[number]
        )
        return logprobs if echoed is None else joined(echoed, logprobs)


class ChatFormat(_ChunkFormat):
    """/v1/chat/completions."""

    _chunk_kind = "chat.completion.chunk"

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self._begun: set[int] = set()

    def chunks(self, news: PromptDelta, usage: UsageCount) -> list[Json]:
        """See `Format`. The first chunk of each choice names the role."""
        answer, delta = self._answer, news.delta
        chunks: list[Json] = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            first = self._chunk(self._choice(delta.index, {"role": "assistant", "content": ""}), usage)
            chunks.append({**first, **self._about_prompt(self._scores.of(0, delta.prompt_logprobs))})
        wants_tokens = self._wants_tokens(delta)
        if not (delta.text or delta.finish_reason or wants_tokens):
            return chunks
        content: Json = {"content": delta.text} if delta.text or wants_tokens else {}
        choice = self._choice(delta.index, content)
        choice["logprobs"] = self._logprobs(delta.token_ids, delta.logprobs)
        choice["finish_reason"], choice["stop_reason"] = delta.finish_reason, delta.stop_reason
        choice.update(self._told_timings(delta.stats))
        if answer.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        return [*chunks, self._chunk(choice, usage)]

    def whole(self, gathered: dict[tuple[int, int], Gathered], usage: UsageCount) -> Json:
        """See `Format`."""
        answer = self._answer
        choices: list[Json] = []
        scores: tuple[TokenLogprobs, ...] = ()
        for (_, index), got in sorted(gathered.items()):
            scores = self._scores.of(0, got.prompt_logprobs)
            choice: Json = {
                "index": index,
                "message": {"role": "assistant", "content": got.text, "refusal": None},
                "logprobs": self._logprobs(got.token_ids, got.logprobs),
                "finish_reason": got.finish_reason,
                "stop_reason": got.stop_reason,
                **self._told_timings(got.stats),
            }
            if answer.return_token_ids:
                choice["token_ids"] = got.token_ids
            choices.append(choice)
        body = {**answer.head("chat.completion"), "choices": choices, "usage": usage.as_json()}
        return {**body, **self._about_prompt(scores)}

    def _about_prompt(self, scores: Sequence[TokenLogprobs]) -> Json:
        told: Json = {}
        if self._answer.return_token_ids:
            told["prompt_token_ids"] = list(self._answer.prompts[0])
        if self._answer.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._prompt_logprobs(0, scores)
        return told

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> Json | None:
        top = self._answer.logprobs
        return None if top is None else chat_logprobs(self._answer.tokenizer, token_ids, logprobs, top)

    def _choice(self, index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "stop_reason": None}
