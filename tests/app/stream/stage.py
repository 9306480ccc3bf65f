"""A synchronous engine with everything that makes frames of it, and what a client of them should hold."""

from __future__ import annotations

from typing import Any

from app.admin.frames import MAX_WAITING_ROWS, StateFrames
from app.encode import WallClock, block_code, block_owner, counters, kv, row, whys
from engine.core.events import Record
from engine.core.stats import Fold
from engine.core.trace import TraceRing
from engine.engine import Engine
from tests.app.stream.mirror import Mirror
from tests.helpers.engines import FakeClock, Recorder, make_engine, make_request

WALL = WallClock(1_000_000.0)


class Stage:
    """A synchronous engine, its fold, and the frames made of it."""

    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock()
        self.engine: Engine = make_engine(clock=self.clock, **options)
        self.recorder = Recorder(self.engine)
        self.fold = Fold(self.engine.info.num_blocks, self.engine.start_limits)
        self.trace = TraceRing()
        self.frames, self.late_frames = (
            StateFrames(self.fold, self.trace, "e1", 16, self.clock, WALL) for _ in range(2)
        )
        self.mirror = Mirror()

    def begin(self) -> None:
        self.frames.begin()
        self.mirror.feed("key", self.frames.key(1), None)

    def apply(self) -> list[Record]:
        """Fold what the engine has recorded since."""
        records = self.recorder.records[self.fold.seq :]
        for record in records:
            self.fold.apply(record)
            self.trace.append(record)
        return records

    def publish(self) -> dict[str, Any]:
        delta = self.frames.delta(self.apply(), 1)
        self.mirror.feed("delta", delta, None)
        return delta

    def submit(self, *args: Any, **options: Any) -> None:
        self.recorder.take(self.engine.add(make_request(*args, **options)))

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.recorder.take(self.engine.step())


def expected(fold: Fold, wall: WallClock = WALL) -> dict[str, Any]:
    """What a client should hold, spelled out from the fold alone."""
    order = fold.waiting()[:MAX_WAITING_ROWS]
    rows = {s.seq_id: row(s, fold, wall, None) for s in fold.running.values()}
    rows |= {s.seq_id: row(s, fold, wall, why) for s, why in zip(order, whys(fold, order), strict=True)}
    return {
        "seq": fold.seq, "step": fold.step, "paused": fold.is_paused, "pause_reason": fold.pause_reason,
        "draining": fold.is_draining, "dead": fold.dead_reason, "limits": fold.limits.as_dict(),
        "limits_version": fold.limits_version, "kv": kv(fold, 16), "counters": counters(fold.counters), "rows": rows,
        "running": list(fold.running), "waiting": [s.seq_id for s in order], "waiting_total": fold.num_waiting,
        "blocks": [(block_code(fold, b), fold.ref_counts[b], block_owner(fold, b)) for b in range(fold.num_blocks)],
    }  # fmt: skip
