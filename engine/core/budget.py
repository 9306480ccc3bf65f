"""The token budget of one step, thrown away after it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.limits import Limits

# A token counts double this far into its prompt, three times twice as far. It attends to all tokens before it: 1,000 to
# 2,300 tokens in (by processor) that takes as long as everything else that is computed for it. Counting more than that
# lets a short prompt be computed in one step, and has a long one, which holds up decodes for many, yield to them.
TOKENS_TO_DOUBLE = 512


@dataclass(slots=True)
class StepBudget:
    """Tokens that are left of max_num_batched_tokens, how many of them one sequence may take, and the prompts' share.

    The share is counted in tokens at the head of a prompt; further in, fewer are as much work. It is None where nothing
    decodes: then nobody waits for a long step.
    """

    remaining: int
    per_sequence: int
    prefill_share: int | None

    @classmethod
    def of(cls, limits: Limits, num_decodes: int) -> StepBudget:
        """The budget of a fresh step in which so many sequences decode."""
        num_tokens, share = limits.max_num_batched_tokens, limits.max_prefill_tokens_while_decoding
        return cls(num_tokens, limits.long_prefill_token_threshold or num_tokens, (num_decodes and share) or None)

    def grant(self, wanted: int, position: int) -> int:
        """How many of `wanted` tokens from `position` on a sequence gets; 0 when nothing is left for it.

        Not taken until `take`. A single token is a decode, whose share nobody takes.
        """
        num_tokens = min(wanted, self.per_sequence, self.remaining)
        if wanted == 1 or self.prefill_share is None or num_tokens == 0:
            return num_tokens
        if self.prefill_share == 0:
            return 0
        return max(1, min(num_tokens, self.prefill_share * TOKENS_TO_DOUBLE // (TOKENS_TO_DOUBLE + position)))

    def take(self, num_tokens: int, position: int) -> None:
        """Spend."""
        self.remaining -= num_tokens
        if self.prefill_share is not None:
            self.prefill_share = max(0, self.prefill_share - _share_of(num_tokens, position))

    def give_back(self, num_tokens: int, position: int) -> None:
        """Return what a rolled back sequence had taken."""
        self.remaining += num_tokens
        if self.prefill_share is not None:
            self.prefill_share += _share_of(num_tokens, position)


def _share_of(num_tokens: int, position: int) -> int:
    """What a chunk takes of the prompts' share, rounded up; nothing for a decode."""
    return 0 if num_tokens == 1 else num_tokens + -(-num_tokens * position // TOKENS_TO_DOUBLE)
