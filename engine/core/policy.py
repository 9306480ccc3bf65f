"""Who is next and who is preempted, as one total order per policy; nothing here holds state."""

from __future__ import annotations

QueueKey = tuple[int, int, int]


def queue_key(policy: str, priority: int, queue_index: int, index: int) -> QueueKey:
    """Sort key of the waiting queue: smallest first.

    fcfs: by arrival. priority: by (priority, arrival), lower values are more urgent. Siblings of one request follow
    each other by index. A preempted sequence keeps its arrival, so that it is ahead of all that came after it: that
    is what puts it back to the front, in an order that doesn't depend on when it was preempted.
    """
    return (priority if policy == "priority" else 0, queue_index, index)
