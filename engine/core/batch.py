"""What crosses between the scheduler and the runner: frozen messages of ints, strings and tuples.

A batch is a delta: the runner keeps the token ids and the block table of each sequence it was told of, so that a
decode step costs a few ints per sequence however long the sequence is. The same messages can be printed, replayed and
broadcast to tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence the runner doesn't know (first admission, or again after a preemption)."""

    seq_id: str
    token_ids: tuple[int, ...]  # every known token: prompt + output so far
    num_prompt_tokens: int  # the first so many of token_ids are prompt
    block_table: tuple[int, ...]  # physical block of each logical block; covers all of token_ids
    sampling_params: SamplingParams  # with its seed filled in
    eos_token_ids: tuple[int, ...]  # what min_tokens must keep from being sampled


class ScheduledSequence(NamedTuple):
    """How many tokens of a known sequence this step computes: positions [num_computed_tokens, + num_tokens)."""

    seq_id: str
    num_computed_tokens: int  # tokens whose KV exists before this step, or that sequences before it here write in it
    num_tokens: int  # tokens to compute now, >= 1
    new_block_ids: tuple[int, ...]  # appended to its block table (empty for one that is in `new` of this batch)
    is_sampling: bool  # whether the step reaches its last known token, and so samples the next one


class Fork(NamedTuple):
    """`child_id` is to be sampled from the same logits as `parent_id` and shares its block table from then on."""

    parent_id: str
    child_id: str
    sampling_params: SamplingParams  # the child's, with seed + its index


class BlockCopy(NamedTuple):
    """Copy the whole KV of block `source_id` to `block_id`, in all layers, before the step's forward pass.

    `seq_id` writes to `block_id` from now on: its block table entry `block_index` becomes `block_id`.
    """

    seq_id: str
    block_index: int
    source_id: int
    block_id: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work, in the order in which rows are computed.

    Apply in this order: `removed`, `new`, `copies`, `new_block_ids` of `scheduled`; then run; then sample for each
    scheduled sequence with `is_sampling`, and for each fork of it.
    """

    step: int
    removed: tuple[str, ...]  # sequences the runner may forget (finished, aborted or preempted since the last batch)
    new: tuple[NewSequence, ...]
    copies: tuple[BlockCopy, ...]
    scheduled: tuple[ScheduledSequence, ...]
    forks: tuple[Fork, ...]  # their parents are in `scheduled` with is_sampling

    @property
    def num_tokens(self) -> int:
        """Tokens this step computes."""
        return sum(s.num_tokens for s in self.scheduled)


class TokenLogprobs(NamedTuple):
    """Log-probabilities (natural log) at one position, of the distribution before temperature and truncation."""

    logprob: float  # the sampled token's
    rank: int  # 1 = the sampled token was the most likely one
    top_token_ids: tuple[int, ...]  # best first; at least as many as asked for
    top_logprobs: tuple[float, ...]


class PromptLogprobs(NamedTuple):
    """Log-probabilities of prompt tokens that a step has computed, each given the tokens before it."""

    seq_id: str
    first_position: int  # >= 1: nothing comes before the prompt's first token
    logprobs: tuple[TokenLogprobs, ...]  # of the tokens at first_position and after it


class SampledToken(NamedTuple):
    """The token the runner chose for one sequence."""

    seq_id: str
    token_id: int
    logprobs: TokenLogprobs | None  # only where sampling_params.logprobs is set


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The runner's answer to a batch."""

    sampled: tuple[SampledToken, ...]  # one per is_sampling sequence and per fork, less those in `failed`
    failed: tuple[tuple[str, str], ...] = ()  # (seq_id, message): e.g. logits that are not finite
    phases: tuple[tuple[str, float], ...] = ()  # (phase, seconds) in the order of the step
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # where sampling_params.prompt_logprobs is set
