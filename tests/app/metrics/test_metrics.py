"""/metrics: the names dashboards read, right at once, and equal to what the requests were told."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import METRICS, Histogram, Metrics
from engine.core.stats import Fold
from engine.errors import RequestError
from engine.outputs import SequenceDelta
from tests.helpers.engines import FakeClock, Recorder, make_engine, make_request
from tests.helpers.live_app import request, running_app

COMMON = {"model_name": "fake", "engine": "0"}


class Stage:
    """A synchronous engine and its metrics."""

    def __init__(self, **options: Any) -> None:
        self.clock = FakeClock()
        self.engine = make_engine(clock=self.clock, **options)
        self.recorder = Recorder(self.engine)
        self.fold = Fold(self.engine.info.num_blocks, self.engine.start_limits)
        self.metrics = Metrics(self.fold, self.engine.info, self.clock)
        self.metrics.stream_clients["engine"] = lambda: 3

    def submit(self, *args: Any, **options: Any) -> None:
        request = make_request(*args, **options)
        try:
            self.recorder.take(self.engine.add(request))
        except RequestError as error:
            self.recorder.take(self.engine.reject(request.request_id, error))

    def sync(self) -> None:
        """Fold what has been recorded since."""
        records = self.recorder.records[self.fold.seq :]
        for record in records:
            self.fold.apply(record)
        self.metrics.on_records(records)

    def run(self) -> None:
        self.recorder.run()
        self.sync()

    def samples(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        body, content_type = self.metrics.render()
        assert content_type.startswith("text/plain; version=0.0.4")
        return parsed(body.decode())

    def value(self, name: str, **labels: str) -> float:
        return self.samples()[name, key(labels)]


def key(labels: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted({**COMMON, **labels}.items()))


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture(scope="module")
def busy() -> Stage:
    """Two dozen requests through a pool that is too small for them, among them siblings, refusals and aborts."""
    stage = Stage(num_blocks=14, max_num_seqs=5, max_num_queued_reqs=20)
    for i in range(22):
        stage.submit(f"r-{i}", [1] * 33 + [i] * (i + 1), max_tokens=20 + i, n=2 if i % 5 == 0 else 1)
    for _ in range(30):
        stage.recorder.take(stage.engine.step())
    live = stage.engine.scheduler.running[0].request_id
    stage.recorder.take(stage.engine.abort(live)[1])
    stage.recorder.take(stage.engine.abort("r-19")[1])
    stage.run()
    return stage


def test_the_table_is_the_output(busy: Stage) -> None:
    families = {f.name: f for f in text_string_to_metric_families(busy.metrics.render()[0].decode())}
    assert list(families) == [row.name for row in METRICS]
    for row in METRICS:
        family = families[row.name]
        assert (family.type, family.documentation) == (row.kind, row.help)
        assert family.samples, row.name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {"model_name", "engine", *row.labels}
            assert sample.labels["model_name"] == "fake"
            assert sample.labels["engine"] == "0"


def test_the_names_of_existing_dashboards_are_there(busy: Stage) -> None:
    names = {name for name, _ in busy.samples()}
    assert names >= {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:cache_config_info",
        "vllm:num_preemptions_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_by_source_total", "vllm:prompt_tokens_recomputed_total",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:request_success_total",
        "vllm:admission_rejections_total", "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_sum", "vllm:request_time_per_output_token_seconds_count",
        "vllm:time_per_output_token_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_bucket", "vllm:request_inference_time_seconds_bucket",
        "vllm:request_prefill_time_seconds_bucket", "vllm:request_decode_time_seconds_bucket",
        "vllm:iteration_tokens_total_bucket", "vllm:request_prompt_tokens_bucket",
        "vllm:request_generation_tokens_bucket", "vllm:request_max_num_generation_tokens_bucket",
        "vllm:request_num_preemptions_bucket", "vllm:request_params_n_bucket", "vllm:request_params_max_tokens_bucket",
    }  # fmt: skip
    assert not [name for name in names if name.endswith("_created")]


def test_counters_reconcile_with_what_the_requests_were_told(busy: Stage) -> None:
    ends: list[SequenceDelta] = [d for d in busy.recorder.deltas if d.finish_reason is not None]
    reasons = Counter(d.finish_reason for d in ends)
    generated = sum(len(d.token_ids) for d in busy.recorder.deltas)
    admitted = {a.seq_id for r in busy.recorder.records for a in r.changes.admitted}
    prompts = {a.seq_id: a.num_prompt_tokens for r in busy.recorder.records for a in r.changes.added}
    assert busy.value("vllm:generation_tokens_total") == generated
    assert busy.value("vllm:prompt_tokens_total") == sum(prompts.get(seq_id, 0) for seq_id in admitted)
    assert busy.value("vllm:request_generation_tokens_sum") == generated
    assert busy.value("vllm:request_success_total", finished_reason="length") == reasons["length"]
    assert busy.value("vllm:request_success_total", finished_reason="stop") == 0
    preempted = sum(len(r.changes.preempted) for r in busy.recorder.records)
    assert busy.value("vllm:num_preemptions_total") == preempted > 0
    assert busy.value("vllm:request_num_preemptions_sum") == preempted
    assert busy.value("vllm:admission_rejections_total", reason="queue_full") == 2
    hits = busy.value("vllm:prompt_tokens_by_source_total", source="local_cache_hit")
    computed = busy.value("vllm:prompt_tokens_by_source_total", source="local_compute")
    assert hits == busy.value("vllm:prompt_tokens_cached_total") > 0
    assert hits + computed == busy.value("vllm:prompt_tokens_total")


def test_what_is_counted_per_request_is_counted_once_for_siblings(busy: Stage) -> None:
    accepted = sum(len(r.changes.added) for r in busy.recorder.records)
    assert busy.value("vllm:request_params_n_count") == accepted
    assert busy.value("vllm:request_prompt_tokens_count") == accepted
    assert busy.value("vllm:request_max_num_generation_tokens_count") == accepted
    most: dict[str, int] = {}
    for request_id, index in {(d.request_id, d.index) for d in busy.recorder.deltas}:
        tokens = len(busy.recorder.tokens(request_id, index))
        most[request_id] = max(most.get(request_id, 0), tokens)
    assert busy.value("vllm:request_max_num_generation_tokens_sum") == sum(most.values())


def test_histograms_of_steps_and_tokens_count_each_once(busy: Stage) -> None:
    steps = [r for r in busy.recorder.records if hasattr(r, "phases")]
    computed = sum(c.num_tokens for r in steps for c in r.changes.computed)
    assert busy.value("vllm:iteration_tokens_total_count") == len(steps) == busy.value("pagedeck_steps_total")
    assert busy.value("vllm:iteration_tokens_total_sum") == computed
    assert busy.value("pagedeck_step_phase_seconds_count", phase="forward") == len(steps)
    sequences = {(d.request_id, d.index) for d in busy.recorder.deltas if d.token_ids}
    tokens = sum(len(d.token_ids) for d in busy.recorder.deltas)
    assert busy.value("vllm:time_to_first_token_seconds_count") == len(sequences)
    assert busy.value("vllm:inter_token_latency_seconds_count") == tokens - len(sequences)
    ended = [s for s in busy.samples() if s[0] == "vllm:e2e_request_latency_seconds_count"]
    assert busy.samples()[ended[0]] == sum(busy.fold.counters.finished.values())


def test_gauges_are_right_at_once_after_an_abort_while_idle_or_paused() -> None:
    stage = Stage(num_blocks=10, max_num_seqs=1)
    stage.submit("r-1", 40, max_tokens=50)
    stage.submit("r-2", 40, max_tokens=50)
    stage.recorder.take(stage.engine.step())
    stage.recorder.take(stage.engine.pause("a look"))
    stage.sync()
    assert stage.value("vllm:num_requests_running") == 1
    assert stage.value("vllm:num_requests_waiting") == 1
    assert stage.value("vllm:num_requests_waiting_by_reason", reason="deferred") == 1
    assert stage.value("vllm:num_requests_waiting_by_reason", reason="capacity") == 0
    assert stage.value("vllm:kv_cache_usage_perc") == stage.value("vllm:gpu_cache_usage_perc") == 0.3
    assert stage.value("pagedeck_blocks", state="used") == 3
    assert stage.value("pagedeck_engine_paused") == 1
    stage.recorder.take(stage.engine.abort("r-1")[1])
    stage.sync()
    assert stage.value("vllm:num_requests_running") == 0
    assert stage.value("vllm:kv_cache_usage_perc") == 0
    assert sum(stage.value("pagedeck_blocks", state=s) for s in ("free", "cached", "used", "shared")) == 10
    assert stage.value("pagedeck_stream_clients", stream="engine") == 3


def test_preempted_sequences_wait_and_have_a_gauge_of_their_own() -> None:
    stage = Stage(num_blocks=6, max_num_seqs=4)
    stage.submit("r-1", 40, max_tokens=50)
    stage.submit("r-2", 40, max_tokens=50)
    while stage.engine.scheduler.step < 30 and not stage.fold.counters.num_preemptions:
        stage.recorder.take(stage.engine.step())
        stage.sync()
    assert stage.value("pagedeck_num_requests_preempted") == 1
    assert stage.value("vllm:num_requests_waiting") == 1


def test_intervals_are_differences_of_the_engine_s_times() -> None:
    stage = Stage()
    stage.clock.tick = 0.0
    stage.submit("r-1", 4, max_tokens=3)
    for seconds in (2.0, 3.0, 5.0):
        stage.clock.now += seconds
        stage.recorder.take(stage.engine.step())
    stage.sync()
    sums = {
        "time_to_first_token": 2, "request_queue_time": 2, "request_decode_time": 8, "request_inference_time": 8,
        "e2e_request_latency": 10, "inter_token_latency": 8, "request_time_per_output_token": 4,
        "time_per_output_token": 8, "request_prefill_time": 0,
    }  # fmt: skip
    for name, seconds in sums.items():
        suffix = "_seconds_sum"
        assert stage.value(f"vllm:{name}{suffix}") == pytest.approx(seconds), name
    assert stage.value("vllm:inter_token_latency_seconds_bucket", le="5.0") == 2
    assert stage.value("vllm:inter_token_latency_seconds_bucket", le="2.5") == 0


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    histogram = Histogram((1, 2.5))
    for value in (0.5, 1, 1.5, 2.5, 9):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.5", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 14.5


def test_openmetrics_is_spoken_to_those_who_ask(busy: Stage) -> None:
    body, content_type = busy.metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    families = {f.name for f in parse_openmetrics(body.decode())}
    assert "vllm:num_preemptions" in families


def test_two_engines_in_one_process_do_not_share_metrics() -> None:
    one, other = Stage(), Stage()
    one.submit("r-1", 4, max_tokens=3)
    one.run()
    assert one.value("vllm:generation_tokens_total") == 3
    assert other.value("vllm:generation_tokens_total") == 0


def test_the_route_serves_them() -> None:
    async def test() -> None:
        async with running_app() as app:
            engine = app.state.ctx.async_engine
            stream = await engine.submit(make_request("r-1", 4, max_tokens=3))
            async for _ in stream:
                pass
            exchange = await request(app, "GET", "/metrics")
            assert exchange.status == 200
            samples = parsed(exchange.body.decode())
            assert samples["vllm:generation_tokens_total", key({})] == 3
            assert samples["vllm:num_requests_running", key({})] == 0
            assert samples["pagedeck_stream_clients", key({"stream": "chat"})] == 0

    asyncio.run(test())
