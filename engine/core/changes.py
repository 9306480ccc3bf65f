"""Collects what the scheduler does until it becomes one record."""

from __future__ import annotations

from engine.core.block_pool import BlockPool
from engine.core.events import Added, Admitted, Changes, Computed, Finished, Forked, Preempted


class ChangeLog:
    """Append-only lists of one record's changes; `take` freezes and empties them."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._clear()

    def _clear(self) -> None:
        self.added: list[Added] = []
        self.preempted: list[Preempted] = []
        self.admitted: list[Admitted] = []
        self.computed: list[Computed] = []
        self.forked: list[Forked] = []
        self.finished: list[Finished] = []

    def take(self) -> Changes:
        """Everything since the last call."""
        events, self._pool.events = self._pool.events, []
        changes = Changes(
            tuple(self.added), tuple(events), tuple(self.preempted), tuple(self.admitted), tuple(self.computed),
            tuple(self.forked), tuple(self.finished),
        )  # fmt: skip
        self._clear()
        return changes
