"""What watches the engine, put together: metrics, the two kinds of streams, the chat's texts, the audit log and keys.

All of it lives on the event loop and is fed by the engine's records; the engine thread never waits for any of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from functools import partial

from app.access import Role
from app.admin.events import Publisher
from app.admin.frames import StateFrames
from app.audit import AuditLog
from app.encode import WallClock
from app.health import stuck
from app.keys import KeyRing
from app.metrics import Metrics
from app.playground.generations import Generations
from app.playground.stream import ChatStreams
from app.settings import Settings
from app.store import Store
from engine.async_engine import AsyncEngine
from engine.errors import EngineError

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 15.0
LAST_EVENTS_S = 0.5  # how long the streams get to say goodbye


class Console:
    """The observers of one engine.

    Args:
        settings: of the process.
        async_engine: what they observe; not started yet.
    """

    def __init__(self, settings: Settings, async_engine: AsyncEngine) -> None:
        engine, fold = async_engine, async_engine.state
        self.wall = WallClock(time.time() - engine.now())
        self.audit = AuditLog(settings.data_dir)
        self.store = Store(settings.data_dir)
        self.keys = KeyRing([(key.key, Role.from_label(key.role)) for key in settings.api_key], self.store)
        self.metrics = Metrics(fold, engine.info, engine.now, enable_prefix_caching=settings.enable_prefix_caching)
        tell_stuck = partial(stuck, engine)
        frames = StateFrames(
            fold, engine.trace, engine.epoch, engine.info.block_size, engine.now, self.wall, tell_stuck
        )  # fmt: skip
        self.publisher = Publisher(frames, fold, engine.epoch, engine.now)
        self.generations = Generations(engine, engine.now)
        self.chat_streams = ChatStreams(self.generations, fold, engine.now, tell_stuck)
        self.metrics.stream_clients["engine"] = lambda: len(self.publisher.clients)
        self.metrics.stream_clients["chat"] = lambda: self.chat_streams.num_readers
        # Three, so that the fault of one costs the others nothing.
        self._listeners = (self.metrics.on_records, self.publisher.on_records, self.generations.on_records)
        self._engine = engine
        self._sweeper: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to listen, on the running loop."""
        self.audit.open()
        self.keys.load(self.store.open())
        for listener in self._listeners:
            self._engine.add_listener(listener)
        self._sweeper = asyncio.create_task(self._sweep_for_ever(), name="sweeper of generations")

    async def stop(self) -> None:
        """After the engine stopped: every stream gets its last events and its end."""
        if self._sweeper is None:
            return
        self._sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeper
        self._sweeper = None
        await self.generations.finish(LAST_EVENTS_S)
        self.publisher.close("shutdown")
        self.chat_streams.close("shutdown")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_EVENTS_S):
                while self.publisher.clients or self.chat_streams.num_readers:  # noqa: ASYNC110 - they end by themselves
                    await asyncio.sleep(0.01)
        for listener in self._listeners:
            self._engine.remove_listener(listener)
        await self.audit.close()
        self.keys.write_last_uses()
        await self.store.close()

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            with contextlib.suppress(EngineError):  # a dead engine has ended everything already
                await self.generations.sweep()
