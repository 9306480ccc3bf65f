"""The state as a fold of the records: what every page, gauge and counter shows.

`Fold` starts from an empty engine and applies records one by one. The scheduler keeps its own structures to schedule
with; `Fold.snapshot() == Scheduler.snapshot()` after every record is a property test. Counters live only here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.core.events import Blocked, BlockEvent, Changes, CommandRecord, Finished, Record, StepRecord
from engine.core.limits import Limits
from engine.core.policy import queue_key
from engine.outputs import SequenceStats

BLOCK_STATES = ("free", "cached", "used", "shared")


def block_state(ref_count: int, block_hash: str | None) -> str:
    """The one of the four states a block is in."""
    if ref_count == 0:
        return "free" if block_hash is None else "cached"
    return "used" if ref_count == 1 else "shared"


class SequenceRow(NamedTuple):
    """One sequence as the scheduler and the fold both describe it."""

    seq_id: str
    status: str  # WAITING, RUNNING, PREEMPTED
    priority: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    block_table: tuple[int, ...]
    num_preemptions: int


class Snapshot(NamedTuple):
    """The whole state, comparable: fold(trace) == scheduler.snapshot()."""

    step: int
    is_paused: bool
    limits: Limits
    running: tuple[SequenceRow, ...]  # in the order of admission
    waiting: tuple[SequenceRow, ...]  # in the order of the queue
    ref_counts: tuple[int, ...]
    block_hashes: tuple[str | None, ...]


@dataclass(slots=True)
class FoldedSequence:
    """Everything known of a live sequence (mutable; owned by one `Fold`)."""

    seq_id: str
    request_id: str
    index: int
    source: str
    priority: int
    queue_index: int
    num_prompt_tokens: int
    max_tokens: int
    n: int
    arrival_time: float
    deadline: float | None
    status: str = "WAITING"
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_lost_tokens: int = 0  # computed when it was last preempted
    peak_num_blocks: int = 0
    block_table: list[int] = field(default_factory=list)
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    token_gaps_s: list[float] = field(default_factory=list)  # between consecutive tokens, steps' ends

    def row(self) -> SequenceRow:
        """The comparable part."""
        return SequenceRow(
            self.seq_id, self.status, self.priority, self.num_prompt_tokens, self.num_output_tokens,
            self.num_computed_tokens, self.num_cached_tokens, tuple(self.block_table), self.num_preemptions,
        )  # fmt: skip

    @property
    def num_ending(self) -> int:
        """Sequences of its request that end with it: before the fork also the siblings that will never be."""
        return 1 if self.num_output_tokens else self.n

    def stats(self, record: Record) -> SequenceStats:
        """Counts and intervals at its end, which `record` tells."""
        ended_at = record.ended_at if isinstance(record, StepRecord) else record.at
        gaps = sorted(self.token_gaps_s)

        def since(start: float | None, end: float | None) -> float | None:
            return None if start is None or end is None else end - start

        def percentile(share: float) -> float | None:
            return gaps[min(len(gaps) - 1, int(share * len(gaps)))] if gaps else None

        return SequenceStats(
            self.num_prompt_tokens, self.num_output_tokens, self.num_cached_tokens, self.num_preemptions,
            self.num_recomputed_tokens, self.peak_num_blocks,
            queue_s=since(self.arrival_time, self.first_scheduled_time),
            prefill_s=since(self.first_scheduled_time, self.first_token_time),
            ttft_s=since(self.arrival_time, self.first_token_time),
            decode_s=since(self.first_token_time, self.last_token_time),
            e2e_s=ended_at - self.arrival_time,
            itl_p50_s=percentile(0.5), itl_p99_s=percentile(0.99), finish_step=record.step,
        )  # fmt: skip


@dataclass(slots=True)
class Counters:
    """Totals since the start; tokens unless the name says otherwise."""

    num_requests: int = 0  # accepted
    num_preemptions: int = 0  # times
    prompt_tokens: int = 0  # once per request, at its first admission
    prompt_tokens_cached: int = 0
    prompt_tokens_recomputed: int = 0  # after preemptions, prompt or output
    generation_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # sequences by finish reason
    rejected: Counter[str] = field(default_factory=Counter)  # requests by reason


# Observers see a sequence at the moment a record changes it: (sequence, record). Metrics are made of these.
Observer = Callable[[FoldedSequence, Record], None]


class Fold:
    """The live state, one record after the other. Not thread-safe: one owner applies, the same one reads.

    Args:
        num_blocks: size of the pool.
        limits: limits at the start.
    """

    def __init__(self, num_blocks: int, limits: Limits) -> None:
        self.num_blocks = num_blocks
        self.limits = limits
        self.limits_version = 1
        self.seq = 0
        self.step = 0
        self.is_paused = False
        self.pause_reason: str | None = None
        self.is_draining = False
        self.dead_reason: str | None = None
        self.sequences: dict[str, FoldedSequence] = {}
        self.running: dict[str, FoldedSequence] = {}  # in the order of admission
        self.ref_counts = [0] * num_blocks
        self.block_hashes: list[str | None] = [None] * num_blocks
        self.owners: dict[int, list[str]] = {}  # block id -> sequences that refer to it
        self.block_counts = Counter[str]({"free": num_blocks, "cached": 0, "used": 0, "shared": 0})
        self.counters = Counters()
        self.blocked: Blocked | None = None
        self.on_first_scheduled: list[Observer] = []
        self.on_token: list[Observer] = []
        self.on_finished: list[Callable[[FoldedSequence, Finished, Record], None]] = []

    def apply(self, record: Record) -> None:
        """Apply the next record.

        Raises:
            ValueError: a record is missing; the owner must start again from a snapshot.
        """
        if record.seq != self.seq + 1:
            raise ValueError(f"record {record.seq} after {self.seq}")
        self.seq = record.seq
        self.step = record.step
        self.blocked = record.blocked
        if isinstance(record, CommandRecord):
            self._apply_command(record)
        self._apply_changes(record.changes, record)

    def _apply_command(self, record: CommandRecord) -> None:
        match record.kind:
            case "pause":
                self.is_paused, self.pause_reason = True, record.detail
            case "resume":
                self.is_paused, self.pause_reason = False, None
            case "limits":
                assert record.limits is not None
                assert record.limits_version is not None
                self.limits, self.limits_version = record.limits, record.limits_version
            case "reject":
                self.counters.rejected[record.detail or "unknown"] += 1
            case "drain":
                self.is_draining = True
            case "dead":
                self.dead_reason = record.detail

    def _apply_changes(self, changes: Changes, record: Record) -> None:
        for added in changes.added:
            self.sequences[added.seq_id] = FoldedSequence(*added)
            self.counters.num_requests += 1
        for event in changes.blocks:
            self._apply_block(event)
        for preempted in changes.preempted:
            sequence = self.running.pop(preempted.seq_id)
            sequence.status = "PREEMPTED"
            sequence.num_computed_tokens = 0
            sequence.num_lost_tokens = preempted.num_tokens
            sequence.num_preemptions += 1
            self.counters.num_preemptions += 1
        now = record.started_at if isinstance(record, StepRecord) else record.at
        for admitted in changes.admitted:
            self._admit(admitted.seq_id, admitted.num_cached_tokens, admitted.num_known_tokens, now, record)
        if isinstance(record, StepRecord):
            for computed in changes.computed:
                sequence = self.running[computed.seq_id]
                sequence.num_computed_tokens = computed.num_computed_tokens
                if computed.num_sampled:
                    self._sampled(sequence, record)
            for fork in changes.forked:
                self._fork(fork.parent_id, fork.seq_id, fork.choice_index, fork.queue_index, record)
        for finished in changes.finished:
            sequence = self.sequences.pop(finished.seq_id)
            self.running.pop(finished.seq_id, None)
            self.counters.finished[finished.reason] += sequence.num_ending
            for observer in self.on_finished:
                observer(sequence, finished, record)

    def _admit(self, seq_id: str, num_cached: int, num_known: int, now: float, record: Record) -> None:
        sequence = self.sequences[seq_id]
        counters = self.counters
        if sequence.status == "PREEMPTED":
            num_again = max(0, sequence.num_lost_tokens - num_cached)
            sequence.num_recomputed_tokens += num_again
            counters.prompt_tokens_recomputed += num_again
        else:
            sequence.num_cached_tokens = num_cached
            counters.prompt_tokens += sequence.num_prompt_tokens
            counters.prompt_tokens_cached += num_cached
            counters.prefix_cache_queries += num_known
            counters.prefix_cache_hits += num_cached
        sequence.status = "RUNNING"
        sequence.num_computed_tokens = num_cached
        self.running[seq_id] = sequence
        if sequence.first_scheduled_time is None:
            sequence.first_scheduled_time = now
            for observer in self.on_first_scheduled:
                observer(sequence, record)

    def _sampled(self, sequence: FoldedSequence, record: StepRecord) -> None:
        sequence.num_output_tokens += 1
        self.counters.generation_tokens += 1
        for observer in self.on_token:
            observer(sequence, record)
        if sequence.last_token_time is None:
            sequence.first_token_time = record.ended_at
        else:
            sequence.token_gaps_s.append(record.ended_at - sequence.last_token_time)
        sequence.last_token_time = record.ended_at

    def _fork(self, parent_id: str, seq_id: str, index: int, queue_index: int, record: StepRecord) -> None:
        parent = self.sequences[parent_id]
        child = FoldedSequence(
            seq_id, parent.request_id, index, parent.source, parent.priority, queue_index, parent.num_prompt_tokens,
            parent.max_tokens, 1, parent.arrival_time, parent.deadline, status="RUNNING",
            num_computed_tokens=parent.num_computed_tokens, num_cached_tokens=parent.num_cached_tokens,
            block_table=[e.block_id for e in record.changes.blocks if e.kind == "share" and e.seq_id == seq_id],
            first_scheduled_time=parent.first_scheduled_time,
        )  # fmt: skip
        child.peak_num_blocks = len(child.block_table)
        self.sequences[seq_id] = child
        self.running[seq_id] = child
        self._sampled(child, record)

    def _apply_block(self, event: BlockEvent) -> None:
        block_id = event.block_id
        before = block_state(self.ref_counts[block_id], self.block_hashes[block_id])
        match event.kind:
            case "allocate" | "hit" | "share" | "copy":
                assert event.seq_id is not None
                self.ref_counts[block_id] += 1
                self.owners.setdefault(block_id, []).append(event.seq_id)
                # A fork's child isn't known yet when its shares are applied: _fork gathers them.
                sequence = self.sequences.get(event.seq_id)
                if sequence is not None:
                    if event.kind == "copy":
                        assert isinstance(event.detail, int)
                        sequence.block_table[sequence.block_table.index(event.detail)] = block_id
                    else:
                        sequence.block_table.append(block_id)
                    sequence.peak_num_blocks = max(sequence.peak_num_blocks, len(sequence.block_table))
            case "free":
                assert event.seq_id is not None
                self.ref_counts[block_id] -= 1
                owners = self.owners[block_id]
                owners.remove(event.seq_id)
                if not owners:
                    del self.owners[block_id]
                sequence = self.sequences.get(event.seq_id)
                if sequence is not None:
                    table = sequence.block_table
                    if table and table[-1] == block_id:  # a sequence is freed from its tail
                        table.pop()
                    elif block_id in table:  # not the source of a copy: that has left the table already
                        table.remove(block_id)
            case "seal":
                assert isinstance(event.detail, str)
                self.block_hashes[block_id] = event.detail
            case "evict":
                self.block_hashes[block_id] = None
        after = block_state(self.ref_counts[block_id], self.block_hashes[block_id])
        if after != before:
            self.block_counts[before] -= 1
            self.block_counts[after] += 1

    def waiting(self) -> list[FoldedSequence]:
        """Waiting sequences in the order of the queue."""
        policy = self.limits.scheduling_policy
        waiting = (s for s in self.sequences.values() if s.status != "RUNNING")
        return sorted(waiting, key=lambda s: queue_key(policy, s.priority, s.queue_index, s.index))

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, preempted ones included."""
        return len(self.sequences) - len(self.running)

    @property
    def kv_usage(self) -> float:
        """(used + shared) / num_blocks."""
        return (self.block_counts["used"] + self.block_counts["shared"]) / self.num_blocks

    def snapshot(self) -> Snapshot:
        """The state as an immutable value."""
        return Snapshot(
            self.step, self.is_paused, self.limits,
            tuple(s.row() for s in self.running.values()),
            tuple(s.row() for s in self.waiting()),
            tuple(self.ref_counts), tuple(self.block_hashes),
        )  # fmt: skip


def fold(num_blocks: int, limits: Limits, records: Iterable[Record]) -> Fold:
    """The state after `records`, from an empty engine."""
    state = Fold(num_blocks, limits)
    for record in records:
        state.apply(record)
    return state
