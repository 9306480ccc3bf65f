"""Server-sent events: the wire format, a ring of frames encoded once for all clients, and the response.

A frame is bytes from the moment it is made. Clients hold a position in the ring, not a queue, so that a slow one costs
an integer; one that fell too far behind is given the whole state again (see `app.admin.events`). Line ends are `\\n`:
`\\r\\n` can be cut in two by a chunk's end, which some clients read as an empty line.

The sender is sse-starlette's. What is not used of it, and why: its pings, which could fall into the middle of a frame
that is sent in parts; its event objects, which ignore the separator; its end of all streams at the first signal, which
would come before the last events of what still runs: `Console.stop` ends them, after the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import NamedTuple

from sse_starlette.sse import AppStatus, EventSourceResponse, SendTimeoutError
from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 10.0  # a reader that takes nothing for so long is dropped
ABORT_EXTENSION = "pagedeck.abort"  # scope extension of our server: cuts the connection at once
PART_BYTES = 32 * 1024  # at most so much is handed to the server at once: what a stalled reader can pile up

AppStatus.enable_automatic_graceful_drain = False


def dumps(data: object) -> str:
    """JSON on one line, as short as it gets; refuses NaN."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def frame(event: str, data: object, event_id: str | None = None) -> bytes:
    """One event. JSON has no line ends, so its data is one line."""
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {event}\ndata: {dumps(data)}\n\n".encode()


def parts(data: bytes, size: int = PART_BYTES) -> Iterator[bytes]:
    """`data` in pieces of `size` bytes, so that the transport's flow control sees each."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


class Frame(NamedTuple):
    """An encoded frame and the sequence number of the last record in it."""

    seq: int
    data: bytes


class FrameRing:
    """The last frames of one stream. A position counts all frames ever appended.

    Args:
        max_frames: frames kept.
        max_bytes: of all frames kept; the newest is always kept.
    """

    def __init__(self, max_frames: int = 512, max_bytes: int = 2 * 1024 * 1024) -> None:
        self._frames: deque[Frame] = deque()
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self.num_bytes = 0
        self.start = 0  # position of the oldest frame kept
        self.base_seq = 0  # the state to which that frame applies

    @property
    def end(self) -> int:
        """Position of the next frame."""
        return self.start + len(self._frames)

    def clear(self, base_seq: int) -> None:
        """Forget everything; the next frame will apply to the state after record `base_seq`."""
        self.start, self.num_bytes, self.base_seq = self.end, 0, base_seq
        self._frames.clear()

    def append(self, seq: int, data: bytes) -> None:
        """Add the frame that leads to the state after record `seq`."""
        self._frames.append(Frame(seq, data))
        self.num_bytes += len(data)
        while len(self._frames) > 1 and (len(self._frames) > self._max_frames or self.num_bytes > self._max_bytes):
            dropped = self._frames.popleft()
            self.num_bytes -= len(dropped.data)
            self.base_seq = dropped.seq
            self.start += 1

    def position_after(self, seq: int) -> int | None:
        """Where a client whose state is that after record `seq` goes on; None if that is not known any more."""
        if seq == self.base_seq:
            return self.start
        for offset in range(len(self._frames) - 1, -1, -1):
            if self._frames[offset].seq == seq:
                return self.start + offset + 1
        return None

    def since(self, position: int) -> list[Frame] | None:
        """The frames from `position` on; None if some of them are gone."""
        if position < self.start:
            return None
        return [self._frames[i] for i in range(position - self.start, len(self._frames))]


class Waker:
    """Wakes one stream: something to send may be there, or the stream is to end."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.closing: str | None = None  # why it is to end

    def wake(self) -> None:
        """Have the stream look."""
        self._event.set()

    def close(self, reason: str) -> None:
        """Have the stream say goodbye and end."""
        self.closing = self.closing or reason
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Until woken since the last wait, or `timeout_s` passed; returns whether woken."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True


class EventStream(EventSourceResponse):
    """A response that streams `content`, frames as bytes, until it ends or the client leaves.

    When the client disconnects the iterator is cancelled at once, so that its `finally` frees what it held.

    Args:
        content: ends by itself once it was told to (see `Waker.close`).
        name: for the log.
    """

    def __init__(self, content: AsyncIterator[bytes], name: str, *, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        super().__init__(content, sep="\n", ping=0, send_timeout=send_timeout_s)
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one client; a reader that stalls ends its stream, not the server's peace."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            logger.info("%s: dropped a reader that took nothing for %g s", self._name, self.send_timeout)
            # Closing would wait until the reader has taken what is in the transport's buffer.
            extension = scope.get("extensions", {}).get(ABORT_EXTENSION)
            if extension is not None:
                extension["abort"]()
                await asyncio.sleep(0)  # the server learns of it before it asks why the answer is not complete


def last_event_id(headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
    """What a client that comes back says it saw last; the query is for clients that cannot set headers."""
    return headers.get("last-event-id") or query.get("last_event_id")
