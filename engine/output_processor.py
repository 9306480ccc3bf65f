"""From sampled ids to what a client gets: text, held back where it must be, and the news of each end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from engine.core.batch import PromptLogprobs, SampledToken, TokenLogprobs
from engine.core.events import Changes, Finished
from engine.core.sequence import Sequence, child_seq_id
from engine.outputs import FinishReason, SequenceDelta
from engine.sampling_params import SamplingParams
from engine.tokenizer.detokenizer import Detokenizer
from engine.tokenizer.stop_strings import StopStrings
from engine.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class _Stream:
    """The text side of one live sequence."""

    request_id: str
    index: int
    n: int
    params: SamplingParams
    detokenizer: Detokenizer
    stop_strings: StopStrings | None
    num_output_tokens: int = 0
    stop_string: str | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class StepTexts:
    """What one step's tokens mean as text, before it is known who ended."""

    tokens: dict[str, SampledToken] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)  # sequence -> the stop string its text reached
    stopped_at_end: dict[str, str] = field(default_factory=dict)  # the same if no more text comes


class OutputProcessor:
    """One detokenizer and one stop-string matcher per live sequence."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._streams: dict[str, _Stream] = {}
        self._ended: dict[str, int] = {}  # request -> output tokens of its sequences that have ended

    def add(self, sequence: Sequence) -> None:
        """Start the texts of a request: its sequence and the siblings that will be forked from it."""
        n = sequence.num_slots
        for index in range(n):
            seq_id = child_seq_id(sequence.request_id, index)
            params = sequence.sampling_params
            self._streams[seq_id] = _Stream(
                sequence.request_id, index, n, params,
                Detokenizer(self._tokenizer, sequence.token_ids, skip_special_tokens=params.skip_special_tokens),
                StopStrings(params.stop, include_in_output=params.include_stop_str_in_output) if params.stop else None,
            )  # fmt: skip

    def take_prompt_logprobs(self, news: Iterable[PromptLogprobs]) -> None:
        """Collect them until the prompt is whole; what is computed again after a preemption is known already."""
        for seq_id, first_position, logprobs in news:
            known = self._streams[seq_id].prompt_logprobs
            known.extend(logprobs[max(0, len(known) + 1 - first_position) :])

    def detokenize(self, sampled: Iterable[SampledToken]) -> StepTexts:
        """Turn a step's tokens into text that is safe to send, and find stop strings in it."""
        step = StepTexts()
        for token in sampled:
            stream = self._streams[token.seq_id]
            stream.num_output_tokens += 1
            text = stream.detokenizer.feed(token.token_id)
            matcher = stream.stop_strings
            if matcher is not None:
                may_stop = stream.num_output_tokens >= stream.params.min_tokens
                text, stream.stop_string = matcher.feed(text, may_stop=may_stop)
                if stream.stop_string is not None:
                    step.stopped[token.seq_id] = stream.stop_string
                elif matcher.waiting is not None:
                    step.stopped_at_end[token.seq_id] = matcher.waiting
            step.tokens[token.seq_id] = token
            step.texts[token.seq_id] = text
        return step

    def deltas(self, step: int, texts: StepTexts, changes: Changes) -> list[SequenceDelta]:
        """The news of a record, in the order of the tokens; sequences that ended without a token come last."""
        ended = {finished.seq_id: finished for finished in changes.finished}
        deltas = [
            self._delta(seq_id, step, texts.texts[seq_id], token, ended.pop(seq_id, None))
            for seq_id, token in texts.tokens.items()
        ]
        for seq_id, finished in ended.items():
            deltas.extend(self._delta(each, step, "", None, finished) for each in self._unborn_siblings(seq_id))
        return deltas

    def take_total(self, request_id: str) -> int | None:
        """Output tokens of a request all of whose sequences have ended; None if they were taken already."""
        return self._ended.pop(request_id, None)

    def _unborn_siblings(self, seq_id: str) -> list[str]:
        """`seq_id` and, if its request ended before it could fork, the siblings that will never be."""
        stream = self._streams[seq_id]
        if stream.n == 1 or stream.index > 0 or stream.num_output_tokens > 0:
            return [seq_id]
        return [seq_id, *(child_seq_id(stream.request_id, i) for i in range(1, stream.n))]

    def _delta(
        self, seq_id: str, step: int, text: str, token: SampledToken | None, finished: Finished | None
    ) -> SequenceDelta:
        stream = self._streams[seq_id]
        token_ids = () if token is None else (token.token_id,)
        logprobs = () if token is None or token.logprobs is None else (token.logprobs,)
        about_prompt: tuple[TokenLogprobs, ...] = ()
        if stream.prompt_logprobs and token is not None and stream.num_output_tokens == 1:
            about_prompt = tuple(stream.prompt_logprobs)
        if finished is None:
            return SequenceDelta(
                stream.request_id, stream.index, step, text, token_ids, logprobs, prompt_logprobs=about_prompt
            )
        del self._streams[seq_id]
        self._ended[stream.request_id] = self._ended.get(stream.request_id, 0) + stream.num_output_tokens
        reason = cast(FinishReason, finished.reason)
        if stream.stop_string is None:
            text += self._flush(stream, may_stop=reason == "stop")
        stop_reason: str | int | None = stream.stop_string
        if reason == "stop" and stop_reason is None and finished.detail is not None:
            stop_reason = int(finished.detail)
        return SequenceDelta(
            stream.request_id, stream.index, step, text, token_ids, logprobs, reason,
            stop_reason if reason == "stop" else None, finished.detail if reason in ("error", "timeout") else None,
            prompt_logprobs=about_prompt,
        )  # fmt: skip

    @staticmethod
    def _flush(stream: _Stream, *, may_stop: bool) -> str:
        """What was held back. What is left of a broken character is no text in which a stop string could be."""
        held = ""
        if stream.stop_strings is not None:
            held = stream.stop_strings.flush(may_stop=may_stop)
            stream.stop_string = stream.stop_strings.matched
        return held if stream.stop_string is not None else held + stream.detokenizer.flush()
