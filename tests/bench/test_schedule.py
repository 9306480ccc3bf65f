"""The dry run: traces are read, everything ends, nothing leaks, and the ledger's sums are the loops they replace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from engine.bench.schedule import DryRun, bench_schedule, weighted_percentile
from engine.bench.traces import TracedRequest, read_trace
from engine.bench.waste import sum_of_ceilings, waste_ledger
from engine.bench.workloads import WorkloadError
from engine.core.limits import Limits

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:47.1805900,396,109
2023-11-16 18:15:47.1805900,17,0
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 2500, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 3]},
]


def dry_run(requests: list[TracedRequest], **options: object) -> DryRun:
    limits = Limits(**{"max_num_seqs": 8, "max_num_queued_reqs": 10_000, **options.pop("limits", {})})  # type: ignore[arg-type,dict-item]
    run = DryRun(requests, limits, **{"num_blocks": 200, **options})  # type: ignore[arg-type]
    run.run()
    run.scheduler.check_invariants()
    assert run.scheduler.pool.num_in_use == 0
    return run


def test_azure_traces_are_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    assert [(r.arrival_s, r.num_prompt_tokens, r.num_output_tokens) for r in read_trace(path)] == [
        (0.0, 374, 44), (0.5, 396, 109), (0.5, 17, 1),
    ]  # fmt: skip


def test_mooncake_prefixes_are_hit_without_any_token(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    run = dry_run(read_trace(path))
    assert run.finished == {"length": 2}
    assert run.output_tokens == 25
    assert run.cached_tokens == 2 * 512
    assert dry_run(read_trace(path), enable_prefix_caching=False).cached_tokens == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "holds no request"), ("a,b\n1,2\n", "request 1"), ('{"timestamp": 1}\n', "request 1"), ("\x00", "holds no")],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_trace(path)


def test_too_small_a_pool_preempts_and_still_ends_everything() -> None:
    requests = [TracedRequest(0.0, 100, 200) for _ in range(20)]
    run = dry_run(requests, num_blocks=40, limits={"watermark": 0.0})
    assert run.finished == {"length": 20}
    assert run.num_preemptions > 0
    assert run.output_tokens == 4000
    kept = dry_run(requests, num_blocks=40, limits={"watermark": 0.2})
    assert kept.num_preemptions < run.num_preemptions


def test_a_request_that_cannot_fit_is_refused_and_the_queue_goes_on() -> None:
    run = dry_run([TracedRequest(0.0, 5000, 10), TracedRequest(0.0, 50, 10)])
    assert run.num_refused == 1
    assert run.finished == {"length": 1}


def test_the_simulated_clock_is_the_cost_of_the_steps() -> None:
    run = dry_run([TracedRequest(0.0, 10, 3)], step_cost_s=1.0, token_cost_s=0.5)
    # one step of 10 tokens, two of 1
    assert run.now == pytest.approx(3 * 1.0 + 12 * 0.5)
    assert run.ttft_s == [pytest.approx(6.0)]


@pytest.mark.parametrize(("start", "count", "size"), [(1, 1, 16), (15, 40, 16), (16, 1, 16), (100, 333, 8)])
def test_the_sum_of_ceilings_is_the_loop(start: int, count: int, size: int) -> None:
    assert sum_of_ceilings(start, count, size) == sum(-(-(start + i) // size) for i in range(count))


def test_the_ledger_orders_the_rules_as_the_paper_does() -> None:
    shares = waste_ledger([(161, 338), (20, 500)], max_model_len=2048, block_size=16).shares()
    assert shares["max"] < shares["pow2"] < shares["oracle"] < shares["paged"] <= 100


def test_the_bench_prints_one_line_of_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    status = bench_schedule(
        str(path), Limits(), num_blocks=100, block_size=16, max_model_len=2048, enable_prefix_caching=True,
        step_cost_s=0.01, token_cost_s=0.0001,
    )  # fmt: skip
    line = json.loads(capsys.readouterr().out)
    assert status == 0
    assert (line["num_requests"], line["output_tokens"], line["finished"]) == (3, 154, {"length": 3})


def test_a_weighted_percentile_is_that_of_the_list() -> None:
    from collections import Counter

    counts = Counter({1.0: 98, 5.0: 1, 9.0: 1})
    assert [weighted_percentile(counts, p) for p in (50, 98, 99, 100)] == [1.0, 1.0, 5.0, 9.0]
    assert weighted_percentile(Counter(), 50) is None
