"""What whoever asked reads on the event loop: one request's deltas, in order, until its last sequence has ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from engine.errors import EngineError
from engine.outputs import SequenceDelta


class RequestStream(AsyncIterator[SequenceDelta]):
    """The deltas of one request's sequences; ends after the last of them has finished."""

    def __init__(self, request_id: str, n: int) -> None:
        self.request_id = request_id
        self._num_open = n  # sequences whose end has yet to be put
        self._deltas: asyncio.Queue[SequenceDelta | EngineError] = asyncio.Queue()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> SequenceDelta:
        """The next delta.

        Raises:
            EngineDeadError: the engine died; nothing more will come.
        """
        if not self.is_open and self._deltas.empty():
            raise StopAsyncIteration
        item = await self._deltas.get()
        if isinstance(item, EngineError):
            raise item
        return item

    @property
    def is_open(self) -> bool:
        """Whether more will be put."""
        return self._num_open > 0

    def put(self, item: SequenceDelta | EngineError) -> None:
        """For the engine: what comes next."""
        if isinstance(item, EngineError):
            self._num_open = 0
        elif item.finish_reason is not None:
            self._num_open -= 1
        self._deltas.put_nowait(item)
