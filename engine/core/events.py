"""The two kinds of records of the trace. Everything a screen or a metric shows is a fold of them (see `stats`).

A `StepRecord` is an executed step; only these advance `step`. A `CommandRecord` is anything else that changed the
state (add, abort, timeout, pause, limits, reset), which also happens while idle or paused. Both share one sequence
number `seq` without gaps, and both carry their state changes in a `Changes`.

Records hold no prompt and no answer text. Times are seconds of the engine's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from engine.core.limits import Limits

BlockEventKind = Literal["allocate", "hit", "share", "copy", "seal", "evict", "free"]
Constraint = Literal["slots", "token_budget", "prefill_budget", "blocks", "preemption", "paused"]


class BlockEvent(NamedTuple):
    """One change of one block, in the order in which it happened.

    allocate: taken without content for `seq_id`, ref_count 1 · copy: the same, as the copy-on-write of block
    `detail` · hit: a cached block taken back by `seq_id`, ref_count 0 -> 1 · share: one more reference by `seq_id` ·
    seal: full and computed, `detail` is its hash from now on · evict: its hash is dropped before reuse ·
    free: `seq_id` released its reference.
    """

    kind: BlockEventKind
    block_id: int
    seq_id: str | None
    detail: str | int | None = None


class Added(NamedTuple):
    """A sequence enters the waiting queue."""

    seq_id: str
    request_id: str
    choice_index: int  # which of the request's n sequences
    source: str  # who asked: "chat", "v1", "bench", ...
    priority: int
    queue_index: int  # number of the arrival; ties are broken by it
    num_prompt_tokens: int
    max_tokens: int
    n: int  # sequences that will run for it (the siblings are forked when its prompt is computed)
    arrival_time: float
    deadline: float | None  # when request_timeout_s ends it


class Admitted(NamedTuple):
    """A waiting sequence starts to run; its blocks are in the block events."""

    seq_id: str
    num_cached_tokens: int  # computed tokens taken from the prefix cache
    num_known_tokens: int  # prompt + output at that time
    is_resumed: bool  # it had run before and was preempted


class Preempted(NamedTuple):
    """A running sequence lost its blocks and waits again."""

    seq_id: str
    by_seq_id: str | None  # who needed the blocks; itself if nobody else could give any; None: the pool was shrunk
    num_blocks: int  # references it gave back
    num_tokens: int  # computed tokens that must be computed again (less what the prefix cache still holds)


class Forked(NamedTuple):
    """A sibling begins, sharing every block of its parent."""

    parent_id: str
    seq_id: str
    choice_index: int
    queue_index: int


class Computed(NamedTuple):
    """What the step did for one sequence."""

    seq_id: str
    num_tokens: int  # tokens whose KV was computed
    num_computed_tokens: int  # after the step
    num_sampled: int  # 0 or 1


class Finished(NamedTuple):
    """A sequence ended, for one reason and for ever."""

    seq_id: str
    reason: str  # stop, length, abort, timeout, error
    num_blocks: int  # references it gave back
    detail: str | None  # stop string or token, error message, which timeout


class Blocked(NamedTuple):
    """Why the first waiting sequence was not admitted: the first test that failed, with its numbers."""

    seq_id: str
    constraint: Constraint
    needed: int  # slots, tokens or blocks
    available: int  # of the same, right then
    watermark: int  # blocks that must stay available; 0 where the constraint isn't blocks


@dataclass(frozen=True, slots=True)
class Changes:
    """State changes of one record; folded in the order of the fields."""

    added: tuple[Added, ...] = ()
    blocks: tuple[BlockEvent, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    admitted: tuple[Admitted, ...] = ()
    computed: tuple[Computed, ...] = ()
    forked: tuple[Forked, ...] = ()
    finished: tuple[Finished, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One executed step."""

    seq: int
    step: int
    started_at: float
    ended_at: float
    changes: Changes
    blocked: Blocked | None  # None: nothing waits, or all that waited was admitted
    # (phase, seconds): drain schedule inputs, what the runner computed (attention linear elementwise or forward, head
    # sample), detokenize update; then publish, which is the handing over of the step before.
    phases: tuple[tuple[str, float], ...]

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens computed for sequences that got more than one, or whose prompt was not done."""
        return sum(c.num_tokens for c in self.changes.computed if not (c.num_tokens == 1 and c.num_sampled))

    @property
    def num_decode_tokens(self) -> int:
        """Tokens computed for sequences that got exactly one and sampled the next."""
        return sum(1 for c in self.changes.computed if c.num_tokens == 1 and c.num_sampled)


@dataclass(frozen=True, slots=True)
class CommandRecord:
    """One command, or one event of the clock, applied between two steps."""

    seq: int
    step: int  # the last executed step
    at: float
    kind: str  # add reject abort timeout error pause resume limits reset drain dead
    changes: Changes
    request_id: str | None = None
    detail: str | None = None  # the reason given or the message
    limits: Limits | None = None  # new limits, with kind "limits"
    limits_version: int | None = None
    blocked: Blocked | None = None


Record = StepRecord | CommandRecord
