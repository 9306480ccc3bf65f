"""The engine's event stream: the state as one keyframe, then what each moment changed.

    hello  {epoch, seq, server_time, protocol}
    key    the full state                        (at connect, and instead of a backlog that grew too long)
    delta  what changed since the frame before: absolute values only, so nothing can drift
    tick   {server_time, seq, rates, num_viewers} when nothing happened for a while: "idle" is not "dead"
    bye    {reason}

What they say is in `app.admin.frames`. Each frame is encoded once and kept in a ring; a client is a position in it.
While nobody watches, records are not even looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from app.admin.frames import StateFrames
from app.sse import FrameRing, Waker, frame, parts
from engine.core.events import Record
from engine.core.stats import Fold

KEY_AGE_S = 0.5  # a keyframe says the time and the rates: it is made anew when older


class Client:
    """One viewer: where in the ring it is. None: it needs a keyframe."""

    def __init__(self) -> None:
        self.position: int | None = None
        self.waker = Waker()


class Publisher:
    """Makes frames of the records and serves them to any number of clients.

    Args:
        frames: what they say.
        fold: the live state; records are applied to it before `on_records` sees them.
        epoch: part of each event id.
        engine_now: a monotonic clock.
        frame_interval_s: least time between two frames; records in between share one.
        tick_s: longest silence.
        linger_s: how long frames are kept up after the last client left, so that it can resume.
        rates_s: how long after the last frame the rates are told again, until they are zero.
        max_backlog_bytes: frames one client may be behind before a keyframe replaces them.
    """

    def __init__(
        self,
        frames: StateFrames,
        fold: Fold,
        epoch: str,
        engine_now: Callable[[], float],
        *,
        frame_interval_s: float = 0.05,
        tick_s: float = 2.0,
        linger_s: float = 10.0,
        rates_s: float = 1.0,
        max_backlog_bytes: int = 128 * 1024,
        ring: FrameRing | None = None,
    ) -> None:
        self.clients: set[Client] = set()
        self.is_tracking = False
        self.ring = ring or FrameRing()
        self._frames = frames
        self._fold = fold
        self._epoch = epoch
        self._engine_now = engine_now
        self._frame_interval_s = frame_interval_s
        self._tick_s = tick_s
        self._linger_s = linger_s
        self._rates_s = rates_s
        self._max_backlog_bytes = max_backlog_bytes
        self._closing: str | None = None
        self._flush_handle: asyncio.Handle | None = None
        self._rates_handle: asyncio.TimerHandle | None = None
        self._flushed_at = float("-inf")
        self._left_at = 0.0
        self._key: tuple[int, float, bytes] | None = None  # ring position, time, and the keyframe that leads there
        self._pending: list[Record] = []  # applied since the last frame

    # ---- records in ------------------------------------------------------------------------------------------------

    def on_records(self, records: Sequence[Record]) -> None:
        """Take note of records that `fold` has applied; a frame follows soon."""
        if not self.is_tracking:
            return
        if not self.clients and self._engine_now() - self._left_at > self._linger_s:
            self._stop_tracking()
            return
        self._pending.extend(records)
        for record in records:
            self._frames.count_work(record)
        if self._flush_handle is None:
            loop = asyncio.get_running_loop()
            wait = self._flushed_at + self._frame_interval_s - loop.time()
            self._flush_handle = loop.call_later(wait, self._flush_now) if wait > 0 else loop.call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._flush_handle = None
        self.flush()

    def flush(self) -> None:
        """Publish what is pending as one frame, now."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        if not self._pending:
            return
        self._publish()

    def _publish(self) -> None:
        loop = asyncio.get_running_loop()
        self._flushed_at = loop.time()
        seq = self._fold.seq
        data = self._frames.delta(self._pending, len(self.clients))
        self._pending = []
        self.ring.append(seq, frame("delta", data, self._event_id(seq)))
        for client in self.clients:
            client.waker.wake()
        if self._rates_handle is not None:
            self._rates_handle.cancel()
        self._rates_handle = loop.call_later(self._rates_s, self._let_rates_fall) if self._frames.is_moving else None

    def _let_rates_fall(self) -> None:
        """Nothing has happened for a while: the rates fall all the same."""
        self._rates_handle = None
        if self.is_tracking and self.clients:
            self._publish()

    # ---- clients ---------------------------------------------------------------------------------------------------

    async def stream(self, last_event_id: str | None, client: Client | None = None) -> AsyncIterator[bytes]:
        """The frames of one client, in parts, until it leaves or `close` ends it."""
        client = client or Client()
        if not self.is_tracking:
            self._start_tracking()
        client.position = self._resume_position(last_event_id)
        self.clients.add(client)
        if self._closing is not None:
            client.waker.close(self._closing)
        try:
            yield frame("hello", self._frames.hello())
            while True:
                data = self.take(client)
                for part in parts(data):
                    yield part
                if data:
                    continue
                if client.waker.closing is not None:
                    yield frame("bye", {"reason": client.waker.closing})
                    return
                if not await client.waker.wait(self._tick_s):
                    yield frame("tick", self._frames.tick(len(self.clients)))
        finally:
            self.clients.discard(client)
            self._left_at = self._engine_now()

    def take(self, client: Client) -> bytes:
        """What `client` has not had yet, as whole frames; empty if there is nothing new."""
        frames = None if client.position is None else self.ring.since(client.position)
        if frames is None or sum(len(f.data) for f in frames) > self._max_backlog_bytes:
            self.flush()
            client.position = self.ring.end
            return self.keyframe()
        client.position = self.ring.end
        return b"".join(f.data for f in frames)

    def close(self, reason: str) -> None:
        """Say goodbye to all clients, and to those that still come."""
        self._closing = reason
        for client in self.clients:
            client.waker.close(reason)

    def keyframe(self) -> bytes:
        """The full state after the last frame; encoded once however many ask at the same time."""
        now = self._engine_now()
        if self._key is None or self._key[0] != self.ring.end or now - self._key[1] > KEY_AGE_S:
            data = frame("key", self._frames.key(len(self.clients)), self._event_id(self._fold.seq))
            self._key = (self.ring.end, now, data)
        return self._key[2]

    def _start_tracking(self) -> None:
        self.is_tracking = True
        self._frames.begin()
        self.ring.clear(self._fold.seq)

    def _stop_tracking(self) -> None:
        self.is_tracking = False
        self._pending = []
        self._key = None

    def _resume_position(self, last_event_id: str | None) -> int | None:
        epoch, _, seq = (last_event_id or "").rpartition("-")
        if epoch != self._epoch or not seq.isascii() or not seq.isdigit() or len(seq) > 18:
            return None
        return self.ring.position_after(int(seq))

    def _event_id(self, seq: int) -> str:
        return f"{self._epoch}-{seq}"
