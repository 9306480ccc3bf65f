"""The life of one request as the trace tells it: when its sequences waited, were computed, wrote and were preempted.

The trace is a ring: of a request that is older than its first record the beginning is missing, which `is_whole` says;
of one that still lives the fold knows the times. No prompt or answer text is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from app.encode import Json, WallClock, row, whys
from app.narration import Narrator
from engine.core.events import CommandRecord, Record
from engine.core.stats import Fold, FoldedSequence

EVERYONES = ("paused", "resumed", "limits", "dead")  # events that concern each request that lives then
MAX_STEPS = 1000  # of a sequence, the latest


@dataclass(slots=True)
class Span:
    """A stretch of a sequence's life."""

    kind: str  # waiting, reading (its prompt or what must be computed again), writing, preempted
    from_unix: float
    to_unix: float | None  # None: it goes on
    from_step: int


@dataclass(slots=True)
class SequenceHistory:
    """One of the request's sequences."""

    id: str
    source: str | None = None  # None: it came before the first record that is kept
    num_prompt_tokens: int | None = None
    max_tokens: int | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None
    spans: list[Span] = field(default_factory=list)
    steps: list[tuple[int, int, int]] = field(default_factory=list)  # (step, tokens computed, tokens sampled)

    def enter(self, kind: str, at: float, step: int) -> None:
        """Its life goes on as `kind`; "" ends it."""
        last = self.spans[-1] if self.spans else None
        if last is not None and last.to_unix is None:
            if last.kind == kind:
                return
            last.to_unix = at
        if kind:
            self.spans.append(Span(kind, at, None, step))


class _Reader:
    """Follows the sequences of one request through records."""

    def __init__(self, request_id: str, wall: WallClock) -> None:
        self.sequences: dict[str, SequenceHistory] = {}
        self._request_id = request_id
        self._wall = wall
        self._prefix = f"{request_id}."

    def is_ours(self, seq_id: str | None) -> bool:
        """Whether it is one of the request's sequences."""
        return seq_id is not None and (seq_id == self._request_id or seq_id.startswith(self._prefix))

    def sequence(self, seq_id: str) -> SequenceHistory:
        """That sequence, new if it is not known yet."""
        return self.sequences.setdefault(seq_id, SequenceHistory(seq_id))

    def read(self, record: Record) -> None:
        """Take the next record, in the order in which a record is folded."""
        changes, step = record.changes, record.step
        begin, end = (self._wall.unix(at) for at in _times(record))
        for added in changes.added:
            if self.is_ours(added.seq_id):
                ours = self.sequence(added.seq_id)
                ours.source, ours.num_prompt_tokens = added.source, added.num_prompt_tokens
                ours.max_tokens = added.max_tokens
                ours.enter("waiting", begin, step)
        for preempted in changes.preempted:
            if self.is_ours(preempted.seq_id):
                ours = self.sequence(preempted.seq_id)
                ours.num_preemptions += 1
                ours.enter("preempted", begin, step)
        for admitted in changes.admitted:
            if self.is_ours(admitted.seq_id):
                ours = self.sequence(admitted.seq_id)
                if not admitted.is_resumed:
                    ours.num_cached_tokens = admitted.num_cached_tokens
                ours.enter("reading", begin, step)
        for computed in changes.computed:
            if self.is_ours(computed.seq_id):
                ours = self.sequence(computed.seq_id)
                ours.num_output_tokens += computed.num_sampled
                ours.steps.append((step, computed.num_tokens, computed.num_sampled))
                if computed.num_sampled:
                    ours.enter("writing", end, step)
                else:
                    ours.enter("reading", begin, step)
        for forked in changes.forked:
            if self.is_ours(forked.seq_id):
                parent, ours = self.sequence(forked.parent_id), self.sequence(forked.seq_id)
                ours.source, ours.num_prompt_tokens = parent.source, parent.num_prompt_tokens
                ours.max_tokens, ours.num_output_tokens = parent.max_tokens, 1
                ours.enter("writing", end, step)
        for finished in changes.finished:
            if self.is_ours(finished.seq_id):
                ours = self.sequence(finished.seq_id)
                ours.finish_reason = finished.reason
                ours.enter("", end, step)


def request_history(
    request_id: str, records: Sequence[Record], fold: Fold, wall: WallClock, now_unix: float
) -> Json | None:
    """All that is known of a request; None if it neither lives nor is in `records`, the latest that `fold` applied."""
    reader = _Reader(request_id, wall)
    narrator = Narrator(fold.limits if not any(_changes_limits(r) for r in records) else None)
    events: list[Json] = []
    live = {s.seq_id: s for s in fold.sequences.values() if s.request_id == request_id}
    is_alive = bool(live) and not any(reader.is_ours(a.seq_id) for r in records for a in r.changes.added)
    for record in records:
        told = narrator.tell(record)
        reader.read(record)
        at = wall.unix(_times(record)[1])
        was_alive, is_alive = is_alive, _is_alive(reader.sequences.values(), is_alive)
        for event in told:
            if reader.is_ours(event.id) or reader.is_ours(event.by) or (event.kind in EVERYONES and was_alive):
                line = event.as_json()
                events.append({"at_unix": at, **{name: line[name] for name in ("step", "kind", "id", "text")}})
    if not reader.sequences and not live:
        return None
    queue = fold.waiting()
    reasons = {s.seq_id: why for s, why in zip(queue, whys(fold, queue), strict=True)}
    for seq_id, sequence in live.items():
        _add_what_lives(reader.sequence(seq_id), sequence, wall)
    is_whole = any(reader.is_ours(added.seq_id) for record in records for added in record.changes.added)
    return {
        "request_id": request_id,
        "is_live": bool(live),
        "is_whole": is_whole,
        "server_time": round(now_unix, 3),
        "step": fold.step,
        "first_step": records[0].step if records else None,
        "limits": fold.limits.as_dict(),
        "sequences": [
            {**asdict(s), "steps": s.steps[-MAX_STEPS:],
             "row": row(live[s.id], fold, wall, reasons.get(s.id)) if s.id in live else None}
            for s in reader.sequences.values()
        ],
        "events": events,
    }  # fmt: skip


def _times(record: Record) -> tuple[float, float]:
    """When it began and ended."""
    if isinstance(record, CommandRecord):
        return record.at, record.at
    return record.started_at, record.ended_at


def _changes_limits(record: Record) -> bool:
    return isinstance(record, CommandRecord) and record.limits is not None


def _is_alive(sequences: Iterable[SequenceHistory], before: bool) -> bool:
    known = list(sequences)
    return any(s.finish_reason is None for s in known) if known else before


def _add_what_lives(history: SequenceHistory, sequence: FoldedSequence, wall: WallClock) -> None:
    """What the fold knows of a live sequence, whatever the trace has lost."""
    is_lost = history.source is None
    history.source, history.num_prompt_tokens = sequence.source, sequence.num_prompt_tokens
    history.max_tokens, history.num_output_tokens = sequence.max_tokens, sequence.num_output_tokens
    history.num_cached_tokens, history.num_preemptions = sequence.num_cached_tokens, sequence.num_preemptions
    if not is_lost:
        return
    known_from = history.spans[0].from_unix if history.spans else None
    marks = [("waiting", sequence.arrival_time), ("reading", sequence.first_scheduled_time),
             ("writing", sequence.first_token_time)]  # fmt: skip
    lost: list[Span] = []
    for kind, at in marks:
        if at is None or (known_from is not None and wall.unix(at) >= known_from):
            continue
        if lost:
            lost[-1].to_unix = wall.unix(at)
        lost.append(Span(kind, wall.unix(at), known_from, 0))
    history.spans[:0] = lost
