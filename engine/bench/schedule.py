"""Dry run: the real scheduler over a recorded trace, with a model that only takes time.

A step costs `step_cost_s + token_cost_s * tokens` of simulated seconds and writes no KV, so an hour of production
traffic runs in seconds, and what it reports (waits, preemptions, prefix hits, waste) is the scheduler's own doing.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.bench.report import emit, format_table, percentile, say
from engine.bench.traces import TracedRequest, read_trace
from engine.bench.waste import waste_ledger
from engine.core.batch import SampledToken
from engine.core.limits import Limits
from engine.core.prefix_cache import root_hash
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.errors import RequestError
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduleResult:
    """What the dry run found; simulated seconds unless the name says wall."""

    trace: str
    num_requests: int
    num_refused: int  # could never fit
    finished: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    simulated_s: float
    wall_s: float
    schedule_wall_s: float  # of it, in schedule and update
    num_steps: int
    mean_running: float  # sequences per step
    queue_p50_s: float | None
    queue_p99_s: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    num_preemptions: int
    recomputed_tokens: int
    prefix_hit_rate: float  # share of prompt tokens found in the cache
    peak_kv_usage: float
    waste: dict[str, float]  # share of reserved KV memory that holds tokens, percent, by rule of allocation


class DryRun:
    """One trace through one scheduler.

    Args:
        requests: in the order of their arrival.
        step_cost_s: simulated seconds of any step.
        token_cost_s: and of each token in it.
    """

    def __init__(
        self,
        requests: SequenceOf[TracedRequest],
        limits: Limits,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_model_len: int = 16384,
        enable_prefix_caching: bool = True,
        step_cost_s: float = 0.015,
        token_cost_s: float = 0.00003,
    ) -> None:
        self.requests = requests
        self.scheduler = Scheduler(
            num_blocks, block_size, max_model_len, limits, enable_prefix_caching=enable_prefix_caching
        )
        self.step_cost_s, self.token_cost_s = step_cost_s, token_cost_s
        self.now = 0.0
        self.finished: Counter[str] = Counter()
        self.num_refused = self.num_steps = self.num_preemptions = self.recomputed_tokens = 0
        self.output_tokens = self.cached_tokens = self.queried_tokens = self.num_scheduled = 0
        self.schedule_wall_s = 0.0
        self.peak_in_use = 0
        self.queue_s: list[float] = []
        self.ttft_s: list[float] = []
        self.gaps: Counter[float] = Counter()  # between tokens, to the 0.1 ms: a histogram, not four million floats
        self._last_token: dict[str, float] = {}
        self._arrivals: dict[str, float] = {}
        self._lost_tokens: dict[str, int] = {}  # of those that were preempted and wait again

    def run(self) -> None:
        """Simulate until everything has ended.

        Raises:
            RuntimeError: the scheduler made no progress (a livelock).
        """
        scheduler, requests = self.scheduler, self.requests
        next_index, total = 0, len(self.requests)
        while next_index < total or scheduler.has_work:
            if not scheduler.has_work:
                self.now = max(self.now, requests[next_index].arrival_s)
            while next_index < total and requests[next_index].arrival_s <= self.now:
                self._add(next_index, requests[next_index])
                next_index += 1
            if scheduler.has_work:
                self._step()

    def _add(self, index: int, request: TracedRequest) -> None:
        scheduler = self.scheduler
        try:
            scheduler.admission.check_fits(request.num_prompt_tokens, 1)
        except RequestError:
            self.num_refused += 1
            return
        seq_id = f"r{index}"
        room = scheduler.max_model_len - request.num_prompt_tokens
        self._arrivals[seq_id] = request.arrival_s
        scheduler.add(
            Sequence(
                seq_id=seq_id, request_id=seq_id, index=0, source="trace", priority=0, queue_index=index,
                arrival_time=request.arrival_s, num_prompt_tokens=request.num_prompt_tokens,
                token_ids=[0] * request.num_prompt_tokens, sampling_params=_GREEDY,
                max_tokens=min(request.num_output_tokens, room), eos_token_ids=(), root_hash=root_hash(seq_id),
                num_pending_forks=0, queue_deadline=None, deadline=None, block_hashes=self._prompt_hashes(request),
            )
        )  # fmt: skip

    def _prompt_hashes(self, request: TracedRequest) -> list[str]:
        """Identities of the prompt's full blocks, from the trace's own; blocks beyond them are the request's alone."""
        size, ids = self.scheduler.blocks.block_size, request.prefix_ids
        per_id = request.prefix_block_tokens
        num_full = min(request.num_prompt_tokens, len(ids) * per_id) // size
        if per_id >= size:
            return [f"{ids[i * size // per_id]}:{i * size % per_id}" for i in range(num_full)]
        return [str(hash(ids[: (i + 1) * size // per_id])) for i in range(num_full)]

    def _step(self) -> None:
        scheduler = self.scheduler
        started_at = time.perf_counter()
        batch = scheduler.schedule()
        scheduled_at = time.perf_counter()
        num_tokens = 0
        sampled = []
        for scheduled in batch.scheduled:
            num_tokens += scheduled.num_tokens
            if scheduled.is_sampling:
                sampled.append(SampledToken(scheduled.seq_id, 0, None))
        self.peak_in_use = max(self.peak_in_use, scheduler.pool.num_in_use)
        begun_at = self.now
        self.now += self.step_cost_s + self.token_cost_s * num_tokens
        updating_at = time.perf_counter()
        scheduler.update(batch, sampled, {}, {})
        changes = scheduler.log.take()
        self.schedule_wall_s += scheduled_at - started_at + time.perf_counter() - updating_at

        self.num_steps += 1
        self.num_scheduled += len(batch.scheduled)
        self.output_tokens += len(sampled)
        self.num_preemptions += len(changes.preempted)
        for preempted in changes.preempted:
            self._lost_tokens[preempted.seq_id] = preempted.num_tokens
        for admitted in changes.admitted:
            if admitted.is_resumed:
                num_lost = self._lost_tokens.pop(admitted.seq_id)
                self.recomputed_tokens += max(0, num_lost - admitted.num_cached_tokens)
            else:
                self.queue_s.append(begun_at - self._arrivals[admitted.seq_id])
                self.cached_tokens += admitted.num_cached_tokens
                self.queried_tokens += admitted.num_known_tokens
        self._count_gaps([token.seq_id for token in sampled])
        for finished in changes.finished:
            self.finished[finished.reason] += 1
            self._last_token.pop(finished.seq_id, None)
            del self._arrivals[finished.seq_id]

    def _count_gaps(self, seq_ids: list[str]) -> None:
        """A token of each of these sequences now: most had their last one at the same time, and are counted as one."""
        now, last_token = self.now, self._last_token
        for before, count in Counter(map(last_token.get, seq_ids)).items():
            if before is not None:
                self.gaps[round(now - before, 4)] += count
        self.ttft_s += [now - self._arrivals[seq_id] for seq_id in seq_ids if seq_id not in last_token]
        last_token.update(dict.fromkeys(seq_ids, now))


_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def weighted_percentile(counts: Counter[float], percent: float) -> float | None:
    """The smallest value that at least `percent` % of the counted values don't exceed."""
    left = counts.total() * percent / 100
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return None


def run_schedule(path: Path, dry_run: DryRun) -> ScheduleResult:
    """Run it, check that nothing leaked, and sum up."""
    started_at = time.perf_counter()
    gc.freeze()  # the trace itself is not worth walking again in every collection
    dry_run.run()
    wall_s = time.perf_counter() - started_at
    gc.unfreeze()
    scheduler = dry_run.scheduler
    scheduler.check_invariants()
    assert scheduler.pool.num_in_use == 0, "blocks are in use after everything has ended"
    lengths = ((r.num_prompt_tokens, r.num_output_tokens) for r in dry_run.requests)
    return ScheduleResult(
        trace=path.name, num_requests=len(dry_run.requests), num_refused=dry_run.num_refused,
        finished=dict(dry_run.finished), prompt_tokens=sum(r.num_prompt_tokens for r in dry_run.requests),
        output_tokens=dry_run.output_tokens, simulated_s=dry_run.now, wall_s=wall_s,
        schedule_wall_s=dry_run.schedule_wall_s, num_steps=dry_run.num_steps,
        mean_running=dry_run.num_scheduled / max(1, dry_run.num_steps),
        queue_p50_s=percentile(dry_run.queue_s, 50), queue_p99_s=percentile(dry_run.queue_s, 99),
        ttft_p50_s=percentile(dry_run.ttft_s, 50), ttft_p99_s=percentile(dry_run.ttft_s, 99),
        itl_p50_s=weighted_percentile(dry_run.gaps, 50), itl_p99_s=weighted_percentile(dry_run.gaps, 99),
        num_preemptions=dry_run.num_preemptions, recomputed_tokens=dry_run.recomputed_tokens,
        prefix_hit_rate=dry_run.cached_tokens / max(1, dry_run.queried_tokens),
        peak_kv_usage=dry_run.peak_in_use / scheduler.pool.num_blocks,
        waste=waste_ledger(lengths, scheduler.max_model_len, scheduler.blocks.block_size).shares(),
    )  # fmt: skip


def bench_schedule(
    trace: str,
    limits: Limits,
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    enable_prefix_caching: bool,
    step_cost_s: float,
    token_cost_s: float,
) -> int:
    """`pagedeck bench schedule`: a table on stderr, one JSON line on stdout; the exit status.

    Raises:
        WorkloadError: the trace cannot be read.
    """
    path = Path(trace)
    dry_run = DryRun(
        read_trace(path), limits, num_blocks=num_blocks, block_size=block_size, max_model_len=max_model_len,
        enable_prefix_caching=enable_prefix_caching, step_cost_s=step_cost_s, token_cost_s=token_cost_s,
    )  # fmt: skip
    result = run_schedule(path, dry_run)
    rows = [(name, value) for name, value in asdict(result).items() if not isinstance(value, dict)]
    say(format_table(("figure", "value"), rows))
    say("finished: " + ", ".join(f"{reason} {count:,}" for reason, count in result.finished.items()))
    say("KV memory that holds tokens, by rule: " + ", ".join(f"{k} {v:.1f} %" for k, v in result.waste.items()))
    emit(asdict(result))
    return 0
