"""What both APIs gather from deltas: choices of a whole answer, usage, and how log-probabilities are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.core.batch import TokenLogprobs
from engine.outputs import SequenceDelta, SequenceStats
from engine.tokenizer.tokenizer import Tokenizer

Json = dict[str, object]
LOWEST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(slots=True)
class Gathered:
    """Everything one sequence said."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    stats: SequenceStats | None = None

    def add(self, delta: SequenceDelta) -> None:
        """Append what a delta brought."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.stats = delta.finish_reason, delta.stop_reason, delta.stats
        self.prompt_logprobs += delta.prompt_logprobs

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts)


@dataclass(slots=True)
class UsageCount:
    """Tokens of one HTTP request: each prompt once, however many sequences it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    is_output_wanted: bool = True  # False: only the prompt is, and the one token that was made is not told

    def add(self, delta: SequenceDelta) -> None:
        """Count what a delta brought."""
        if self.is_output_wanted:
            self.completion_tokens += len(delta.token_ids)
        if delta.stats is not None and delta.index == 0:
            self.cached_tokens += delta.stats.num_cached_tokens

    def as_json(self) -> Json:
        """The `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def timings(stats: SequenceStats) -> Json:
    """What `return_timings` tells of one sequence, in seconds on the engine's clock."""
    steps = max(0, stats.num_output_tokens - 1)
    return {
        "queue_s": stats.queue_s,
        "prefill_s": stats.prefill_s,
        "ttft_s": stats.ttft_s,
        "decode_s": stats.decode_s,
        "tpot_s": stats.decode_s / steps if steps and stats.decode_s is not None else None,
        "e2e_s": stats.e2e_s,
        "num_preemptions": stats.num_preemptions,
    }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def top_tokens(logprobs: TokenLogprobs, top: int) -> Iterable[tuple[int, float]]:
    """The `top` most likely tokens and their log-probabilities, best first."""
    return zip(logprobs.top_token_ids[:top], map(finite, logprobs.top_logprobs[:top]), strict=True)


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
) -> Json:  # fmt: skip
    """`logprobs` of a chat choice, one entry per token."""

    def entry(token_id: int, logprob: float) -> Json:
        text = tokenizer.token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": list(tokenizer.token_bytes(token_id))}

    content = [
        {**entry(token_id, lp.logprob), "top_logprobs": [entry(*pair) for pair in top_tokens(lp, top)]}
        for token_id, lp in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: for each prompt token but the first an object of token id -> what is known of it.

    None also for those that were not computed: the request ended before its prompt was.
    """

    def entry(token_id: int, logprob: float, rank: int) -> Json:
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}

    told: list[Json | None] = [None]
    for token_id, lp in zip(token_ids[1:], logprobs, strict=False):
        best: Json = {str(other): entry(other, value, i + 1) for i, (other, value) in enumerate(top_tokens(lp, top))}
        told.append({str(token_id): entry(token_id, lp.logprob, lp.rank), **best})
    return told + [None] * (len(token_ids) - len(told))


def echoed_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], top: int
) -> tuple[Json, int]:
    """`logprobs` of an echoed prompt, and where the next token's text begins.

    The first token has none, nor have those that were not computed: the request ended before its prompt was.
    """
    first, offset = _without_scores(tokenizer, token_ids[:1], 0)
    scored, offset = completion_logprobs(tokenizer, token_ids[1 : 1 + len(logprobs)], logprobs, top, offset)
    rest, offset = _without_scores(tokenizer, token_ids[1 + len(logprobs) :], offset)
    return joined(joined(first, scored), rest), offset


def _without_scores(tokenizer: Tokenizer, token_ids: Sequence[int], offset: int) -> tuple[Json, int]:
    offsets: list[int] = []
    texts = [tokenizer.token_text(token_id) for token_id in token_ids]
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    nothing = [None] * len(texts)
    return {"tokens": texts, "token_logprobs": nothing, "top_logprobs": nothing, "text_offset": offsets}, offset


def joined(first: Json, second: Json) -> Json:
    """Two `logprobs` objects of a completion as one."""
    return {name: [*first[name], *second[name]] for name in first}  # type: ignore[misc]


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    top: int,
    first_offset: int = 0,
) -> tuple[Json, int]:
    """`logprobs` of a completion choice, and the offset at which the next token's text begins.

    The sampled token is always among `top_logprobs`, as in the OpenAI API, so that they may be one more than asked for.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    tops: list[Json] = []
    offset = first_offset
    for token_id, lp in zip(token_ids, logprobs, strict=True):
        text = tokenizer.token_text(token_id)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        best: Json = {tokenizer.token_text(other): value for other, value in top_tokens(lp, top)}
        tops.append({**best, text: finite(lp.logprob)})
    values = [finite(lp.logprob) for lp in logprobs]
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset
