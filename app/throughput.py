"""One line of log every ten seconds while there is something to say."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from engine.core.stats import Fold

logger = logging.getLogger("app.throughput")

INTERVAL_S = 10.0


class Totals(NamedTuple):
    """The counters that a rate is a difference of."""

    computed_prompt_tokens: int  # with what was recomputed, less what the cache held
    generation_tokens: int
    num_preemptions: int
    step: int

    @classmethod
    def of(cls, state: Fold) -> Totals:
        """Right now."""
        counters = state.counters
        computed = counters.prompt_tokens - counters.prompt_tokens_cached + counters.prompt_tokens_recomputed
        return cls(computed, counters.generation_tokens, counters.num_preemptions, state.step)


def line(before: Totals, state: Fold, seconds: float) -> str | None:
    """What happened in the last `seconds`; None where no step ran and nothing waits."""
    now = Totals.of(state)
    if now.step == before.step and not state.sequences:
        return None
    prompt, generation, preemptions, steps = (new - old for new, old in zip(now, before, strict=True))
    return (
        f"{steps / seconds:.1f} steps/s, prefill {prompt / seconds:.1f} tokens/s, "
        f"generation {generation / seconds:.1f} tokens/s, running {len(state.running)}, waiting {state.num_waiting}, "
        f"KV {state.kv_usage:.1%}, preemptions {preemptions}"
    )


async def log_throughput(
    state: Fold, interval_s: float = INTERVAL_S, stuck_for_s: Callable[[], float | None] = lambda: None
) -> None:
    """Log for ever; cancel it to stop. `stuck_for_s` tells for how long a step has been running that takes too long."""
    while True:
        before = Totals.of(state)
        await asyncio.sleep(interval_s)
        text = line(before, state, interval_s)
        if text is not None:
            logger.info(text)
        if (running_s := stuck_for_s()) is not None:
            logger.warning("step %d has been running for %.0f s: nobody gets a token", state.step + 1, running_s)
