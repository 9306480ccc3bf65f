"""What the frames of the engine's event stream say: the whole state, or what some records changed of it.

Nothing is folded here: the state is read from the live `Fold`, and the records since the last frame only tell which
rows and blocks they touched. All values are absolute. What most frames say of most rows, that they got a token, is one
number each. Field by field: README.md of `app`; the short spellings: `app.admin.changes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from app.admin.changes import block_runs, changed_fields, order_change, table_tail
from app.admin.history import step_minis
from app.encode import (
    Json,
    WallClock,
    block_map,
    counters,
    first_waiting,
    kv,
    row,
    whys,
)
from app.narration import Narrator
from engine.core.events import Record, StepRecord
from engine.core.stats import Fold, FoldedSequence
from engine.core.trace import TraceRing

PROTOCOL = 2
MAX_WAITING_ROWS = 200
MAX_RECENT_STEPS = 600
MAX_RECENT_EVENTS = 200
RATE_WINDOW_S = 3.0
_ROW_KEYS = ("id", "status")  # in each row, however little of it changed
_TOLD_BY_OUTPUTS = ("num_output_tokens", "num_computed_tokens")
_FIELDWISE = ("kv", "counters")  # of these a delta says the fields that changed


def _never_stuck() -> Json | None:
    return None


class StateFrames:
    """The content of frames; remembers what the last one left its readers with.

    Args:
        fold: the live state.
        trace: the latest records, for what a keyframe says of the past.
        epoch: of this process.
        block_size: tokens per block.
        engine_now: the engine's clock.
        wall: from that clock to Unix time.
        stuck: the step that takes too long, while there is one (see `app.health.stuck`).
    """

    def __init__(
        self,
        fold: Fold,
        trace: TraceRing,
        epoch: str,
        block_size: int,
        engine_now: Callable[[], float],
        wall: WallClock,
        stuck: Callable[[], Json | None] = _never_stuck,
    ) -> None:
        self._fold = fold
        self._trace = trace
        self._epoch = epoch
        self._block_size = block_size
        self._engine_now = engine_now
        self._wall = wall
        self._stuck = stuck
        self._start_limits = fold.limits
        self._scalars: Json = {}
        self._order: list[FoldedSequence] = []  # the waiting sequences shown
        self._shown_order: list[str] = []
        self._shown_running: list[str] = []
        self._shown: dict[str, Json] = {}  # rows without their block tables
        self._tables: dict[str, list[int]] = {}  # the block tables of these
        self._narrator = Narrator()
        self._steps: deque[list[float]] = deque(maxlen=MAX_RECENT_STEPS)
        self._events: deque[Json] = deque(maxlen=MAX_RECENT_EVENTS)
        self._work: deque[tuple[float, int]] = deque()  # (end of a step, tokens sampled) in the rates' window

    def begin(self) -> None:
        """From a state that nobody was shown: take the past from the trace."""
        fold = self._fold
        records = self._trace.records(0, fold.seq)
        self._steps.clear()
        self._steps.extend(step_minis(records, fold)[-MAX_RECENT_STEPS:])
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
        self._tables = {s.seq_id: list(s.block_table) for s in self._visible()}
        self._scalars = self._all_scalars()

    def hello(self) -> Json:
        """The first words on each connection."""
        return {"epoch": self._epoch, "seq": self._fold.seq, "server_time": self._now(), "protocol": PROTOCOL}

    def tick(self, num_viewers: int) -> Json:
        """What there is to say when nothing happened."""
        data: Json = {"server_time": self._now(), "seq": self._fold.seq}
        return {**data, "rates": self.rates(), "num_viewers": num_viewers, **self._if_stuck()}

    def key(self, num_viewers: int) -> Json:
        """The whole state; nothing may be pending."""
        fold, order = self._fold, self._order
        return {
            "seq": fold.seq,
            "step": fold.step,
            "server_time": self._now(),
            **self._all_scalars(),
            **self._if_stuck(),
            "rates": self.rates(),
            "num_viewers": num_viewers,
            "running": [row(s, fold, self._wall, None) for s in fold.running.values()],
            "waiting": [row(s, fold, self._wall, why) for s, why in zip(order, whys(fold, order), strict=True)],
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
            **self._changed_scalars(),
            **self._if_stuck(),
        }
        touched = _Touched.by(records)
        for block_id in touched.blocks:  # a block that is shared, or no longer, changes the rows of all its owners
            touched.rows.update(fold.owners.get(block_id, ()))
        if touched.is_reordered:
            data |= self._orders()
        rows = self._rows(touched)
        if rows:
            data["rows"] = rows
        outputs, tails = self._progress(touched)
        if any(outputs):
            data["outputs"] = outputs
        if tails:
            data["tails"] = tails
        if touched.blocks:
            data["blocks"] = block_runs(fold, touched.blocks)
        minis = step_minis(records, fold)
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

    def _if_stuck(self) -> Json:
        stuck = self._stuck()
        return {} if stuck is None else {"stuck": stuck}

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
            "waiting_total": fold.num_waiting,
        }

    def _changed_scalars(self) -> Json:
        before, self._scalars = self._scalars, self._all_scalars()
        changed = changed_fields(before, self._scalars)
        return changed | {name: changed_fields(before[name], changed[name]) for name in _FIELDWISE if name in changed}

    def _orders(self) -> Json:
        before = self._shown_order, self._shown_running
        self._look()
        data = order_change("waiting", before[0], self._shown_order)
        data |= order_change("running", before[1], self._shown_running)
        visible = {s.seq_id for s in self._visible()}
        removed = [seq_id for seq_id in self._shown if seq_id not in visible]
        for seq_id in removed:
            del self._shown[seq_id]
            del self._tables[seq_id]
        if removed:
            data["removed"] = removed
        return data

    def _rows(self, touched: _Touched) -> list[Json]:
        """Of each row what changed, `id` and `status`, but for its progress; a row that is new is whole."""
        fold = self._fold
        changed = []
        for sequence in fold.running.values():
            is_prefilling = sequence.seq_id in touched.advanced and not _is_decoding(sequence)
            if is_prefilling or sequence.seq_id in touched.rows or sequence.seq_id not in self._shown:
                changed.append(self._row_change(sequence, None, touched))
        for sequence, why in zip(self._order, whys(fold, self._order), strict=True):
            shown = self._shown.get(sequence.seq_id)
            if shown is None or sequence.seq_id in touched.rows or shown["why"] != why:
                changed.append(self._row_change(sequence, why, touched))
        return [each for each in changed if each]

    def _row_change(self, sequence: FoldedSequence, why: Json | None, touched: _Touched) -> Json:
        seq_id = sequence.seq_id
        before, after = self._shown.get(seq_id), self._row(sequence, why)
        self._shown[seq_id] = after
        if before is None:
            self._tables[seq_id] = list(sequence.block_table)
            return {**after, "block_table": self._tables[seq_id]}
        change = {name: value for name, value in after.items() if name in _ROW_KEYS or before[name] != value}
        if sequence.status == "RUNNING":
            told = _TOLD_BY_OUTPUTS if _is_decoding(sequence) else ()
            for name in (*told, "num_blocks"):  # that by `tails`
                change.pop(name, None)
        elif self._tables[seq_id] != sequence.block_table:
            change["block_table"] = self._tables[seq_id] = list(sequence.block_table)
        is_news = len(change) > len(_ROW_KEYS) or change["status"] != before["status"]
        return change if is_news else {}

    def _progress(self, touched: _Touched) -> tuple[list[int], list[list[int]]]:
        """Of the running sequences in order: output tokens, 0 where there is nothing to say; ends of block tables."""
        outputs: list[int] = []
        tails: list[list[int]] = []
        for index, sequence in enumerate(self._fold.running.values()):
            seq_id = sequence.seq_id
            output = 0
            if (seq_id in touched.advanced or seq_id in touched.rows) and _is_decoding(sequence):
                shown = self._shown[seq_id]
                output = shown["num_output_tokens"] = sequence.num_output_tokens
                shown["num_computed_tokens"] = sequence.num_computed_tokens
            outputs.append(output)
            if seq_id in touched.tables:
                tail = table_tail(self._tables[seq_id], sequence.block_table)
                if tail:
                    self._tables[seq_id] = list(sequence.block_table)
                    tails.append([index, *tail])
        return outputs, tails


def _is_decoding(sequence: FoldedSequence) -> bool:
    """Whether all its tokens but the last are computed, so that one number tells how far it is."""
    known = sequence.num_prompt_tokens + sequence.num_output_tokens
    return sequence.num_output_tokens > 0 and sequence.num_computed_tokens == known - 1


class _Touched(NamedTuple):
    """What some records changed."""

    rows: set[str]  # sequences of which anything may have
    advanced: set[str]  # sequences that were computed
    tables: set[str]  # sequences whose block tables did
    blocks: list[int]  # in the order of their first change
    is_reordered: bool  # whether an order may have

    @classmethod
    def by(cls, records: Sequence[Record]) -> _Touched:
        """By `records`."""
        rows: set[str] = set()
        advanced: set[str] = set()
        tables: set[str] = set()
        blocks: dict[int, None] = {}
        is_reordered = False
        for record in records:
            changes = record.changes
            for event in changes.blocks:
                blocks[event.block_id] = None
                if event.seq_id is not None:
                    tables.add(event.seq_id)
            advanced.update(c.seq_id for c in changes.computed)
            rows.update(p.seq_id for p in changes.preempted)
            rows.update(a.seq_id for a in changes.admitted)
            moved = changes.added or changes.preempted or changes.admitted or changes.forked or changes.finished
            # A change of the policy moves the queue.
            is_reordered = is_reordered or bool(moved) or not isinstance(record, StepRecord)
        return cls(rows | tables, advanced, tables, list(blocks), is_reordered)
