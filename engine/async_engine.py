"""The engine on a thread of its own: one writer, one inbox, one hop out per step.

The event loop puts commands into the inbox (requests up to a bound). The engine thread applies them between two steps,
runs steps while there is work, and hands everything that happened back in one `call_soon_threadsafe`. On the loop the
records are folded into `state`, kept in `trace`, shown to the listeners, and the deltas routed to the requests'
streams. So the loop reads `state` and `trace` without locks, and the engine thread never waits for a reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from engine.core.events import Changes, CommandRecord, Finished, Record
from engine.core.limits import Limits
from engine.core.sequence import child_seq_id
from engine.core.stats import Fold, FoldedSequence
from engine.core.trace import TraceRing
from engine.engine import Engine, Request, StepResult
from engine.errors import EngineDeadError, EngineDrainingError, EngineError, QueueFullError, RequestError
from engine.outputs import AbortReceipt, SequenceDelta, SequenceStats
from engine.request_stream import RequestStream
from engine.single_steps import SingleSteps

logger = logging.getLogger("pagedeck.engine")

T = TypeVar("T")
Listener = Callable[[Sequence[Record]], None]

MAX_SUBMITS_IN_INBOX = 8192  # of requests; aborts and admin commands always get in
MAX_COMMANDS_PER_DRAIN = 1024
MAX_DRAIN_S = 0.02  # while there is a step to run


@dataclass(slots=True)
class _Command:
    """One call to run on the engine thread: `call` returns (value for the caller, what to publish)."""

    call: Callable[[], tuple[Any, list[StepResult]]]
    future: asyncio.Future[Any]


@dataclass(slots=True)
class _Publication:
    """What one hop carries to the loop, in order: results, then answers to the commands they came from."""

    results: list[StepResult] = field(default_factory=list)
    answers: list[tuple[asyncio.Future[Any], Any, Exception | None]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.results or self.answers)


class AsyncEngine:
    """All methods are called on the event loop that called `start`.

    Args:
        engine: the engine to own; nobody else may touch it from now on.
        stuck_after_s: a step that takes longer than this makes `is_stuck` true.
        max_records: size of the trace ring.
    """

    def __init__(self, engine: Engine, *, stuck_after_s: float = 30.0, max_records: int = 1024) -> None:
        self.info = engine.info
        self.tokenizer = engine.tokenizer
        self.grammars = engine.grammars  # `find` and `compile` only; the rest is the engine thread's
        self.start_limits = engine.start_limits
        self.epoch = secrets.token_hex(4)
        self.state = Fold(engine.info.num_blocks, engine.start_limits)
        self.trace = TraceRing(max_records)
        self.is_ready = False
        self._engine = engine
        self.stuck_after_s = stuck_after_s
        self._inbox: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[str, RequestStream] = {}
        self._listeners: list[Listener] = []
        self._stats: dict[str, SequenceStats] = {}
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unanswered: set[asyncio.Future[Any]] = set()  # of commands
        self._is_stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._dead_reason: str | None = None
        self._is_buried = False  # everyone was told that it is dead
        self._drain_started_at = 0.0  # engine thread only
        self._step_started_at: float | None = None  # written by the engine thread, read by anyone
        self._single_steps = SingleSteps()  # engine thread only
        self.state.on_finished.append(self._keep_stats)

    # ---- life --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the engine thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self.is_ready = True

    async def stop(self, timeout_s: float = 1.0) -> None:
        """Refuse new work, give what runs `timeout_s` seconds, abort the rest, and end the thread."""
        if self._thread is None:
            return
        if not self.is_dead:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + timeout_s
            # If a step takes longer than there is time, those whose commands wait behind it are told.
            late = EngineDrainingError("the engine is shutting down, and a step is still running")
            refusal = loop.call_at(deadline, self._fail_unanswered, late)
            with contextlib.suppress(EngineError, TimeoutError):
                await self.drain()
                if not self.state.is_paused:
                    async with asyncio.timeout_at(deadline):
                        await self._idle.wait()
            refusal.cancel()
            with contextlib.suppress(EngineError):
                await asyncio.gather(*map(self.abort, list(self._streams)))  # all before the same step
        self._is_stopping = True
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    @property
    def is_dead(self) -> bool:
        """Whether the step loop has failed."""
        return self._dead_reason is not None

    @property
    def dead_reason(self) -> str | None:
        """Why, if it has."""
        return self._dead_reason

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused because the engine is about to stop."""
        return self.state.is_draining

    @property
    def is_stuck(self) -> bool:
        """Whether the present step has been running for longer than the limit."""
        return self.stuck_for_s is not None

    @property
    def stuck_for_s(self) -> float | None:
        """How long the present step has been running, once that is longer than `stuck_after_s`."""
        started_at = self._step_started_at
        running_s = 0.0 if started_at is None else self.now() - started_at
        return running_s if running_s > self.stuck_after_s else None

    def now(self) -> float:
        """The engine's monotonic clock, in seconds: the one in records and rows."""
        return self._engine.clock()

    def add_listener(self, listener: Listener) -> None:
        """Have `listener` called on the loop with each batch of records, after `state` took them."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        """Undo `add_listener`."""
        self._listeners.remove(listener)

    # ---- commands ----------------------------------------------------------------------------------------------

    async def submit(self, request: Request) -> RequestStream:
        """Queue a request; returns once the engine has accepted it.

        Raises:
            RequestError: it was refused, see `engine.errors`.
            EngineDeadError: there is no engine any more.
        """
        stream = RequestStream(request.request_id, request.sampling_params.n)

        def add() -> tuple[None, list[StepResult]]:
            try:
                return None, [self._engine.add(request)]
            except RequestError as error:
                raise _RefusedError(error, self._engine.reject(request.request_id, error)) from error

        if self._inbox.qsize() >= MAX_SUBMITS_IN_INBOX:
            raise QueueFullError(self._inbox.qsize(), MAX_SUBMITS_IN_INBOX)
        if request.request_id in self._streams:
            raise RequestError(f"request_id {request.request_id!r} is in use")
        self._streams[request.request_id] = stream
        self._idle.clear()
        try:
            await self._send(add)
        except asyncio.CancelledError:
            # The client left while its request was in the inbox; it may yet be refused. The abort is behind it there.
            self.abort_soon(request.request_id).add_done_callback(lambda _: self._forget(request.request_id))
            raise
        except EngineError:
            self._forget(request.request_id)
            raise
        return stream

    async def abort(self, request_id: str) -> AbortReceipt:
        """End a request in whatever state it is, freeing its blocks before the next step; idempotent."""
        return await self._send(lambda: self._abort(request_id))

    def abort_soon(self, request_id: str) -> asyncio.Future[Any]:
        """The same for callers that are being cancelled and can't wait."""
        future = self._new_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody is there to be told
        try:
            self._put(lambda: self._abort(request_id), future)
        except EngineError as error:
            future.set_exception(error)
        return future

    def _abort(self, request_id: str) -> tuple[AbortReceipt, list[StepResult]]:
        receipt, result = self._engine.abort(request_id)
        return receipt, [] if result is None else [result]

    async def pause(self, reason: str) -> None:
        """Stop stepping after the present step; everyone waits until `resume`."""

        def pause() -> tuple[None, list[StepResult]]:
            self._single_steps.stop()  # those, too, that someone still waits for
            return None, [self._engine.pause(reason)]

        await self._send(pause)

    async def resume(self) -> None:
        """Step freely again."""
        await self._send(lambda: (None, [self._engine.resume()]))

    async def step(self, n: int = 1) -> int:
        """Run `n` single steps of a paused engine, fewer if it runs out of work or is paused again; returns how many.

        Those of several callers are run one after the other; they end when their caller is cancelled.

        Raises:
            NotPausedError: the engine runs freely.
        """
        future = self._new_future()

        def want() -> tuple[None, list[StepResult]]:
            self._engine.check_can_step()
            self._single_steps.want(n, future)
            raise _AnswerLater

        self._put(want, future)
        return int(await future)

    async def drain(self) -> None:
        """Refuse new requests; what is accepted goes on."""
        await self._send(lambda: (None, [self._engine.drain()]))

    async def set_limits(
        self, changes: Mapping[str, object], expected_version: int | None = None
    ) -> tuple[Limits, int]:
        """Apply `changes` atomically before the next step; returns the limits in force and their version.

        Raises:
            StaleLimitsError: they are at another version.
            LimitsError: a name, type or range is wrong.
        """
        await self._send(lambda: (None, [self._engine.set_limits(changes, expected_version)]))
        return self.state.limits, self.state.limits_version

    async def reset_prefix_cache(self) -> int:
        """Drop all cached content; returns how many blocks lost theirs."""

        def reset() -> tuple[int, list[StepResult]]:
            num_blocks, result = self._engine.reset_prefix_cache()
            return num_blocks, [result]

        return await self._send(reset)

    async def _send(self, call: Callable[[], tuple[T, list[StepResult]]]) -> T:
        future = self._new_future()
        self._put(call, future)
        result: T = await future
        return result

    def _new_future(self) -> asyncio.Future[Any]:
        assert self._loop is not None, "the engine is not started"
        future = self._loop.create_future()
        self._unanswered.add(future)
        future.add_done_callback(self._unanswered.discard)
        return future

    def _fail_unanswered(self, error: EngineError) -> None:
        """Tell everyone whose command was not answered, wherever it is: in the inbox, applied, or stepping."""
        for future in list(self._unanswered):
            if not future.done():
                future.set_exception(error)

    def _put(self, call: Callable[[], tuple[Any, list[StepResult]]], future: asyncio.Future[Any]) -> None:
        if self.is_dead:
            raise EngineDeadError(f"the engine is dead: {self._dead_reason}")
        if self._thread is None or self._is_stopping:
            raise EngineDrainingError("the engine has stopped")
        self._inbox.put(_Command(call, future))

    # ---- the engine thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        publication = _Publication()
        publish_s = 0.0
        try:
            while True:
                if not self._drain_inbox(publication):
                    self._publish(publication)
                    return
                if (expired := self._engine.expire()) is not None:
                    publication.results.append(expired)
                # Whoever gave a command doesn't have to wait for a step to end before the answer is known.
                self._publish(publication)
                publication = _Publication()
                if self._may_step():
                    self._step_started_at = self._engine.clock()
                    drain_s = self._step_started_at - self._drain_started_at
                    publication.results.append(self._engine.step(drain_s, publish_s))
                    self._step_started_at = None
                stepped_at = self._engine.clock()
                self._answer_steps(publication)
                self._publish(publication)
                publish_s = self._engine.clock() - stepped_at
                publication = _Publication()
        except Exception as error:
            logger.exception("the engine's step loop failed")
            self._step_started_at = None
            self._publish(publication)  # what happened before the failure did happen
            self._die(f"{type(error).__name__}: {error}")

    def _may_step(self) -> bool:
        return self._engine.has_work and (not self._engine.is_paused or self._single_steps.take())

    def _answer_steps(self, publication: _Publication) -> None:
        """Answer those who wait for single steps, once theirs are run or there is nothing to run."""
        may_go_on = self._engine.has_work and self._engine.is_paused
        answers = self._single_steps.take_answers(may_go_on=may_go_on) if self._single_steps else []
        publication.answers += [(future, num_run, None) for future, num_run in answers]

    def _drain_inbox(self, publication: _Publication) -> bool:
        """Apply waiting commands; sleep for one if there is nothing else to do. False: stop."""
        self._drain_started_at = self._engine.clock()
        can_step = self._engine.has_work and (not self._engine.is_paused or bool(self._single_steps))
        for i in range(MAX_COMMANDS_PER_DRAIN):
            try:
                if i == 0 and not can_step:
                    command = self._inbox.get(timeout=self._time_to_deadline())
                    self._drain_started_at = self._engine.clock()  # what it slept was no work
                else:
                    command = self._inbox.get_nowait()
            except queue.Empty:
                break
            if command is None:
                return False
            self._apply(command, publication)
            if can_step and self._engine.clock() - self._drain_started_at > MAX_DRAIN_S:
                break  # those who were accepted are owed a step
        return True

    def _time_to_deadline(self) -> float | None:
        deadline = self._engine.scheduler.next_deadline
        return None if deadline is None else max(0.0, deadline - self._engine.clock())

    def _apply(self, command: _Command, publication: _Publication) -> None:
        try:
            value, results = command.call()
        except _AnswerLater:
            return
        except _RefusedError as refused:
            publication.results.append(refused.result)
            publication.answers.append((command.future, None, refused.error))
        except EngineError as error:
            publication.answers.append((command.future, None, error))
        else:
            publication.results.extend(results)
            publication.answers.append((command.future, value, None))

    def _publish(self, publication: _Publication) -> None:
        if publication:
            self._hop(lambda: self._deliver(publication))

    def _die(self, reason: str) -> None:
        self._dead_reason = reason
        self._hop(lambda: self._deliver_death(reason))

    def _hop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        # A closed loop means that the process is on its way out: nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    # ---- back on the loop --------------------------------------------------------------------------------------

    def _deliver(self, publication: _Publication) -> None:
        if self._is_buried:
            return
        try:
            self._take(publication)
        except Exception as error:  # never a silent loss: everyone who waits is told
            logger.exception("what the engine did could not be taken in")
            self._dead_reason = f"{type(error).__name__}: {error}"
            self._inbox.put(None)
            self._deliver_death(self._dead_reason)

    def _take(self, publication: _Publication) -> None:
        records = [result.record for result in publication.results]
        for record in records:
            self.state.apply(record)
            self.trace.append(record)
        for result in publication.results:
            for delta in result.deltas:
                self._route(delta)
        self._stats.clear()
        if not self._streams:
            self._idle.set()
        self._tell_listeners(records)
        for future, value, error in publication.answers:
            if future.done():  # the caller was cancelled
                continue
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

    def _tell_listeners(self, records: Sequence[Record]) -> None:
        if not records:
            return
        for listener in list(self._listeners):
            try:
                listener(records)
            except Exception:  # an observer's fault must not cost anyone a token
                logger.exception("a listener of the engine failed")

    def _route(self, delta: SequenceDelta) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is None:
            return
        if delta.finish_reason is not None:
            delta = replace(delta, stats=self._stats.get(child_seq_id(delta.request_id, delta.index)))
        stream.put(delta)
        if not stream.is_open:
            self._forget(delta.request_id)

    def _forget(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if not self._streams:
            self._idle.set()

    def _keep_stats(self, sequence: FoldedSequence, finished: Finished, record: Record) -> None:
        self._stats[sequence.seq_id] = sequence.stats(record)

    def _deliver_death(self, reason: str) -> None:
        if self._is_buried:
            return
        self._is_buried = True
        error = EngineDeadError(f"the engine is dead: {reason}")
        record = CommandRecord(
            self.state.seq + 1, self.state.step, self.now(), "dead", Changes(), detail=reason,
        )  # fmt: skip
        self.state.apply(record)
        self.trace.append(record)
        for stream in self._streams.values():
            stream.put(error)
        self._streams.clear()
        self._idle.set()
        self._fail_unanswered(error)
        self._tell_listeners([record])


class _AnswerLater(Exception):
    """The command's future is answered by the step loop."""


class _RefusedError(Exception):
    """A request was refused: the caller gets `error`, the trace gets `result`."""

    def __init__(self, error: RequestError, result: StepResult) -> None:
        self.error = error
        self.result = result
