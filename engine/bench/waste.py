"""The waste ledger: which share of reserved KV memory holds token states, under four rules of allocation.

The PagedAttention paper (Kwon et al., SOSP 2023, section 2 and figure 2) compares paging with three baselines that
reserve one contiguous region per request: `max` reserves max_model_len; `pow2` the prompt and the next power of two of
the true output length; `oracle` exactly the true final length. Here each is accounting over the lengths of a trace:
summed over every step of a request's decode, tokens held over slots reserved. Queueing changes when requests run, not
these sums.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

RULES = ("max", "pow2", "oracle", "paged")


@dataclass(slots=True)
class WasteLedger:
    """Token-steps held and slot-steps reserved, per rule."""

    max_model_len: int
    block_size: int
    held: int = 0
    reserved_max: int = 0
    reserved_pow2: int = 0
    reserved_oracle: int = 0
    reserved_paged: int = 0

    def add(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Account for a request that held prompt + i tokens at its i-th step of decoding."""
        prompt, steps = num_prompt_tokens, num_output_tokens
        self.held += prompt * steps + steps * (steps - 1) // 2
        self.reserved_max += self.max_model_len * steps
        self.reserved_pow2 += (prompt + (1 << (steps - 1).bit_length())) * steps
        self.reserved_oracle += (prompt + steps) * steps
        self.reserved_paged += self.block_size * sum_of_ceilings(prompt, steps, self.block_size)

    def shares(self) -> dict[str, float]:
        """{rule: share in percent}."""
        reserved = (self.reserved_max, self.reserved_pow2, self.reserved_oracle, self.reserved_paged)
        return {rule: 100 * self.held / slots for rule, slots in zip(RULES, reserved, strict=True) if slots}


def sum_of_ceilings(start: int, count: int, size: int) -> int:
    """Σ ceil((start + i) / size) for i in 0..count-1, without the loop."""

    def up_to(n: int) -> int:
        """Σ ceil(i / size) for i in 1..n."""
        full, rest = divmod(n, size)
        return size * full * (full + 1) // 2 + rest * (full + 1)

    return up_to(start + count - 1) - up_to(start - 1)


def waste_ledger(lengths: Iterable[tuple[int, int]], max_model_len: int, block_size: int) -> WasteLedger:
    """The ledger of (prompt, output) lengths."""
    ledger = WasteLedger(max_model_len, block_size)
    for num_prompt_tokens, num_output_tokens in lengths:
        ledger.add(num_prompt_tokens, num_output_tokens)
    return ledger
