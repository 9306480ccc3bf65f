"""The chat page's generations: texts that outlive the connection they were asked for on.

POST makes a generation; a task takes its deltas from the engine and appends them; any number of readers follow it
(see `app.playground.stream`). A closed tab stops nothing: what nobody has read for a while is aborted, what ended is
kept for a while, so that a page that comes back finds the whole text.

A generation has two names: `generation_id` is the secret of its owner and opens the text; `request_id` is what the
engine and everyone who looks at it call it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.async_engine import AsyncEngine
from engine.core.events import Preempted, Record
from engine.core.stats import FoldedSequence
from engine.engine import Request
from engine.errors import EngineDeadError
from engine.outputs import AbortReceipt, SequenceDelta
from engine.request_stream import RequestStream
from engine.sampling_params import SamplingParams

KEEP_FINISHED_S = 15 * 60.0
MAX_KEPT = 200
ABANDON_S = 5 * 60.0

Json = dict[str, object]


@dataclass(slots=True, eq=False)
class Generation:
    """One answer in the making. Offsets count code points of its text."""

    generation_id: str
    request_id: str
    client_id: str
    num_prompt_tokens: int
    created_at: float
    chunks: list[str] = field(default_factory=list)
    offset: int = 0  # length of the text so far
    num_output_tokens: int = 0
    preemptions: list[Json] = field(default_factory=list)  # receipts, oldest first
    finish_reason: str | None = None
    error: str | None = None
    stats: Json | None = None
    finished_at: float | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finished_at is not None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.chunks)

    def take(self, delta: SequenceDelta, now: float) -> None:
        """Append what a step added."""
        if delta.text:
            self.chunks.append(delta.text)
            self.offset += len(delta.text)
        self.num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.stats = None if delta.stats is None else delta.stats._asdict()
            self.end(delta.finish_reason, delta.error, now)

    def end(self, reason: str, error: str | None, now: float) -> None:
        """Nothing more will come."""
        self.finish_reason, self.error, self.finished_at = reason, error, now


def is_computing_known(sequence: FoldedSequence) -> bool:
    """Whether more than its last token has no KV yet: its prompt at first, or everything after a preemption."""
    known = sequence.num_prompt_tokens + sequence.num_output_tokens
    return sequence.num_output_tokens == 0 or sequence.num_computed_tokens + 1 < known


class Generations:
    """All generations of this process, on the event loop.

    Args:
        engine: where they run.
        now: monotonic seconds.
    """

    def __init__(self, engine: AsyncEngine, now: Callable[[], float]) -> None:
        self.on_change: Callable[[str], None] = lambda client_id: (
            None
        )  # called with the client whose text or state is new
        self.has_readers: Callable[[str], bool] = lambda client_id: False
        self._engine = engine
        self._now = now
        self._generations: dict[str, Generation] = {}  # by generation id, oldest first
        self._live: dict[str, Generation] = {}  # by request id
        self._pumps: set[asyncio.Task[None]] = set()
        self._read_at: dict[str, float] = {}  # client -> when it was last seen reading

    async def create(self, client_id: str, prompt_token_ids: tuple[int, ...], params: SamplingParams) -> Generation:
        """Submit a prompt; the text comes by itself from then on.

        Raises:
            RequestError: the engine refuses it.
            EngineDeadError: there is no engine any more.
        """
        request_id = f"chat-{secrets.token_hex(4)}"
        generation = Generation(secrets.token_hex(16), request_id, client_id, len(prompt_token_ids), self._now())
        # Before the engine knows it: its first records may be here before `submit` returns.
        self._live[request_id] = generation
        try:
            stream = await self._engine.submit(Request(request_id, prompt_token_ids, params, source="chat"))
        except BaseException:
            del self._live[request_id]
            raise
        self._generations[generation.generation_id] = generation
        self._read_at[client_id] = self._now()
        pump = asyncio.create_task(self._pump(generation, stream), name=f"generation {request_id}")
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)
        self._drop_old()
        self.on_change(client_id)
        return generation

    async def _pump(self, generation: Generation, stream: RequestStream) -> None:
        try:
            async for delta in stream:
                generation.take(delta, self._now())
                self.on_change(generation.client_id)
        except EngineDeadError as error:
            generation.end("error", str(error), self._now())
        finally:
            self._live.pop(generation.request_id, None)
            self.on_change(generation.client_id)

    def get(self, generation_id: str) -> Generation | None:
        """The generation, if it is still kept."""
        return self._generations.get(generation_id)

    def of_client(self, client_id: str) -> list[Generation]:
        """All of a client's that are kept, oldest first."""
        return [g for g in self._generations.values() if g.client_id == client_id]

    async def stop(self, generation: Generation) -> AbortReceipt:
        """End it wherever it is; idempotent."""
        return await self._engine.abort(generation.request_id)

    def on_records(self, records: Sequence[Record]) -> None:
        """Note preemptions, and tell readers of what changes without text: queueing, prefill, preemption."""
        if not self._live:
            return
        for record in records:
            for preempted in record.changes.preempted:
                generation = self._live.get(preempted.seq_id)
                if generation is not None:
                    generation.preemptions.append(self._receipt(preempted, record.step))
        for request_id, generation in self._live.items():
            sequence = self._engine.state.sequences.get(request_id)
            is_quiet = sequence is not None and (sequence.status != "RUNNING" or is_computing_known(sequence))
            if is_quiet and self.has_readers(generation.client_id):
                self.on_change(generation.client_id)

    def _receipt(self, preempted: Preempted, step: int) -> Json:
        by = None if preempted.by_seq_id is None else self._engine.state.sequences.get(preempted.by_seq_id)
        return {
            "step": step,
            "by": preempted.by_seq_id,
            "by_source": None if by is None else by.source,
            "blocks": preempted.num_blocks,
            "tokens": preempted.num_tokens,
        }

    # ---- what is kept, and for how long ----------------------------------------------------------------------------

    def reader_left(self, client_id: str) -> None:
        """The last reader of a client has gone: its generations are abandoned if none comes back."""
        self._read_at[client_id] = self._now()

    async def sweep(self) -> None:
        """Abort what nobody reads any more, and forget what ended long ago."""
        now = self._now()
        self._drop_old()
        for generation in list(self._live.values()):
            client_id = generation.client_id
            if not self.has_readers(client_id) and now - self._read_at.get(client_id, now) > ABANDON_S:
                await self._engine.abort(generation.request_id)
        clients = {g.client_id for g in self._generations.values()}
        for client_id in [c for c in self._read_at if c not in clients]:
            del self._read_at[client_id]

    def _drop_old(self) -> None:
        now = self._now()
        surplus = len(self._generations) - MAX_KEPT
        for generation in list(self._generations.values()):
            if generation.finished_at is None:
                continue
            if surplus > 0 or now - generation.finished_at > KEEP_FINISHED_S:
                del self._generations[generation.generation_id]
                surplus -= 1

    async def finish(self, timeout_s: float) -> None:
        """Wait until the ends that the engine has told are in the texts; for the shutdown, after the engine's."""
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=timeout_s)
        for pump in self._pumps:
            pump.cancel()
