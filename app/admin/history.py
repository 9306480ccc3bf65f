"""The past as the charts show it: one short row per step, found by undoing records one by one from the present.

What ran, waited and was held after each step is in no record: the records say what changed. Going backwards needs no
beginning, so that a ring which has lost its first records still tells the whole past that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.events import BlockEvent, Record, StepRecord
from engine.core.stats import Fold, block_state

_TAKEN = ("allocate", "copy", "hit", "share")  # one more reference


def step_minis(records: Sequence[Record], fold: Fold) -> list[list[float]]:
    """One row for each step in `records`, the last that `fold` has applied; the last five numbers are of after it.

    `[step, prefill tokens, decode tokens, preemptions, milliseconds, running, waiting, used, shared, cached]`, the
    last three in blocks.
    """
    minis: list[list[float]] = []
    num_running, num_waiting, blocks = len(fold.running), fold.num_waiting, _PastBlocks(fold)
    for record in reversed(records):
        changes = record.changes
        if isinstance(record, StepRecord):
            milliseconds = round((record.ended_at - record.started_at) * 1000, 3)
            minis.append([
                record.step, record.num_prefill_tokens, record.num_decode_tokens, len(changes.preempted),
                milliseconds, num_running, num_waiting, *(blocks.counts[name] for name in ("used", "shared", "cached")),
            ])  # fmt: skip
        # A running sequence holds at least one block and a waiting one none, which tells where a finished one was.
        ended_running = sum(1 for f in changes.finished if f.num_blocks)
        num_waiting += len(changes.finished) - ended_running + len(changes.admitted) - len(changes.preempted)
        num_waiting -= len(changes.added)
        num_running += ended_running + len(changes.preempted) - len(changes.admitted) - len(changes.forked)
        blocks.undo(changes.blocks)
    minis.reverse()
    return minis


class _PastBlocks:
    """How many blocks were in each state, from the present back. Only blocks that changed are looked at."""

    def __init__(self, fold: Fold) -> None:
        self.counts = dict(fold.block_counts)
        self._fold = fold
        self._blocks: dict[int, tuple[int, str | None]] = {}  # block -> (ref_count, hash) where it was not as now

    def undo(self, events: Iterable[BlockEvent]) -> None:
        """Go to before `events`, which are in the order in which they happened."""
        fold = self._fold
        for event in reversed(tuple(events)):
            block_id = event.block_id
            ref_count, block_hash = self._blocks.get(block_id, (fold.ref_counts[block_id], fold.block_hashes[block_id]))
            after = block_state(ref_count, block_hash)
            if event.kind in _TAKEN:
                ref_count -= 1
            elif event.kind == "free":
                ref_count += 1
            else:  # sealed: it had no hash before; evicted: it had one, of which only that it was there counts here
                block_hash = None if event.kind == "seal" else ""
            self._blocks[block_id] = ref_count, block_hash
            before = block_state(ref_count, block_hash)
            self.counts[after] -= 1
            self.counts[before] += 1
