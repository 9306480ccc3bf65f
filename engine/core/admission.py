"""The tests a waiting sequence must pass to run, in order, and the numbers of the one that failed."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from engine.core.block_manager import BlockManager
from engine.core.budget import StepBudget
from engine.core.events import Blocked
from engine.core.limits import Limits
from engine.core.sequence import Sequence
from engine.errors import InvalidValueError, RequestTooLongError


@dataclass(frozen=True, slots=True)
class Admission:
    """Slots, then token budget and the prompts' share, then blocks for the whole known sequence above the watermark."""

    blocks: BlockManager
    limits: Limits
    max_model_len: int

    @property
    def num_usable(self) -> int:
        """Blocks that sequences may hold."""
        return self.blocks.pool.num_usable

    def check_fits(self, num_prompt_tokens: int, n: int) -> None:
        """Refuse a request that can never run.

        Raises:
            RequestTooLongError: prompt + 1 token exceed max_model_len or the usable pool.
            InvalidValueError: n exceeds max_num_seqs.
        """
        if num_prompt_tokens + 1 > self.max_model_len:
            raise RequestTooLongError(
                f"the prompt has {num_prompt_tokens} tokens; with at least 1 token of output it exceeds "
                f"max_model_len = {self.max_model_len}"
            )
        capacity = self.num_usable * self.blocks.block_size
        if num_prompt_tokens + 1 > capacity:
            raise RequestTooLongError(
                f"the prompt has {num_prompt_tokens} tokens; with at least 1 token of output it needs "
                f"{self.blocks.num_blocks_for(num_prompt_tokens + 1)} KV blocks of {self.blocks.block_size} tokens, "
                f"and {self.num_usable} are usable ({capacity} tokens)"
            )
        if n > self.limits.max_num_seqs:
            raise InvalidValueError("n", n, f"at most max_num_seqs ({self.limits.max_num_seqs})")

    def never_fits(self, sequence: Sequence) -> str | None:
        """Why `sequence` could not run even alone under the current limits; None if it could."""
        if sequence.num_slots > self.limits.max_num_seqs:
            return f"it needs {sequence.num_slots} slots and max_num_seqs is {self.limits.max_num_seqs}"
        needed = self.blocks.num_blocks_for(sequence.num_tokens)
        if needed > self.num_usable:
            return f"its {sequence.num_tokens} tokens need {needed} KV blocks and {self.num_usable} are usable"
        return None

    def blocked(
        self, sequence: Sequence, prefix: list[int], budget: StepBudget, running: SequenceOf[Sequence], *,
        has_preempted: bool,
    ) -> Blocked | None:  # fmt: skip
        """The first test that fails, or None if the sequence can be admitted now."""
        blocks = self.blocks
        available = blocks.pool.num_available
        needed = blocks.num_blocks_to_take(sequence, prefix)
        if has_preempted and running:
            return Blocked(sequence.seq_id, "preemption", needed, available, 0)
        slots = self.limits.max_num_seqs - sum(s.num_slots for s in running)
        if sequence.num_slots > slots:
            return Blocked(sequence.seq_id, "slots", sequence.num_slots, max(slots, 0), 0)
        if budget.remaining == 0:
            return Blocked(sequence.seq_id, "token_budget", 1, 0, 0)
        position = len(prefix) * blocks.block_size
        if budget.grant(sequence.num_tokens - position, position) == 0:
            return Blocked(sequence.seq_id, "prefill_budget", 1, 0, 0)
        watermark = 0
        if running:
            # Each sibling will copy the last block, or start one, right after the fork.
            needed += sequence.num_pending_forks
            watermark = int(self.limits.watermark * self.num_usable)
        if needed + watermark > available:
            return Blocked(sequence.seq_id, "blocks", needed, max(available, 0), watermark)
        return None
