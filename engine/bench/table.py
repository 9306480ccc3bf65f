"""`make bench`: the throughput rows of the README's table, made on this machine."""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median

from engine.bench.offline import run_once, run_warmup, start_engine
from engine.bench.report import say
from engine.bench.workloads import make_workload
from engine.config import EngineConfig

WORKLOADS = ("mixed:32", "mixed:96")


def main() -> int:
    """Print one Markdown row per workload: the median over the repetitions."""
    parser = argparse.ArgumentParser(prog="make bench", description=main.__doc__)
    parser.add_argument("--reps", type=int, default=3, help="Repetitions of each workload. Default: 3.")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, help="Default: mixed:32 mixed:96.")
    args = parser.parse_args()
    config = EngineConfig()
    engine, startup_s = start_engine(replace(config, limits=replace(config.limits, max_num_queued_reqs=100_000)))
    info = engine.info
    say(f"{info.name}, {info.dtype}, {info.threads} threads, started in {startup_s:.1f} s")
    print("| workload | requests | prompt tokens | output tokens | output tokens/s | seconds | preemptions |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    num_errors = 0
    for spec in args.workloads:
        workload = make_workload(spec)
        run_warmup(engine, workload, 4)
        results = [run_once(engine, workload, rep, startup_s) for rep in range(args.reps)]
        num_errors += sum(result.errors for result in results)
        rate, seconds = (median(r.output_tokens_per_s for r in results), median(r.duration_s for r in results))
        print(
            f"| {workload.name} | {len(workload.items)} | {workload.num_prompt_tokens:,} | "
            f"{workload.num_output_tokens:,} | {rate:.1f} | {seconds:.1f} | {results[-1].num_preemptions} |",
            flush=True,
        )
    return 1 if num_errors else 0


if __name__ == "__main__":
    raise SystemExit(main())
