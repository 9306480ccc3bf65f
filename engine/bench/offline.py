"""Throughput without HTTP: all requests of a workload at once, on the synchronous engine, in this process.

Knows nothing of arrival times. Greedy, end tokens ignored, exactly `max_tokens` each; a request that gave another
number, or was refused, is an error and makes the run fail. The prefix cache is emptied before each repetition.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from statistics import median

from engine.bench.report import Cell, emit, format_table, say
from engine.bench.workloads import Item, Workload
from engine.config import EngineConfig
from engine.engine import Engine, Request
from engine.errors import RequestError
from engine.sampling_params import SamplingParams

WARMUP_OUTPUT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class OfflineResult:
    """One repetition; the names of the fields are the keys of its JSON line."""

    engine: str
    workload: str
    rep: int  # from 0
    num_requests: int
    prompt_tokens: int
    output_tokens: int  # produced
    duration_s: float  # from the first add to the last finish
    startup_s: float  # weights, tokenizer and KV pool
    output_tokens_per_s: float
    num_preemptions: int
    num_steps: int
    errors: int  # requests that were refused, failed, or gave another number of tokens


def run_offline(config: EngineConfig, workload: Workload, *, reps: int, warmup: int) -> int:
    """Run and print `reps` repetitions; the exit status is 1 if any request went wrong.

    Raises:
        StartupError: the engine cannot start as configured.
    """
    # This bench is its own client: a bound on its queue would only refuse its own requests.
    bound = max(config.limits.max_num_queued_reqs, len(workload.items), warmup)
    engine, startup_s = start_engine(replace(config, limits=replace(config.limits, max_num_queued_reqs=bound)))
    info = engine.info
    say(
        f"{workload.name} on {info.name}, {info.dtype}, {info.device} with {info.threads} threads, "
        f"{info.num_blocks} blocks of {info.block_size}"
    )
    run_warmup(engine, workload, warmup)
    results = []
    for rep in range(reps):
        results.append(run_once(engine, workload, rep, startup_s))
        emit(asdict(results[-1]))
    say(offline_table(results))
    return 1 if any(result.errors for result in results) else 0


def start_engine(config: EngineConfig) -> tuple[Engine, float]:
    """An engine, and the seconds it took to start."""
    started_at = time.perf_counter()
    engine = Engine.from_config(config)
    return engine, time.perf_counter() - started_at


def run_warmup(engine: Engine, workload: Workload, num: int) -> None:
    """Run the first `num` requests, a few tokens each, so that the first repetition pays for nothing unusual."""
    items = tuple(replace(i, max_tokens=min(i.max_tokens, WARMUP_OUTPUT_TOKENS)) for i in workload.items[:num])
    run_once(engine, Workload("warmup", items), 0, 0.0)


def run_once(engine: Engine, workload: Workload, rep: int, startup_s: float) -> OfflineResult:
    """Add everything, step until nothing is left, and count."""
    engine.reset_prefix_cache()
    counts: dict[str, int] = {}
    wanted: dict[str, int] = {}
    failed: set[str] = set()
    preemptions = steps = 0
    started_at = time.perf_counter()
    for index, item in enumerate(workload.items):
        request = bench_request(f"{workload.name}-{rep}-{index}", item)
        wanted[request.request_id], counts[request.request_id] = item.max_tokens, 0
        try:
            engine.add(request)
        except RequestError as error:
            failed.add(request.request_id)
            say(f"request {index} was refused: {error}")
    while engine.has_work:
        result = engine.step()
        steps += 1
        preemptions += len(result.record.changes.preempted)
        for delta in result.deltas:
            counts[delta.request_id] += len(delta.token_ids)
            if delta.finish_reason not in (None, "length"):
                failed.add(delta.request_id)
                say(f"{delta.request_id} ended with {delta.finish_reason}: {delta.error or 'no further detail'}")
    duration_s = time.perf_counter() - started_at
    failed |= {request_id for request_id, num in wanted.items() if counts[request_id] != num}
    output_tokens = sum(counts.values())
    return OfflineResult(
        engine="pagedeck",
        workload=workload.name,
        rep=rep,
        num_requests=len(workload.items),
        prompt_tokens=workload.num_prompt_tokens,
        output_tokens=output_tokens,
        duration_s=round(duration_s, 3),
        startup_s=round(startup_s, 2),
        output_tokens_per_s=round(output_tokens / duration_s, 1),
        num_preemptions=preemptions,
        num_steps=steps,
        errors=len(failed),
    )


def bench_request(request_id: str, item: Item) -> Request:
    """A greedy request of exactly `max_tokens` tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=item.max_tokens, ignore_eos=True)
    return Request(request_id, item.prompt_token_ids, params, source="bench")


def offline_table(results: list[OfflineResult]) -> str:
    """The repetitions, and their median where there are several."""
    header = ("rep", "requests", "prompt tok", "output tok", "seconds", "output tok/s", "preemptions", "errors")
    rows: list[tuple[Cell, ...]] = [
        (r.rep, r.num_requests, r.prompt_tokens, r.output_tokens, r.duration_s, r.output_tokens_per_s,
         r.num_preemptions, r.errors)
        for r in results
    ]  # fmt: skip
    if len(results) > 1:
        seconds, rate = (median(r.duration_s for r in results), median(r.output_tokens_per_s for r in results))
        rows.append(("median", "", "", "", seconds, rate, "", ""))
    return format_table(header, rows)
