"""The scheduler: which sequences compute how many tokens in the next step, and with which blocks.

There is one rule: each step gives sequences tokens so that `num_computed_tokens` catches up with the known tokens.
Chunked prefill, prefix hits and resuming after a preemption are consequences of it, not cases. Running sequences come
first, those that decode before those that prefill; then the waiting queue is admitted from its head.

Pure and deterministic: no clock (times are passed in), no randomness, no I/O.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Mapping

from engine.core.admission import Admission
from engine.core.batch import Batch, BlockCopy, Fork, NewSequence, SampledToken, ScheduledSequence
from engine.core.block_manager import BlockManager
from engine.core.block_pool import BlockPool
from engine.core.budget import StepBudget
from engine.core.changes import ChangeLog
from engine.core.events import Added, Admitted, Blocked, Computed, Finished, Forked, Preempted
from engine.core.limits import Limits
from engine.core.sequence import Sequence, child_params, child_seq_id
from engine.core.stats import Snapshot

_NOTHING: Mapping[str, str] = {}


class Scheduler:
    """Owns the queues, the block pool and the block tables.

    Args:
        num_blocks: size of the pool.
        block_size: tokens per block.
        max_model_len: known tokens at which a sequence ends.
        limits: `num_usable_blocks` 0 means all.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        limits: Limits,
        *,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.max_model_len = max_model_len
        self.limits = limits
        self.pool = BlockPool(num_blocks, limits.num_usable_blocks or num_blocks)
        self.blocks = BlockManager(self.pool, block_size, enable_prefix_caching=enable_prefix_caching)
        self.step = 0
        self.is_paused = False
        self.blocked: Blocked | None = None
        self.running: list[Sequence] = []  # in the order of admission
        self.waiting: list[Sequence] = []  # sorted by queue_key
        self.log = ChangeLog(self.pool)
        self._sequences: dict[str, Sequence] = {}
        self._requests: dict[str, list[str]] = {}  # request id -> its live sequences
        self._deadlines: list[tuple[float, str, str]] = []  # heap of (time, kind, seq_id); stale entries are skipped
        self._removed: list[str] = []  # what the runner has yet to be told to forget

    # ---- requests in and out -----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self.running or self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence. Whether it can ever fit was checked before (see `Admission.check_fits`)."""
        assert sequence.seq_id not in self._sequences, f"sequence {sequence.seq_id} exists"
        self._sequences[sequence.seq_id] = sequence
        self._requests.setdefault(sequence.request_id, []).append(sequence.seq_id)
        self._enqueue(sequence)
        if sequence.queue_deadline is not None:
            heapq.heappush(self._deadlines, (sequence.queue_deadline, "queue_timeout_s", sequence.seq_id))
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, "request_timeout_s", sequence.seq_id))
        self.log.added.append(
            Added(
                sequence.seq_id, sequence.request_id, sequence.index, sequence.source, sequence.priority,
                sequence.queue_index, sequence.num_prompt_tokens, sequence.max_tokens,
                sequence.num_slots, sequence.arrival_time, sequence.deadline,
            )
        )  # fmt: skip

    def live_sequences(self, request_id: str) -> list[Sequence]:
        """The sequences of a request that have not ended."""
        return [self._sequences[seq_id] for seq_id in self._requests.get(request_id, ())]

    def sequence(self, seq_id: str) -> Sequence | None:
        """The sequence, if it has not ended."""
        return self._sequences.get(seq_id)

    def finish(self, sequence: Sequence, reason: str, detail: str | None = None) -> int:
        """End a sequence in whatever state it is and free its blocks; returns how many references it held."""
        if sequence.status == "RUNNING":
            self.running.remove(sequence)
            self._removed.append(sequence.seq_id)
        else:
            self.waiting.remove(sequence)
        sequence.status = "FINISHED"
        num_blocks = self.blocks.free(sequence)
        del self._sequences[sequence.seq_id]
        if len(self._deadlines) > 64 + 4 * len(self._sequences):
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._sequences]
            heapq.heapify(self._deadlines)
        siblings = self._requests[sequence.request_id]
        siblings.remove(sequence.seq_id)
        if not siblings:
            del self._requests[sequence.request_id]
        if self.blocked is not None and self.blocked.seq_id == sequence.seq_id:
            self.blocked = None
        self.log.finished.append(Finished(sequence.seq_id, reason, num_blocks, detail))
        return num_blocks

    def expire(self, now: float) -> bool:
        """End what is past a deadline with reason `timeout`; returns whether anything was."""
        any_expired = False
        while self._deadlines and self._deadlines[0][0] <= now:
            _, kind, seq_id = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(seq_id)
            if sequence is None or (kind == "queue_timeout_s" and sequence.was_scheduled):
                continue
            self.finish(sequence, "timeout", kind)
            any_expired = True
        return any_expired

    @property
    def next_deadline(self) -> float | None:
        """The earliest time at which `expire` may find something."""
        return self._deadlines[0][0] if self._deadlines else None

    # ---- commands ----------------------------------------------------------------------------------------------

    def set_limits(self, limits: Limits) -> None:
        """Apply new limits at once: re-sort the queue, preempt down to the usable blocks, fail what can't fit now."""
        if limits.scheduling_policy != self.limits.scheduling_policy:
            self.waiting.sort(key=lambda s: s.queue_key(limits.scheduling_policy))
        self.limits = limits
        self.pool.num_usable = limits.num_usable_blocks or self.pool.num_blocks
        while self.pool.num_available < 0:
            self._preempt(self._victim(), by=None)
        for sequence in list(self.waiting):
            problem = self.admission.never_fits(sequence)
            if problem is not None:
                self.finish(sequence, "error", problem)

    def reset_prefix_cache(self) -> int:
        """Drop the content of every block's identity; returns how many had one."""
        return self.pool.forget_contents()

    # ---- the step ----------------------------------------------------------------------------------------------

    def schedule(self) -> Batch:
        """Decide the next step, take its blocks, and say why the head of the queue had to wait."""
        self.step += 1
        plan = _Plan()
        budget = self._schedule_running(plan)
        self._admit_waiting(budget, plan)
        self._ensure_progress(plan)
        removed, self._removed = tuple(self._removed), []
        return Batch(
            self.step, removed, tuple(plan.new), tuple(plan.copies), tuple(plan.scheduled.values()), plan.forks()
        )

    def _schedule_running(self, plan: _Plan) -> StepBudget:
        """Plan what runs, and return what is left of the step's budget."""
        decoding = [s for s in self.running if len(s.token_ids) - s.num_computed_tokens == 1]
        prefilling = [s for s in self.running if len(s.token_ids) - s.num_computed_tokens > 1]
        budget = StepBudget.of(self.limits, len(decoding))
        if len(decoding) > budget.remaining:  # the budget was set below what runs: everyone gets a turn
            turn = self.step % len(decoding)
            decoding = decoding[turn:] + decoding[:turn]
        for sequence in decoding + prefilling:
            if sequence.status != "RUNNING":  # preempted or ended for one before it
                continue
            if budget.remaining and self.blocks.can_decode_in_place(sequence):
                plan.add_decode(sequence)
                budget.remaining -= 1
                continue
            position = sequence.num_computed_tokens
            num_tokens = budget.grant(sequence.num_tokens - position, position)
            if num_tokens == 0:
                break
            if self._make_room(sequence, num_tokens, budget, plan):
                new_block_ids, copy = self.blocks.append(sequence, num_tokens)
                plan.add(sequence, num_tokens, new_block_ids, copy)
                budget.take(num_tokens, position)
        return budget

    def _make_room(self, sequence: Sequence, num_tokens: int, budget: StepBudget, plan: _Plan) -> bool:
        """Preempt until `sequence` can append; False if it had to be preempted or ended itself."""
        while self.blocks.num_blocks_to_append(sequence, num_tokens) > self.pool.num_available:
            if len(self.running) == 1:
                self.finish(sequence, "length", "the sequence has filled the usable pool")
                return False
            victim = self._victim()
            if (planned := plan.roll_back(victim)) is not None:
                budget.give_back(planned.num_tokens, planned.num_computed_tokens)
            self._preempt(victim, by=sequence.seq_id)
            if victim is sequence:
                return False
        return True

    def _victim(self) -> Sequence:
        if self.limits.scheduling_policy == "priority":
            return max(self.running, key=lambda s: s.queue_key("priority"))
        return self.running[-1]

    def _preempt(self, sequence: Sequence, by: str | None) -> None:
        """Preemption by recompute: blocks freed, nothing computed, back in the queue at its place by arrival."""
        self.running.remove(sequence)
        self._removed.append(sequence.seq_id)
        num_tokens = sequence.num_computed_tokens
        num_blocks = self.blocks.free(sequence)
        sequence.status = "PREEMPTED"
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        self._enqueue(sequence)
        self.log.preempted.append(Preempted(sequence.seq_id, by, num_blocks, num_tokens))

    def _enqueue(self, sequence: Sequence) -> None:
        policy = self.limits.scheduling_policy
        insort(self.waiting, sequence, key=lambda s: s.queue_key(policy))

    @property
    def admission(self) -> Admission:
        """The tests under the current limits."""
        return Admission(self.blocks, self.limits, self.max_model_len)

    def _admit_waiting(self, budget: StepBudget, plan: _Plan) -> None:
        self.blocked = None
        admission = self.admission
        has_preempted = bool(self.log.preempted)
        self.blocks.expect_nothing()
        if self.waiting and not has_preempted:
            for seq_id, _, num_tokens, _, _ in plan.scheduled.values():
                if num_tokens > 1:
                    self.blocks.expect(self._sequences[seq_id], num_tokens)
        while self.waiting:
            sequence = self.waiting[0]
            prefix = self.blocks.find_cached_prefix(sequence)
            self.blocked = admission.blocked(sequence, prefix, budget, self.running, has_preempted=has_preempted)
            if self.blocked is not None:
                if self.running:
                    return
                # Nothing runs and it doesn't fit: it never will. Fail it rather than block everyone behind.
                self.finish(sequence, "error", admission.never_fits(sequence) or "it cannot be scheduled")
                continue
            self.waiting.pop(0)
            self._admit(sequence, prefix, budget, plan)

    def _admit(self, sequence: Sequence, prefix: list[int], budget: StepBudget, plan: _Plan) -> None:
        is_resumed = sequence.was_scheduled
        self.blocks.admit(sequence, prefix)
        sequence.num_computed_tokens = len(prefix) * self.blocks.block_size
        if not is_resumed:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        sequence.status = "RUNNING"
        sequence.was_scheduled = True
        self.running.append(sequence)
        position = sequence.num_computed_tokens
        num_tokens = budget.grant(sequence.num_tokens - position, position)
        budget.take(num_tokens, position)
        plan.add_new(sequence, num_tokens)
        if self.waiting:  # somebody may share it
            self.blocks.expect(sequence, num_tokens)
        self.log.admitted.append(
            Admitted(sequence.seq_id, sequence.num_computed_tokens, sequence.num_tokens, is_resumed)
        )

    def _ensure_progress(self, plan: _Plan) -> None:
        """Liveness: a step computes something, or ends or preempts a sequence."""
        if not plan.scheduled and self.running and not self.log.preempted and not self.log.finished:
            raise RuntimeError(f"step {self.step} schedules nothing although {len(self.running)} sequences run")

    def update(
        self, batch: Batch, sampled: Iterable[SampledToken], stopped: Mapping[str, str], failed: Mapping[str, str],
        stopped_at_end: Mapping[str, str] = _NOTHING,
    ) -> None:  # fmt: skip
        """Take the step's result: tokens computed and sampled, siblings forked, sequences ended.

        Args:
            sampled: one token per sequence that sampled, forks included.
            stopped: sequences whose text reached a stop string, with that string.
            failed: sequences the runner could not sample for, with the message.
            stopped_at_end: sequences whose text has reached a stop string if this token is their last.
        """
        new = tuple.__new__  # a NamedTuple's own constructor takes twice as long, and there is one per sequence
        tokens = {s.seq_id: s.token_id for s in sampled}
        sequences, computed, block_size = self._sequences, self.log.computed, self.blocks.block_size
        for seq_id, before, num_tokens, _, _ in batch.scheduled:
            sequence = sequences[seq_id]
            after = sequence.num_computed_tokens = before + num_tokens
            if before // block_size != after // block_size:
                self.blocks.seal_full_blocks(sequence, before)
            computed.append(new(Computed, (seq_id, num_tokens, after, 1 if seq_id in tokens else 0)))
        for fork in batch.forks:
            if fork.child_id in tokens:
                self._fork(self._sequences[fork.parent_id], fork.child_id)
        for seq_id, token_id in tokens.items():
            sequence = sequences[seq_id]
            token_ids = sequence.token_ids
            token_ids.append(token_id)
            if seq_id in stopped:
                self.finish(sequence, "stop", stopped[seq_id])
            elif token_id in sequence.end_token_ids or len(token_ids) >= sequence.max_num_tokens:
                reason = sequence.finish_reason(token_id)
                if reason is not None and seq_id in stopped_at_end:
                    reason = "stop", stopped_at_end[seq_id]
                if reason is not None:
                    self.finish(sequence, *reason)
        for seq_id, message in failed.items():
            if (live := self._sequences.get(seq_id)) is not None:
                self.finish(live, "error", message)

    def _fork(self, parent: Sequence, child_id: str) -> None:
        index = int(child_id.rpartition(".")[2])
        child = parent.fork(index)
        parent.num_pending_forks -= 1
        self.blocks.fork(parent, child)
        self._sequences[child_id] = child
        self._requests[child.request_id].append(child_id)
        self.running.append(child)
        if child.deadline is not None:
            heapq.heappush(self._deadlines, (child.deadline, "request_timeout_s", child_id))
        self.log.forked.append(Forked(parent.seq_id, child_id, index, child.queue_index))

    # ---- looking in --------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The state as an immutable value; equal to the fold of all records."""
        return Snapshot(
            self.step, self.is_paused, self.limits,
            tuple(s.row() for s in self.running), tuple(s.row() for s in self.waiting),
            tuple(self.pool.ref_counts), tuple(self.pool.block_hashes),
        )  # fmt: skip

    def check_invariants(self) -> None:
        """Prove the state consistent; for tests, and when idle.

        Raises:
            AssertionError: says what broke.
        """
        self.pool.check_invariants([s.block_table for s in self.running])
        policy = self.limits.scheduling_policy
        keys = [s.queue_key(policy) for s in self.waiting]
        assert keys == sorted(keys), "the waiting queue is out of order"
        assert {s.seq_id for s in self.running + self.waiting} == set(self._sequences), "a sequence is in no queue"
        for sequence in self.waiting:
            assert not sequence.block_table, f"{sequence.seq_id} waits and holds blocks"
            assert sequence.num_computed_tokens == 0, f"{sequence.seq_id} waits and has computed tokens"
        for sequence in self.running:
            held = len(sequence.block_table) * self.blocks.block_size
            assert sequence.num_computed_tokens <= held, f"{sequence.seq_id} has computed more than its blocks hold"
            assert sequence.num_computed_tokens < sequence.num_tokens, f"{sequence.seq_id} has nothing to compute"


class _Plan:
    """One step's batch while it is being made; a victim can be taken out of it again."""

    def __init__(self) -> None:
        self.scheduled: dict[str, ScheduledSequence] = {}
        self.new: list[NewSequence] = []
        self.copies: list[BlockCopy] = []
        self._forking: dict[str, Sequence] = {}

    def add(
        self, sequence: Sequence, num_tokens: int, new_block_ids: tuple[int, ...], copy: BlockCopy | None = None
    ) -> None:
        is_sampling = sequence.num_computed_tokens + num_tokens == sequence.num_tokens
        self.scheduled[sequence.seq_id] = ScheduledSequence(
            sequence.seq_id, sequence.num_computed_tokens, num_tokens, new_block_ids, is_sampling
        )
        if copy is not None:
            self.copies.append(copy)
        if is_sampling and sequence.num_pending_forks:
            self._forking[sequence.seq_id] = sequence

    def add_decode(self, sequence: Sequence) -> None:
        """One token of a sequence that needs no block for it: most of what most steps do."""
        seq_id = sequence.seq_id
        decode = (seq_id, sequence.num_computed_tokens, 1, (), True)
        self.scheduled[seq_id] = tuple.__new__(ScheduledSequence, decode)

    def add_new(self, sequence: Sequence, num_tokens: int) -> None:
        self.new.append(
            NewSequence(
                sequence.seq_id, tuple(sequence.token_ids), sequence.num_prompt_tokens, tuple(sequence.block_table),
                sequence.sampling_params, sequence.eos_token_ids,
            )
        )  # fmt: skip
        self.add(sequence, num_tokens, ())

    def roll_back(self, sequence: Sequence) -> ScheduledSequence | None:
        """Forget what was planned for it in this step; returns that."""
        planned = self.scheduled.pop(sequence.seq_id, None)
        self.copies = [copy for copy in self.copies if copy.seq_id != sequence.seq_id]
        self._forking.pop(sequence.seq_id, None)
        return planned

    def forks(self) -> tuple[Fork, ...]:
        return tuple(
            Fork(s.seq_id, child_seq_id(s.request_id, i), child_params(s.sampling_params, i))
            for s in self._forking.values()
            for i in range(1, s.num_pending_forks + 1)
        )
