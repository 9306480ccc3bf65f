"""One stream per browser, with all of its generations on it.

    hello     {protocol}
    snapshot  {generation_id, text, offset, status, ...}    each generation, when the stream first meets it
    delta     {generation_id, offset, text, num_output_tokens}
    status    {generation_id, status, detail, why, ...}      queued, prefilling, running or preempted
    done      {generation_id, finish_reason, error, stats, offset, preemptions}    unless it had ended before hello
    tick      {server_time, dead, stuck}                     at the begin, and after a silence
    bye       {reason}

A reader holds positions in the texts, no queue: whatever came while it was busy is one delta. `offset` says where a
delta's text begins, and in `snapshot` and `done` where the text ends; both count code points.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from app.encode import Json, whys
from app.narration import blocked_text, count
from app.playground.generations import Generation, Generations, is_computing_known
from app.sse import Waker, frame, parts
from engine.core.stats import Fold, FoldedSequence

PROTOCOL = 1
STATUS_INTERVAL_S = 0.5  # between two statuses that differ in their numbers only


@dataclass(slots=True)
class _Place:
    """How much of a generation a reader has."""

    num_chunks: int
    num_preemptions: int
    kind: tuple[object, ...]  # of the last status: the status, and what it waits for
    status: Json
    told_at: float


class Reader:
    """One open stream of a client."""

    def __init__(self, client_id: str) -> None:
        self.client_id = client_id
        self.waker = Waker()
        self.places: dict[str, _Place | None] = {}  # by generation id; None: it has all, the end included
        self.has_met_all = False  # those that were there when it came


class ChatStreams:
    """Serves the generations of each client to its readers.

    Args:
        generations: where the texts are.
        fold: the live state, for what the texts don't tell.
        now: monotonic seconds.
        stuck: the step that takes too long, while there is one (see `app.health.stuck`).
        frame_interval_s: least time between two writes on one stream.
        tick_s: longest silence.
    """

    def __init__(
        self,
        generations: Generations,
        fold: Fold,
        now: Callable[[], float],
        stuck: Callable[[], Json | None] = lambda: None,
        *,
        frame_interval_s: float = 1 / 30,
        tick_s: float = 5.0,
    ) -> None:
        self._generations = generations
        self._fold = fold
        self._now = now
        self._stuck = stuck
        self._frame_interval_s = frame_interval_s
        self._tick_s = tick_s
        self._readers: dict[str, set[Reader]] = {}
        self._closing: str | None = None
        generations.on_change = self._wake
        generations.has_readers = self._readers.__contains__

    @property
    def num_readers(self) -> int:
        """Open streams."""
        return sum(len(readers) for readers in self._readers.values())

    def snapshot(self, generation: Generation) -> Json:
        """A generation as a whole, as it stands now."""
        return snapshot(generation, self._status(generation, _Waiting(self._fold))[1])

    def close(self, reason: str) -> None:
        """Have each stream send what is left, say goodbye and end."""
        self._closing = reason
        for readers in self._readers.values():
            for reader in readers:
                reader.waker.close(reason)

    def _wake(self, client_id: str) -> None:
        for reader in self._readers.get(client_id, ()):
            reader.waker.wake()

    async def stream(self, reader: Reader) -> AsyncIterator[bytes]:
        """The frames of one reader until it leaves or `close` ends it."""
        client_id = reader.client_id
        self._readers.setdefault(client_id, set()).add(reader)
        if self._closing is not None:
            reader.waker.close(self._closing)
        try:
            yield frame("hello", {"protocol": PROTOCOL})
            yield self._tick()
            while True:
                news = self.news(reader)
                for part in parts(news):
                    yield part
                if news:
                    await self._pause(reader)
                elif reader.waker.closing is not None:
                    yield frame("bye", {"reason": reader.waker.closing})
                    return
                elif not await reader.waker.wait(self._tick_s):
                    yield self._tick()
        finally:
            readers = self._readers[client_id]
            readers.discard(reader)
            if not readers:
                del self._readers[client_id]
                self._generations.reader_left(client_id)

    def _tick(self) -> bytes:
        """How the engine is, for those who may not see more of it."""
        now = round(time.time(), 3)
        return frame("tick", {"server_time": now, "dead": self._fold.dead_reason, "stuck": self._stuck()})

    async def _pause(self, reader: Reader) -> None:
        """Between two writes; cut short by the first text of an answer."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._frame_interval_s
        while (left := end - loop.time()) > 0 and await reader.waker.wait(left):
            if reader.waker.closing is not None or self._has_first_text(reader):
                return

    def _has_first_text(self, reader: Reader) -> bool:
        for generation in self._generations.of_client(reader.client_id):
            place = reader.places.get(generation.generation_id)
            if place is not None and place.num_chunks == 0 and generation.chunks:
                return True
        return False

    # ---- what is new ------------------------------------------------------------------------------------------------

    def news(self, reader: Reader) -> bytes:
        """Everything the reader does not have yet, as frames."""
        generations = self._generations.of_client(reader.client_id)
        waiting = _Waiting(self._fold)
        out: list[bytes] = []
        for generation in generations:
            key = generation.generation_id
            if key not in reader.places:
                reader.places[key] = self._meet(generation, waiting, out)
                if generation.is_finished and reader.has_met_all:  # it was quicker than this stream
                    out.append(frame("done", done(generation)))
            elif (place := reader.places[key]) is not None:
                reader.places[key] = self._follow(generation, place, waiting, out)
        reader.has_met_all = True
        if len(reader.places) > len(generations):
            kept = {g.generation_id for g in generations}
            reader.places = {key: place for key, place in reader.places.items() if key in kept}
        return b"".join(out)

    def _meet(self, generation: Generation, waiting: _Waiting, out: list[bytes]) -> _Place | None:
        kind, status = self._status(generation, waiting)
        out.append(frame("snapshot", snapshot(generation, status)))
        if generation.is_finished:
            return None
        return _Place(len(generation.chunks), len(generation.preemptions), kind, status, self._now())

    def _follow(self, generation: Generation, place: _Place, waiting: _Waiting, out: list[bytes]) -> _Place | None:
        key = generation.generation_id
        # The end may be told in the fold before the pump has it: then there is no status to tell any more.
        kind, status = self._status(generation, waiting)
        if not generation.is_finished and status and self._is_news(generation, place, kind, status):
            out.append(frame("status", {"generation_id": key, **status}))
            place.kind, place.status, place.told_at = kind, status, self._now()
            place.num_preemptions = len(generation.preemptions)
        if len(generation.chunks) > place.num_chunks:
            text = "".join(generation.chunks[place.num_chunks :])
            place.num_chunks = len(generation.chunks)
            data = {"generation_id": key, "offset": generation.offset - len(text), "text": text}
            out.append(frame("delta", {**data, "num_output_tokens": generation.num_output_tokens}))
        if generation.is_finished:
            out.append(frame("done", done(generation)))
            return None
        return place

    def _is_news(self, generation: Generation, place: _Place, kind: tuple[object, ...], status: Json) -> bool:
        if kind != place.kind or len(generation.preemptions) > place.num_preemptions:
            return True
        return status != place.status and self._now() - place.told_at >= STATUS_INTERVAL_S

    def _status(self, generation: Generation, waiting: _Waiting) -> tuple[tuple[object, ...], Json]:
        """(what makes it another status, the status)."""
        sequence = self._fold.sequences.get(generation.request_id)
        if generation.is_finished or sequence is None:
            return ("done",), {}
        if sequence.status == "RUNNING":
            if not is_computing_known(sequence):
                return ("running",), {"status": "running", "detail": None, "why": None}
            known = sequence.num_prompt_tokens + sequence.num_output_tokens
            again = " again" if sequence.num_preemptions else ""
            todo = f"{sequence.num_computed_tokens:,} of {count(known, 'token')} computed{again}"
            return ("prefilling",), {"status": "prefilling", "detail": todo, "why": None}
        why, detail = waiting.of(sequence)
        receipt = generation.preemptions[-1] if generation.preemptions else None
        name = "queued" if sequence.status == "WAITING" else "preempted"
        if name == "preempted" and receipt is not None:
            detail = f"{receipt_text(receipt)}; {detail}"
        kind = (name, why and why["constraint"], why and why["behind"], self._fold.is_paused)
        return kind, {"status": name, "detail": detail, "why": why, "receipt": receipt if name == "preempted" else None}


class _Waiting:
    """The queue as it is now; sorted only if somebody asks."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self._places: dict[str, tuple[int, Json | None]] | None = None

    def of(self, sequence: FoldedSequence) -> tuple[Json | None, str]:
        """(why `sequence` waits, the same in words)."""
        if self._places is None:
            order = self._fold.waiting()
            reasons = whys(self._fold, order)
            self._places = {s.seq_id: (i, why) for i, (s, why) in enumerate(zip(order, reasons, strict=True))}
        position, why = self._places[sequence.seq_id]
        blocked = self._fold.blocked
        if self._fold.is_paused:
            return why, "waits: the engine is paused"
        if blocked is not None and blocked.seq_id == sequence.seq_id:
            return why, blocked_text(blocked).removeprefix(f"{sequence.seq_id} ")
        if position == 0:
            return why, "waits: the next step looks at it"
        return why, f"waits: {position:,} in front of it"


def receipt_text(receipt: Json) -> str:
    """`preempted at step 18,203 for r-88: 6 blocks freed, 96 tokens to compute again`."""
    blocks, tokens, step, by = receipt["blocks"], receipt["tokens"], receipt["step"], receipt["by"]
    assert isinstance(blocks, int)
    assert isinstance(tokens, int)
    for_whom = f"for {by}" if by is not None else "because the pool was made smaller"
    return (
        f"preempted at step {step:,} {for_whom}: {count(blocks, 'block')} freed, "
        f"{count(tokens, 'token')} to compute again"
    )


def snapshot(generation: Generation, status: Json) -> Json:
    """A generation as a whole; `status` is what a live one is doing."""
    state: Json = {"status": "done", "detail": None, "why": None} if generation.is_finished else status
    return {
        "generation_id": generation.generation_id,
        "request_id": generation.request_id,
        "text": generation.text,
        "offset": generation.offset,
        "num_prompt_tokens": generation.num_prompt_tokens,
        "num_output_tokens": generation.num_output_tokens,
        "finish_reason": generation.finish_reason,
        "error": generation.error,
        "stats": generation.stats,
        "preemptions": list(generation.preemptions),
        "status": "running",
        "detail": None,
        **state,
    }


def done(generation: Generation) -> Json:
    """How a generation ended."""
    return {
        "generation_id": generation.generation_id,
        "finish_reason": generation.finish_reason,
        "error": generation.error,
        "stats": generation.stats,
        "offset": generation.offset,
        "num_output_tokens": generation.num_output_tokens,
        "preemptions": list(generation.preemptions),
    }
