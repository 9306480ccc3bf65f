"""The token budget of one step, thrown away after it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.limits import Limits


@dataclass(slots=True)
class StepBudget:
    """`remaining` tokens of max_num_batched_tokens, and how many of them one sequence may take."""

    remaining: int
    per_sequence: int

    @classmethod
    def of(cls, limits: Limits) -> StepBudget:
        """The budget of a fresh step."""
        threshold = limits.long_prefill_token_threshold
        return cls(limits.max_num_batched_tokens, threshold or limits.max_num_batched_tokens)

    def grant(self, wanted: int) -> int:
        """How many of `wanted` tokens a sequence gets; 0 when nothing is left. Not taken until `take`."""
        return min(wanted, self.per_sequence, self.remaining)

    def take(self, num_tokens: int) -> None:
        """Spend."""
        self.remaining -= num_tokens

    def give_back(self, num_tokens: int) -> None:
        """Return what a rolled back sequence had taken."""
        self.remaining += num_tokens
