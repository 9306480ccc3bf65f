"""A bounded ring of the latest records."""

from __future__ import annotations

from collections import deque
from itertools import islice

from engine.core.events import CommandRecord, Record, StepRecord


class TraceRing:
    """Keeps the last `max_records` records; their `seq` has no gaps, so a record is found by subtraction."""

    def __init__(self, max_records: int = 1024) -> None:
        self._records: deque[Record] = deque(maxlen=max_records)

    def append(self, record: Record) -> None:
        """Add the next record; the oldest leaves when the ring is full."""
        self._records.append(record)

    @property
    def first_seq(self) -> int | None:
        """The oldest record kept."""
        return self._records[0].seq if self._records else None

    @property
    def last_seq(self) -> int:
        """The newest record; 0 before the first."""
        return self._records[-1].seq if self._records else 0

    def records(self, from_seq: int, limit: int) -> list[Record]:
        """At most `limit` records, the first of them `from_seq` or the oldest kept after it."""
        start = max(0, from_seq - self._records[0].seq) if self._records else 0
        return list(islice(self._records, start, start + limit))

    def steps(self, from_step: int, limit: int) -> list[StepRecord]:
        """At most `limit` executed steps, `from_step` or the oldest kept after it first."""
        steps = (r for r in self._records if isinstance(r, StepRecord) and r.step >= from_step)
        return list(islice(steps, limit))

    def step(self, number: int) -> StepRecord | None:
        """The record of step `number`, if it is still kept."""
        found = self.steps(number, 1)
        return found[0] if found and found[0].step == number else None

    def commands(self, limit: int) -> list[CommandRecord]:
        """The latest `limit` command records, oldest first."""
        found = [r for r in self._records if isinstance(r, CommandRecord)]
        return found[-limit:] if limit else []
