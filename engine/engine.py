"""The engine: synchronous, single-threaded, one step at a time.

Schedule, execute, update, publish. Whoever calls it owns it; `engine.async_engine` gives it a thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.config import EngineConfig, ModelInfo
from engine.core.batch import Batch, StepOutput
from engine.core.events import Blocked, CommandRecord, Record, StepRecord
from engine.core.limits import MAX_TIMEOUT_S, Limits, changed_limits, start_limits
from engine.core.prefix_cache import root_hash
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.errors import (
    EngineDrainingError,
    InvalidValueError,
    LimitsError,
    NotPausedError,
    QueueFullError,
    RequestError,
    StaleLimitsError,
)
from engine.output_processor import OutputProcessor, StepTexts
from engine.outputs import AbortReceipt, SequenceDelta
from engine.sampling_params import SamplingParams
from engine.structured.grammars import Grammar, Grammars
from engine.tokenizer.tokenizer import Tokenizer


class Runner(Protocol):
    """What executes a batch (see `engine.runner.model_runner`)."""

    info: ModelInfo

    def use_grammars(self, grammars: Grammars) -> None:
        """Take matchers for structured output from there."""

    def execute(self, batch: Batch) -> StepOutput:
        """Compute the batch's tokens and sample."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asks for."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams
    priority: int = 0  # lower = more urgent, under scheduling_policy "priority"
    queue_timeout_s: float | None = None  # None = the engine's limit
    request_timeout_s: float | None = None
    cache_salt: str | None = None  # requests share cached prefixes only within one salt
    source: str = "v1"
    grammar: Grammar | None = field(default=None, repr=False, compare=False)  # its structured output, compiled;
    # None where there is some = compile it when it is added


@dataclass(frozen=True, slots=True)
class StepResult:
    """One record and what it means to clients."""

    record: Record
    deltas: list[SequenceDelta]


class Engine:
    """Owns scheduler, runner and texts.

    Args:
        runner: executes batches; its `info` fixes pool size, block size and lengths.
        tokenizer: turns ids into text.
        limits: the limits at the start.
        clock: monotonic seconds.
        seed: of the generator that draws a seed for each request without one.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        enable_prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
    ) -> None:
        info = runner.info
        self.info = info
        self.tokenizer = tokenizer
        self.start_limits = start_limits(limits, info.num_blocks, info.device)
        self.limits_version = 1
        self.clock = clock
        self.is_draining = False
        self.scheduler = Scheduler(
            info.num_blocks, info.block_size, info.max_model_len, self.start_limits,
            enable_prefix_caching=enable_prefix_caching,
        )  # fmt: skip
        self.grammars = Grammars(tokenizer, info.vocab_size)
        runner.use_grammars(self.grammars)
        self._runner = runner
        self._outputs = OutputProcessor(tokenizer)
        self._seeds = random.Random(seed)
        self._seq = 0
        self._num_requests = 0
        self._valid_params: SamplingParams | None = None  # the latest that were found right
        self._receipts: dict[str, AbortReceipt] = {}  # how the latest requests ended, oldest first

    @classmethod
    def from_config(cls, config: EngineConfig) -> Engine:
        """Load model and tokenizer and allocate the KV pool.

        Raises:
            StartupError: says what doesn't work and what would.
        """
        from engine.runner.executor import load_runner
        from engine.tokenizer.tokenizer import load_tokenizer
        from engine.weights.generation_config import generation_defaults

        runner = load_runner(config)
        if config.generation_config == "auto":
            runner.info = replace(runner.info, generation_defaults=generation_defaults(config.model))
        tokenizer = load_tokenizer(config.model, config.tokenizer)
        return cls(
            runner, tokenizer, config.limits, enable_prefix_caching=config.enable_prefix_caching, seed=config.seed
        )

    # ---- the step ----------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    @property
    def is_paused(self) -> bool:
        """Whether only `step` by command advances."""
        return self.scheduler.is_paused

    def step(self, drain_s: float = 0.0, publish_s: float = 0.0) -> StepResult:
        """Schedule, execute, update, publish.

        Args:
            drain_s: seconds spent on commands before it, for the record.
            publish_s: seconds spent on handing over the step before it, likewise.
        """
        started_at = self.clock()
        batch = self.scheduler.schedule()
        scheduled_at = self.clock()
        output = self._runner.execute(batch) if batch.scheduled else StepOutput(())
        executed_at = self.clock()
        self._outputs.take_prompt_logprobs(output.prompt_logprobs)
        texts = self._outputs.detokenize(output.sampled)
        detokenized_at = self.clock()
        self.scheduler.update(batch, output.sampled, texts.stopped, dict(output.failed), texts.stopped_at_end)
        changes = self.scheduler.log.take()
        deltas = self._outputs.deltas(batch.step, texts, changes)
        self._remember_ends(batch.step, deltas)
        ended_at = self.clock()
        phases = (
            ("drain", drain_s), ("schedule", scheduled_at - started_at), *output.phases,
            ("detokenize", detokenized_at - executed_at), ("update", ended_at - detokenized_at),
            ("publish", publish_s),
        )  # fmt: skip
        record = StepRecord(self._next_seq(), batch.step, started_at, ended_at, changes, self.scheduler.blocked, phases)
        return StepResult(record, deltas)

    def expire(self) -> StepResult | None:
        """End what is past its deadline; None if nothing is."""
        if not self.scheduler.expire(self.clock()):
            return None
        return self._command("timeout")

    # ---- commands ----------------------------------------------------------------------------------------------

    def add(self, request: Request) -> StepResult:
        """Accept a request.

        Raises:
            RequestError: it is refused; see `engine.errors`. Use `reject` for the record of it.
        """
        scheduler, limits = self.scheduler, self.scheduler.limits
        if self.is_draining:
            raise EngineDrainingError("the engine is shutting down and takes no new requests")
        self.check(request)
        if len(scheduler.waiting) >= limits.max_num_queued_reqs:
            num_waiting = len({waiting.request_id for waiting in scheduler.waiting})  # siblings are one request
            if num_waiting >= limits.max_num_queued_reqs:
                raise QueueFullError(num_waiting, limits.max_num_queued_reqs)
        sequence = self._sequence(request)
        if request.sampling_params.structured is not None:
            self.grammars.hold(request.request_id, request.sampling_params.structured, request.grammar)
        scheduler.add(sequence)
        self._outputs.add(sequence)
        return self._command("add", request.request_id)

    def check(self, request: Request) -> None:
        """Refuse what can never be right, whatever the load.

        Raises:
            RequestError: names field, value and limit.
        """
        params = request.sampling_params
        if params is not self._valid_params:  # the prompts of one request share them
            params.validate(self.info.vocab_size)
            self._valid_params = params
        if not request.prompt_token_ids:
            raise InvalidValueError("prompt", [], "at least one token")
        if not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < self.info.vocab_size:
            bad = next(t for t in request.prompt_token_ids if not 0 <= t < self.info.vocab_size)
            raise InvalidValueError("prompt", bad, f"token ids in [0, {self.info.vocab_size - 1}]")
        if self.scheduler.live_sequences(request.request_id):
            raise InvalidValueError("request_id", request.request_id, "unique among the requests that are alive")
        for name, seconds in (
            ("queue_timeout_s", request.queue_timeout_s),
            ("request_timeout_s", request.request_timeout_s),
        ):
            if seconds is not None and not 0 < seconds <= MAX_TIMEOUT_S:
                raise InvalidValueError(name, seconds, f"a number of seconds > 0 and <= {MAX_TIMEOUT_S:,.0f}")
        self.scheduler.admission.check_fits(len(request.prompt_token_ids), params.n)

    def _sequence(self, request: Request) -> Sequence:
        params, limits, now = request.sampling_params, self.scheduler.limits, self.clock()
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(62))
        left = min(self._room(request), limits.num_usable_blocks * self.info.block_size - len(request.prompt_token_ids))
        max_tokens = left if params.max_tokens is None else min(params.max_tokens, self._room(request))
        if params.min_tokens > max_tokens:
            raise InvalidValueError("min_tokens", params.min_tokens, f"at most the {max_tokens} tokens that are left")
        queue_timeout_s = request.queue_timeout_s or limits.queue_timeout_s
        request_timeout_s = request.request_timeout_s or limits.request_timeout_s
        self._num_requests += 1
        return Sequence(
            seq_id=request.request_id, request_id=request.request_id, index=0, source=request.source,
            priority=request.priority, queue_index=self._num_requests, arrival_time=now,
            num_prompt_tokens=len(request.prompt_token_ids), token_ids=list(request.prompt_token_ids),
            sampling_params=params, max_tokens=max_tokens, eos_token_ids=self.tokenizer.eos_token_ids,
            root_hash=root_hash(request.cache_salt), num_pending_forks=params.n - 1,
            queue_deadline=None if queue_timeout_s is None else now + queue_timeout_s,
            deadline=None if request_timeout_s is None else now + request_timeout_s,
        )  # fmt: skip

    def _room(self, request: Request) -> int:
        """Tokens that max_model_len leaves for the output."""
        return self.info.max_model_len - len(request.prompt_token_ids)

    def reject(self, request_id: str, error: RequestError) -> StepResult:
        """The record of a refusal, so that it is counted."""
        reason = {QueueFullError: "queue_full", EngineDrainingError: "draining"}.get(type(error), "invalid")
        return self._command("reject", request_id, reason)

    def abort(self, request_id: str, reason: str = "abort") -> tuple[AbortReceipt, StepResult | None]:
        """End a request in whatever state it is; asked for again, say how it had ended."""
        live = self.scheduler.live_sequences(request_id)
        if not live and (sequence := self.scheduler.sequence(request_id)) is not None:
            request_id = sequence.request_id  # the id of a row: it goes with its siblings
            live = self.scheduler.live_sequences(request_id)
        if not live:
            receipt = self._receipts.get(request_id)
            return receipt or AbortReceipt(request_id, "unknown", self.scheduler.step, 0, 0), None
        output_tokens = sum(s.num_output_tokens for s in live)
        held = {block_id for s in live for block_id in s.block_table}
        for sequence in live:
            self.scheduler.finish(sequence, reason)
        blocks_freed = sum(self.scheduler.pool.ref_counts[block_id] == 0 for block_id in held)
        result = self._command("abort", request_id)
        receipt = AbortReceipt(request_id, "aborted", self.scheduler.step, blocks_freed, output_tokens)
        self._remember(receipt)
        return receipt, result

    def pause(self, reason: str) -> StepResult:
        """Stop stepping until `resume`; commands and single steps still work."""
        self.scheduler.is_paused = True
        return self._command("pause", detail=reason)

    def resume(self) -> StepResult:
        """Step freely again."""
        self.scheduler.is_paused = False
        return self._command("resume")

    def check_can_step(self) -> None:
        """Raises NotPausedError unless paused."""
        if not self.is_paused:
            raise NotPausedError("single steps need a paused engine: pause it first")

    def drain(self) -> StepResult:
        """Refuse new requests from now on; what is accepted goes on."""
        self.is_draining = True
        return self._command("drain")

    def set_limits(self, changes: Mapping[str, object], expected_version: int | None = None) -> StepResult:
        """Apply `changes`, all or nothing.

        Raises:
            StaleLimitsError: `expected_version` is not the current one.
            LimitsError: a name, type or range is wrong.
        """
        if expected_version is not None and expected_version != self.limits_version:
            raise StaleLimitsError(expected_version, self.limits_version)
        limits = changed_limits(self.scheduler.limits, changes, self.info.num_blocks)
        if not changes:
            raise LimitsError("limits", {}, "at least one limit to change")
        self.limits_version += 1
        self.scheduler.set_limits(limits)
        return self._command("limits", limits=limits)

    def reset_prefix_cache(self) -> tuple[int, StepResult]:
        """Drop all cached content; returns how many blocks lost theirs."""
        num_blocks = self.scheduler.reset_prefix_cache()
        return num_blocks, self._command("reset", detail=str(num_blocks))

    # ---- records -----------------------------------------------------------------------------------------------

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def _command(
        self, kind: str, request_id: str | None = None, detail: str | None = None, limits: Limits | None = None
    ) -> StepResult:
        scheduler = self.scheduler
        changes = scheduler.log.take()
        if scheduler.is_paused and scheduler.waiting:
            scheduler.blocked = Blocked(scheduler.waiting[0].seq_id, "paused", 0, 0, 0)
        elif scheduler.blocked is not None and scheduler.blocked.constraint == "paused":
            scheduler.blocked = None
        record = CommandRecord(
            self._next_seq(), scheduler.step, self.clock(), kind, changes, request_id, detail, limits,
            None if limits is None else self.limits_version, scheduler.blocked,
        )  # fmt: skip
        deltas = self._outputs.deltas(scheduler.step, StepTexts(), changes)
        self._remember_ends(scheduler.step, deltas)
        return StepResult(record, deltas)

    def _remember_ends(self, step: int, deltas: list[SequenceDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is None or self.scheduler.live_sequences(delta.request_id):
                continue
            num_tokens = self._outputs.take_total(delta.request_id)
            if num_tokens is not None:
                self.grammars.release(delta.request_id)
                state = f"finished:{delta.finish_reason}"
                self._remember(AbortReceipt(delta.request_id, state, step, 0, num_tokens))

    def _remember(self, receipt: AbortReceipt) -> None:
        self._receipts.pop(receipt.request_id, None)
        self._receipts[receipt.request_id] = receipt
        if len(self._receipts) > 1000:
            del self._receipts[next(iter(self._receipts))]
