"""Latency over HTTP: a workload sent at its arrival times, streaming, to a server that is started for it.

Where a workload mixes short prompts with much longer ones, the gaps between tokens of the short requests are also
reported on their own: how well others decode while a long prompt is computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median

import httpx

from app.bench.client import Target, Timing, count_preemptions, find_model, reset_prefix_cache, send_workload
from app.bench.server_process import ServerFailedError, running_server
from app.settings import Settings
from engine.bench.report import Cell, emit, format_table, percentile, say
from engine.bench.workloads import Workload

PERCENTS = (50, 90, 99)
LONG_FACTOR = 8  # a prompt is long if it is more than this many times the median one
WARMUP_OUTPUT_TOKENS = 16
MAX_ERRORS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Measured:
    """One repetition before it is summed up."""

    timings: list[Timing]
    num_preemptions: int | None


def run_online(
    settings: Settings, workload: Workload, *, reps: int, warmup: int, base_url: str | None, flags: Sequence[str]
) -> int:
    """Run and print `reps` repetitions; the exit status is 1 if a request or the server failed.

    Args:
        base_url: of a running server; None starts one with `flags`.
    """
    try:
        with ExitStack() as stack:
            startup_s = None
            if base_url is None:
                server = stack.enter_context(running_server(flags, settings.api_key))
                base_url, startup_s = server.base_url, server.startup_s
            base_url = base_url.rstrip("/").removesuffix("/v1")
            key = next((key.key for key in settings.api_key if key.role == "admin"), None)
            key = key or next((key.key for key in settings.api_key), None)
            return asyncio.run(_measure(base_url, key, workload, reps, warmup, startup_s))
    except (ServerFailedError, httpx.HTTPError, ValueError) as error:
        say(f"pagedeck: {error or type(error).__name__}")
        return 1


async def _measure(
    base_url: str, api_key: str | None, workload: Workload, reps: int, warmup: int, startup_s: float | None
) -> int:
    model, owner = await find_model(base_url, api_key)
    target = Target(base_url, model, api_key)
    say(f"{workload.name} to {base_url}, model {model}")
    await _warm_up(target, workload, warmup)
    results: list[dict[str, object]] = []
    for rep in range(reps):
        if not await reset_prefix_cache(target):
            say("the server offers no reset of its prefix cache: later repetitions may profit from earlier ones")
        measured = await _run_once(target, workload)
        _say_errors(measured.timings)
        results.append({"engine": owner, **summarize(workload, measured, rep, startup_s)})
        emit(results[-1])
    say(online_table(results))
    return 1 if any(result["errors"] for result in results) else 0


async def _warm_up(target: Target, workload: Workload, num: int) -> None:
    items = [
        replace(item, arrival_s=0.0, max_tokens=min(item.max_tokens, WARMUP_OUTPUT_TOKENS))
        for item in workload.items[:num]
    ]
    await send_workload(target, Workload("warmup", tuple(items)))


async def _run_once(target: Target, workload: Workload) -> Measured:
    before = await count_preemptions(target)
    timings = await send_workload(target, workload)
    after = await count_preemptions(target)
    return Measured(timings, None if before is None or after is None else after - before)


def _say_errors(timings: list[Timing]) -> None:
    errors = [f"request {i}: {timing.error}" for i, timing in enumerate(timings) if timing.error is not None]
    for text in errors[:MAX_ERRORS_SHOWN]:
        say(text)
    if len(errors) > MAX_ERRORS_SHOWN:
        say(f"and {len(errors) - MAX_ERRORS_SHOWN} errors more")


def summarize(workload: Workload, measured: Measured, rep: int, startup_s: float | None) -> dict[str, object]:
    """The values of one repetition's JSON line; latencies are of the requests that went right, in seconds."""
    timings = measured.timings
    good = [timing for timing in timings if timing.error is None]
    duration_s = max(t.ended_at for t in timings) - min(t.sent_at for t in timings)
    output_tokens = sum(timing.num_output_tokens for timing in timings)
    summary: dict[str, object] = {
        "workload": workload.name,
        "rep": rep,
        "num_requests": len(timings),
        "prompt_tokens": workload.num_prompt_tokens,
        "output_tokens": output_tokens,
        "duration_s": round(duration_s, 3),
        "startup_s": None if startup_s is None else round(startup_s, 2),
        "output_tokens_per_s": round(output_tokens / duration_s, 1),
        "num_preemptions": measured.num_preemptions,
        "errors": len(timings) - len(good),
    }
    summary |= _percentiles("ttft", [t.ttft_s for t in good])
    summary |= _percentiles("itl", [gap for t in good for gap in t.gaps_s])
    summary |= _percentiles("tpot", [tpot for t in good if (tpot := t.tpot_s) is not None])
    summary |= _percentiles("e2e", [t.e2e_s for t in good])
    if short := _short_requests(good):
        gaps = [gap for t in short for gap in t.gaps_s]
        summary["short_requests"] = len(short)
        summary |= _percentiles("itl_short", gaps)
        summary["itl_short_max_s"] = round(max(gaps), 6) if gaps else None
    return summary


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float | None]:
    found = {f"{name}_p{percent}_s": percentile(values, percent) for percent in PERCENTS}
    return {key: None if value is None else round(value, 6) for key, value in found.items()}


def _short_requests(timings: Sequence[Timing]) -> list[Timing]:
    """The requests with short prompts, if there are also long ones; else none."""
    if not timings:
        return []
    bound = LONG_FACTOR * median(len(t.item.prompt_token_ids) for t in timings)
    short = [t for t in timings if len(t.item.prompt_token_ids) <= bound]
    return short if len(short) < len(timings) else []


def online_table(results: Sequence[dict[str, object]]) -> str:
    """Latencies in milliseconds per repetition, and what was sent."""
    rows: list[list[Cell]] = []
    for result in results:
        for name, label in (("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT"), ("e2e", "E2E"), ("itl_short", "ITL*")):
            values = [result.get(f"{name}_p{percent}_s") for percent in PERCENTS]
            if name != "itl_short" or "short_requests" in result:
                rows.append([f"{result['rep']}", f"{label} ms", *(_milliseconds(value) for value in values)])
    table = format_table(("rep", "", *(f"p{percent}" for percent in PERCENTS)), rows)
    lines = [
        f"rep {r['rep']}: {r['num_requests']} requests, {r['errors']} errors, {r['output_tokens']} tokens in "
        f"{r['duration_s']} s, {r['output_tokens_per_s']} tokens/s, {_known(r['num_preemptions'])} preemptions"
        for r in results
    ]
    note = ["* of the requests with short prompts"] if any("short_requests" in r for r in results) else []
    return "\n".join([table, *note, *lines])


def _milliseconds(value: object) -> float | None:
    return value * 1000 if isinstance(value, float) else None


def _known(value: object) -> str:
    return "an unknown number of" if value is None else str(value)
