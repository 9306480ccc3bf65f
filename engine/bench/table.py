"""`make bench`: the rows of the README's tables, made on this machine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from engine.bench.offline import bench_request, run_once, run_warmup, start_engine
from engine.bench.report import percentile, say
from engine.bench.workloads import Item, Workload, make_workload
from engine.config import EngineConfig
from engine.engine import Engine

THROUGHPUT = ("mixed:32", "mixed:96", "shared-prefix:64")
SINGLE_PROMPT_TOKENS, SINGLE_OUTPUT = tuple(range(1000, 1144)), 144  # as llama.cpp's llama-batched-bench was run
LONG = 1000  # tokens: a prompt from here on is one of those that interfere


@dataclass(slots=True)
class Timeline:
    """When each request's tokens came, in seconds after the start."""

    token_times: dict[str, list[float]] = field(default_factory=dict)

    def gaps(self, request_ids: Sequence[str]) -> list[float]:
        """Between the tokens of each of them: the inter-token latencies."""
        times = [self.token_times[request_id] for request_id in request_ids]
        return [b - a for each in times for a, b in pairwise(each)]


def main() -> int:
    """Print Markdown tables: medians over the repetitions."""
    parser = argparse.ArgumentParser(prog="make bench", description=main.__doc__)
    parser.add_argument("--reps", type=int, default=3, help="Repetitions of each workload. Default: 3.")
    parser.add_argument(
        "--workloads", nargs="+", default=THROUGHPUT, help=f"Of the throughput table. Default: {' '.join(THROUGHPUT)}."
    )
    args = parser.parse_args()
    config = EngineConfig()
    engine, startup_s = start_engine(replace(config, limits=replace(config.limits, max_num_queued_reqs=100_000)))
    info = engine.info
    say(f"{info.name}, {info.dtype}, {info.threads} threads, started in {startup_s:.1f} s")
    num_errors = throughput_table(engine, args.workloads, args.reps)
    latency_table(engine, args.reps)
    return 1 if num_errors else 0


def throughput_table(engine: Engine, specs: Sequence[str], reps: int) -> int:
    """One row per workload, all requests at once; returns how many requests went wrong."""
    print("| workload | requests | prompt tokens | output tokens | output tokens/s | seconds | preemptions |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    num_errors = 0
    for spec in specs:
        workload = make_workload(spec)
        run_warmup(engine, workload, 4)
        results = [run_once(engine, workload, rep, 0.0) for rep in range(reps)]
        num_errors += sum(result.errors for result in results)
        rate, seconds = (median(r.output_tokens_per_s for r in results), median(r.duration_s for r in results))
        print(
            f"| {workload.name} | {len(workload.items)} | {workload.num_prompt_tokens:,} | "
            f"{workload.num_output_tokens:,} | {rate:.1f} | {seconds:.1f} | {results[-1].num_preemptions} |",
            flush=True,
        )
    return num_errors


def latency_table(engine: Engine, reps: int) -> None:
    """What one request alone gets, and what decodes get while long prompts are read."""
    single = Workload("single", (Item(SINGLE_PROMPT_TOKENS, SINGLE_OUTPUT),))
    alone = [run_timed(engine, single, rep).gaps([request_id(single, rep, 0)]) for rep in range(reps)]
    rate = median(len(gaps) / sum(gaps) for gaps in alone)
    workload = make_workload("interference")
    short = [index for index, item in enumerate(workload.items) if len(item.prompt_token_ids) < LONG]
    rows = []
    for rep in range(reps):
        gaps = run_timed(engine, workload, rep).gaps([request_id(workload, rep, index) for index in short])
        rows.append([1000 * (percentile(gaps, percent) or 0.0) for percent in (50, 99, 100)])
    p50, p99, worst = (median(column) for column in zip(*rows, strict=True))
    ratio = median(row[1] / row[0] for row in rows)
    print("\n| one request alone, decode tokens/s | ITL p50 beside two 4,000-token prompts | p99 | p99 / p50 | worst |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    print(f"| {rate:.1f} | {p50:.1f} ms | {p99:.1f} ms | {ratio:.2f} | {worst:.0f} ms |", flush=True)


def run_timed(engine: Engine, workload: Workload, rep: int) -> Timeline:
    """Add each request at its arrival time, step until nothing is left, and note when tokens come."""
    engine.reset_prefix_cache()
    timeline, added = Timeline(), 0
    started_at = time.perf_counter()
    while added < len(workload.items) or engine.has_work:
        now = time.perf_counter() - started_at
        while added < len(workload.items) and workload.items[added].arrival_s <= now:
            engine.add(bench_request(request_id(workload, rep, added), workload.items[added]))
            added += 1
        if not engine.has_work:
            time.sleep(0.001)
            continue
        deltas = engine.step().deltas
        now = time.perf_counter() - started_at
        for delta in deltas:
            timeline.token_times.setdefault(delta.request_id, []).extend([now] * len(delta.token_ids))
    return timeline


def request_id(workload: Workload, rep: int, index: int) -> str:
    """What a request of a repetition is called."""
    return f"{workload.name}-{rep}-{index}"


if __name__ == "__main__":
    raise SystemExit(main())
