"""What the frames of the engine's event stream say: the whole state, or what some records changed of it.

Nothing is folded here: the state is read from the live `Fold`, and the records since the last frame only tell which
rows and blocks they touched. All values are absolute. Field by field: README.md of `app`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from app.encode import (
    Json,
    WallClock,
    block_code,
    block_map,
    block_owner,
    counters,
    first_waiting,
    kv,
    row,
    step_minis,
    whys,
)
from app.narration import Narrator
from engine.core.events import Record, StepRecord
from engine.core.stats import Fold, FoldedSequence
from engine.core.trace import TraceRing

PROTOCOL = 1
MAX_WAITING_ROWS = 200
MAX_RECENT_STEPS = 600
MAX_RECENT_EVENTS = 200
RATE_WINDOW_S = 3.0
_ROW_KEYS = ("id", "status")  # in each row, however little of it changed


class StateFrames:
    """The content of frames; remembers what the last one left its readers with.

    Args:
        fold: the live state.
        trace: the latest records, for what a keyframe says of the past.
        epoch: of this process.
        block_size: tokens per block.
        engine_now: the engine's clock.
        wall: from that clock to Unix time.
    """

    def __init__(
        self,
        fold: Fold,
        trace: TraceRing,
        epoch: str,
        block_size: int,
        engine_now: Callable[[], float],
        wall: WallClock,
    ) -> None:
        self._fold = fold
        self._trace = trace
        self._epoch = epoch
        self._block_size = block_size
        self._engine_now = engine_now
        self._wall = wall
        self._start_limits = fold.limits
        self._scalars: Json = {}
        self._order: list[FoldedSequence] = []  # the waiting sequences shown
        self._shown_order: list[str] = []
        self._shown_running: list[str] = []
        self._shown: dict[str, Json] = {}  # rows without their block tables
        self._narrator = Narrator()
        self._steps: deque[list[float]] = deque(maxlen=MAX_RECENT_STEPS)
        self._events: deque[Json] = deque(maxlen=MAX_RECENT_EVENTS)
        self._work: deque[tuple[float, int]] = deque()  # (end of a step, tokens sampled) in the rates' window

    def begin(self) -> None:
        """From a state that nobody was shown: take the past from the trace."""
        fold = self._fold
        records = self._trace.records(0, fold.seq)
        self._steps.clear()
        self._steps.extend(step_minis(records, len(fold.running), fold.num_waiting)[-MAX_RECENT_STEPS:])
        has_all = bool(records) and records[0].seq == 1
        self._narrator = Narrator(self._start_limits if has_all else None)
        self._events.clear()
        self._work.clear()
        for record in records:
            self._events.extend(event.as_json() for event in self._narrator.tell(record))
            self.count_work(record)
        self._narrator.limits = fold.limits
        self._look()
        reasons = dict(zip(self._shown_order, whys(fold, self._order), strict=True))
        self._shown = {s.seq_id: self._row(s, reasons.get(s.seq_id)) for s in self._visible()}
        self._scalars = self._all_scalars()

    def hello(self) -> Json:
        """The first words on each connection."""
        return {"epoch": self._epoch, "seq": self._fold.seq, "server_time": self._now(), "protocol": PROTOCOL}

    def tick(self, num_viewers: int) -> Json:
        """What there is to say when nothing happened."""
        data: Json = {"server_time": self._now(), "seq": self._fold.seq}
        return {**data, "rates": self.rates(), "num_viewers": num_viewers}

    def key(self, num_viewers: int) -> Json:
        """The whole state; nothing may be pending."""
        fold, order = self._fold, self._order
        return {
            "seq": fold.seq,
            "step": fold.step,
            "server_time": self._now(),
            **self._all_scalars(),
            "rates": self.rates(),
            "num_viewers": num_viewers,
            "running": [row(s, fold, self._wall, None) for s in fold.running.values()],
            "waiting": [row(s, fold, self._wall, why) for s, why in zip(order, whys(fold, order), strict=True)],
            "waiting_total": fold.num_waiting,
            "blocks": block_map(fold),
            "recent_steps": list(self._steps),
            "recent_events": list(self._events),
        }

    def delta(self, records: Sequence[Record], num_viewers: int) -> Json:
        """What `records`, all that were applied since the last frame, changed."""
        fold = self._fold
        data: Json = {
            "seq": fold.seq,
            "step": fold.step,
            "server_time": self._now(),
            "rates": self.rates(),
            "num_viewers": num_viewers,
            "waiting_total": fold.num_waiting,
            **self._changed_scalars(),
        }
        touched, tables, blocks, is_reordered = _touched(records)
        for block_id in blocks:  # a block that is shared, or no longer, changes the rows of all its owners
            touched.update(fold.owners.get(block_id, ()))
        if is_reordered:
            data |= self._orders()
        rows = self._rows(touched, tables)
        if rows:
            data["rows"] = rows
        if blocks:
            data["blocks"] = [[b, block_code(fold, b), fold.ref_counts[b], block_owner(fold, b)] for b in blocks]
        minis = step_minis(records, len(fold.running), fold.num_waiting)
        if minis:
            data["steps"] = minis
            self._steps.extend(minis)
        events = [event.as_json() for record in records for event in self._narrator.tell(record)]
        if events:
            data["events"] = events
            self._events.extend(events)
        return data

    def count_work(self, record: Record) -> None:
        """Take a step into the rates."""
        if isinstance(record, StepRecord):
            sampled = sum(c.num_sampled for c in record.changes.computed) + len(record.changes.forked)
            self._work.append((record.ended_at, sampled))

    @property
    def is_moving(self) -> bool:
        """Whether the last rates were not zero."""
        return bool(self._work)

    def rates(self) -> Json:
        """Steps and generated tokens per second over the last few seconds."""
        start = self._engine_now() - RATE_WINDOW_S
        while self._work and self._work[0][0] < start:
            self._work.popleft()
        num_tokens = sum(tokens for _, tokens in self._work)
        return {
            "steps_per_s": round(len(self._work) / RATE_WINDOW_S, 1),
            "tokens_per_s": round(num_tokens / RATE_WINDOW_S, 1),
        }

    def _now(self) -> float:
        return self._wall.unix(self._engine_now())

    def _look(self) -> None:
        """Take the queue's and the running sequences' order from the fold."""
        self._order = first_waiting(self._fold, MAX_WAITING_ROWS)
        self._shown_order = [s.seq_id for s in self._order]
        self._shown_running = list(self._fold.running)

    def _visible(self) -> list[FoldedSequence]:
        return [*self._fold.running.values(), *self._order]

    def _row(self, sequence: FoldedSequence, why: Json | None) -> Json:
        return row(sequence, self._fold, self._wall, why, blocks=False)

    def _all_scalars(self) -> Json:
        fold = self._fold
        return {
            "paused": fold.is_paused,
            "pause_reason": fold.pause_reason,
            "draining": fold.is_draining,
            "dead": fold.dead_reason,
            "limits": fold.limits.as_dict(),
            "limits_version": fold.limits_version,
            "kv": kv(fold, self._block_size),
            "counters": counters(fold.counters),
        }

    def _changed_scalars(self) -> Json:
        before, self._scalars = self._scalars, self._all_scalars()
        return {name: value for name, value in self._scalars.items() if name not in before or before[name] != value}

    def _orders(self) -> Json:
        data: Json = {}
        before = self._shown_order, self._shown_running
        self._look()
        if self._shown_order != before[0]:
            data["waiting_order"] = self._shown_order
        if self._shown_running != before[1]:
            data["running_order"] = self._shown_running
        visible = {s.seq_id for s in self._visible()}
        removed = [seq_id for seq_id in self._shown if seq_id not in visible]
        for seq_id in removed:
            del self._shown[seq_id]
        if removed:
            data["removed"] = removed
        return data

    def _rows(self, touched: set[str], tables: set[str]) -> list[Json]:
        """Of each row what changed, `id` and `status`; a row that is new is whole."""
        fold = self._fold
        changed = []
        for sequence in fold.running.values():
            if sequence.seq_id in touched or sequence.seq_id not in self._shown:
                changed.append(self._row_change(sequence, None, tables))
        for sequence, why in zip(self._order, whys(fold, self._order), strict=True):
            shown = self._shown.get(sequence.seq_id)
            if shown is None or sequence.seq_id in touched or shown["why"] != why:
                changed.append(self._row_change(sequence, why, tables))
        return [each for each in changed if len(each) > len(_ROW_KEYS)]

    def _row_change(self, sequence: FoldedSequence, why: Json | None, tables: set[str]) -> Json:
        seq_id = sequence.seq_id
        before, after = self._shown.get(seq_id), self._row(sequence, why)
        self._shown[seq_id] = after
        change = after
        if before is not None:
            change = {name: value for name, value in after.items() if name in _ROW_KEYS or before[name] != value}
        if before is None or seq_id in tables:
            change = {**change, "block_table": list(sequence.block_table)}
        return change


def _touched(records: Sequence[Record]) -> tuple[set[str], set[str], list[int], bool]:
    """(sequences whose rows, sequences whose block tables, blocks that changed; whether an order may have)."""
    rows: set[str] = set()
    tables: set[str] = set()
    blocks: dict[int, None] = {}  # in the order of their first change
    is_reordered = False
    for record in records:
        changes = record.changes
        for event in changes.blocks:
            blocks[event.block_id] = None
            if event.seq_id is not None:
                tables.add(event.seq_id)
        rows.update(c.seq_id for c in changes.computed)
        rows.update(p.seq_id for p in changes.preempted)
        rows.update(a.seq_id for a in changes.admitted)
        moved = changes.added or changes.preempted or changes.admitted or changes.forked or changes.finished
        # A change of the policy moves the queue.
        is_reordered = is_reordered or bool(moved) or not isinstance(record, StepRecord)
    rows |= tables
    return rows, tables, list(blocks), is_reordered
