"""What leaves the engine for whoever asked: the news of a request, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.core.batch import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]


class SequenceStats(NamedTuple):
    """The engine's own counts of a finished sequence; times in seconds, None where the event never happened."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens that came from the prefix cache at the first admission
    num_preemptions: int
    num_recomputed_tokens: int  # tokens computed again after preemptions
    peak_num_blocks: int
    queue_s: float | None  # arrival to first scheduled
    prefill_s: float | None  # first scheduled to first token
    ttft_s: float | None  # arrival to first token
    decode_s: float | None  # first to last token
    e2e_s: float  # arrival to the end
    itl_p50_s: float | None
    itl_p99_s: float | None
    finish_step: int  # the step at which it ended


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """What one step added to one sequence of a request.

    `text` may lag behind `token_ids`: bytes of an unfinished character, and text that may begin a stop string, are
    held back. Concatenated over all deltas it is the decode of all tokens, cut at the stop string.
    """

    request_id: str
    index: int  # which of the request's n sequences
    step: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]  # one per token id if asked for, else empty
    finish_reason: FinishReason | None = None  # set on exactly one delta per sequence, the last
    stop_reason: str | int | None = None  # the stop string or the stop token id that matched
    error: str | None = None  # with finish_reason "error"
    stats: SequenceStats | None = None  # with finish_reason
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt's tokens but the first; with its first token


@dataclass(frozen=True, slots=True)
class AbortReceipt:
    """What an abort did; asked for again, `state` says how the request had ended."""

    request_id: str
    state: str  # "aborted", "finished:<reason>" or "unknown"
    step: int
    blocks_freed: int
    output_tokens: int
