"""What `/metrics` says: one table of metrics, each with the place its value comes from.

Gauges and counters are read from the live `Fold` when they are scraped, so they are right at once after an abort and
while idle. Histograms are filled by the fold's observers. The `vllm:` names, labels and buckets are those that existing
dashboards read; what has no such name begins with `pagedeck_`. No label carries a prompt, a user or a key.

`num_requests_*` count sequences: a request with n = 2 that runs counts twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.config import ModelInfo
from engine.core.events import Finished, Record, StepRecord
from engine.core.stats import BLOCK_STATES, Fold, FoldedSequence

FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")
REJECTION_REASONS = ("queue_full", "draining", "invalid")

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
LENGTH_BUCKETS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))  # cut at max_model_len
PREEMPTION_BUCKETS = (0, 1, 2, 5, 10, 20, 50)
N_BUCKETS = (1, 2, 5, 10, 20)
STEP_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

Kind = Literal["gauge", "counter", "histogram"]
Samples = Iterable[tuple[tuple[str, ...], float]]  # (label values, value)


class Histogram:
    """Counts per bucket; a value equal to a bound is in its bucket. Not thread-safe: one loop fills and reads."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, how many are at most that), the last bound being +Inf."""
        cumulated, rows = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            cumulated += count
            rows.append(("+Inf" if bound == float("inf") else str(float(bound)), float(cumulated)))
        return rows


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of the table: exactly one of `samples` and `buckets`."""

    name: str  # a counter's without `_total`
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()  # beside model_name and engine
    samples: Callable[[Metrics], Samples] | None = None
    buckets: tuple[float, ...] = ()


def _one(read: Callable[[Metrics], float]) -> Callable[[Metrics], Samples]:
    return lambda metrics: [((), read(metrics))]


def _waiting_by_reason(metrics: Metrics) -> Samples:
    waiting, is_deferred = metrics.fold.num_waiting, metrics.fold.is_paused
    return [(("capacity",), 0 if is_deferred else waiting), (("deferred",), waiting if is_deferred else 0)]


def _by_source(metrics: Metrics) -> Samples:
    totals = metrics.fold.counters
    computed = totals.prompt_tokens - totals.prompt_tokens_cached
    return [(("local_compute",), computed), (("local_cache_hit",), totals.prompt_tokens_cached)]


def _by_key(known: Iterable[str], totals: Mapping[str, int]) -> Samples:
    return [((key,), totals.get(key, 0)) for key in dict.fromkeys((*known, *totals))]


METRICS: tuple[MetricRow, ...] = (
    MetricRow("vllm:num_requests_running", "gauge", "Sequences that run.",
              samples=_one(lambda m: len(m.fold.running))),
    MetricRow("vllm:num_requests_waiting", "gauge", "Sequences that wait, preempted ones among them.",
              samples=_one(lambda m: m.fold.num_waiting)),
    MetricRow("vllm:num_requests_waiting_by_reason", "gauge",
              "Sequences that wait: capacity = for slots, tokens or blocks; deferred = because the engine is paused.",
              ("reason",), samples=_waiting_by_reason),
    MetricRow("vllm:kv_cache_usage_perc", "gauge", "Used and shared blocks over all blocks, 0 to 1.",
              samples=_one(lambda m: m.fold.kv_usage)),
    MetricRow("vllm:gpu_cache_usage_perc", "gauge", "The same as kv_cache_usage_perc, for older dashboards.",
              samples=_one(lambda m: m.fold.kv_usage)),
    MetricRow("vllm:cache_config_info", "gauge", "How the KV cache is configured; the value is 1.",
              ("block_size", "num_gpu_blocks", "num_usable_blocks", "cache_dtype", "enable_prefix_caching"),
              samples=lambda m: [(m.cache_config(), 1)]),
    MetricRow("vllm:num_preemptions", "counter", "Times a running sequence lost its blocks.",
              samples=_one(lambda m: m.fold.counters.num_preemptions)),
    MetricRow("vllm:prompt_tokens", "counter", "Prompt tokens, once per request, at its first admission.",
              samples=_one(lambda m: m.fold.counters.prompt_tokens)),
    MetricRow("vllm:generation_tokens", "counter", "Tokens generated.",
              samples=_one(lambda m: m.fold.counters.generation_tokens)),
    MetricRow("vllm:prompt_tokens_cached", "counter", "Prompt tokens taken from the prefix cache.",
              samples=_one(lambda m: m.fold.counters.prompt_tokens_cached)),
    MetricRow("vllm:prompt_tokens_by_source", "counter", "Prompt tokens by where their keys and values came from.",
              ("source",), samples=_by_source),
    MetricRow("vllm:prompt_tokens_recomputed", "counter", "Tokens computed again after preemptions.",
              samples=_one(lambda m: m.fold.counters.prompt_tokens_recomputed)),
    MetricRow("vllm:prefix_cache_queries", "counter", "Tokens looked up in the prefix cache.",
              samples=_one(lambda m: m.fold.counters.prefix_cache_queries)),
    MetricRow("vllm:prefix_cache_hits", "counter", "Tokens found in the prefix cache.",
              samples=_one(lambda m: m.fold.counters.prefix_cache_hits)),
    MetricRow("vllm:request_success", "counter", "Sequences that ended, by how.", ("finished_reason",),
              samples=lambda m: _by_key(FINISH_REASONS, m.fold.counters.finished)),
    MetricRow("vllm:admission_rejections", "counter", "Requests that the engine refused, by why.", ("reason",),
              samples=lambda m: _by_key(REJECTION_REASONS, m.fold.counters.rejected)),
    MetricRow("vllm:time_to_first_token_seconds", "histogram", "Arrival to first token.", buckets=TTFT_BUCKETS),
    MetricRow("vllm:inter_token_latency_seconds", "histogram", "Gap between two tokens of a sequence.",
              buckets=TOKEN_BUCKETS),
    MetricRow("vllm:request_time_per_output_token_seconds", "histogram",
              "Decode time over the tokens after the first, per sequence.", buckets=TOKEN_BUCKETS),
    MetricRow("vllm:time_per_output_token_seconds", "histogram",
              "The same as inter_token_latency_seconds, for older dashboards.", buckets=TOKEN_BUCKETS),
    MetricRow("vllm:e2e_request_latency_seconds", "histogram", "Arrival to the end.", buckets=REQUEST_BUCKETS),
    MetricRow("vllm:request_queue_time_seconds", "histogram", "Arrival to first scheduled.", buckets=REQUEST_BUCKETS),
    MetricRow("vllm:request_inference_time_seconds", "histogram", "First scheduled to last token.",
              buckets=REQUEST_BUCKETS),
    MetricRow("vllm:request_prefill_time_seconds", "histogram", "First scheduled to first token.",
              buckets=REQUEST_BUCKETS),
    MetricRow("vllm:request_decode_time_seconds", "histogram", "First to last token.", buckets=REQUEST_BUCKETS),
    MetricRow("vllm:iteration_tokens_total", "histogram", "Tokens computed per step.", buckets=ITERATION_BUCKETS),
    MetricRow("vllm:request_prompt_tokens", "histogram", "Prompt tokens per request.", buckets=LENGTH_BUCKETS),
    MetricRow("vllm:request_generation_tokens", "histogram", "Tokens generated per sequence.", buckets=LENGTH_BUCKETS),
    MetricRow("vllm:request_max_num_generation_tokens", "histogram",
              "Tokens generated by the longest sequence of a request.", buckets=LENGTH_BUCKETS),
    MetricRow("vllm:request_num_preemptions", "histogram", "Preemptions per sequence.", buckets=PREEMPTION_BUCKETS),
    MetricRow("vllm:request_params_n", "histogram", "The n of each request.", buckets=N_BUCKETS),
    MetricRow("vllm:request_params_max_tokens", "histogram", "The max_tokens of each request.", buckets=LENGTH_BUCKETS),
    MetricRow("pagedeck_num_requests_preempted", "gauge", "Sequences that wait since they were preempted.",
              samples=_one(lambda m: sum(s.status == "PREEMPTED" for s in m.fold.sequences.values()))),
    MetricRow("pagedeck_blocks", "gauge", "KV blocks by state; the four add up to all blocks.", ("state",),
              samples=lambda m: [((state,), m.fold.block_counts[state]) for state in BLOCK_STATES]),
    MetricRow("pagedeck_usable_blocks", "gauge", "KV blocks that sequences may hold.",
              samples=_one(lambda m: m.fold.limits.num_usable_blocks)),
    MetricRow("pagedeck_steps", "counter", "Steps executed.", samples=_one(lambda m: m.fold.step)),
    MetricRow("pagedeck_step_duration_seconds", "histogram", "Duration of a step.", buckets=STEP_BUCKETS),
    MetricRow("pagedeck_step_phase_seconds", "histogram", "Duration of each phase of a step.", ("phase",),
              buckets=STEP_BUCKETS),
    MetricRow("pagedeck_stream_clients", "gauge", "Open streams: engine = the console's, chat = browsers of the chat.",
              ("stream",), samples=lambda m: [((name,), read()) for name, read in m.stream_clients.items()]),
    MetricRow("pagedeck_engine_paused", "gauge", "1 while the engine is paused.",
              samples=_one(lambda m: float(m.fold.is_paused))),
    MetricRow("pagedeck_engine_draining", "gauge", "1 while no new requests are taken.",
              samples=_one(lambda m: float(m.fold.is_draining))),
    MetricRow("pagedeck_engine_dead", "gauge", "1 after a step failed.",
              samples=_one(lambda m: float(m.fold.dead_reason is not None))),
    MetricRow("pagedeck_uptime_seconds", "gauge", "Seconds since the start.", samples=_one(lambda m: m.uptime_s())),
)  # fmt: skip


class Metrics(Collector):
    """The metrics of one engine, in a registry of their own.

    Args:
        fold: the live state; this adds observers to it.
        info: the model that is served.
        engine_now: the engine's clock.
        enable_prefix_caching: for cache_config_info.
    """

    fold: Fold
    stream_clients: dict[str, Callable[[], int]]  # stream -> how many clients it has

    def __init__(
        self, fold: Fold, info: ModelInfo, engine_now: Callable[[], float], *, enable_prefix_caching: bool = True
    ) -> None:
        self.fold = fold
        self.stream_clients = {}
        self.registry = CollectorRegistry()
        self._info = info
        self._engine_now = engine_now
        self._started_at = engine_now()
        self._enable_prefix_caching = enable_prefix_caching
        self._histograms: dict[tuple[str, tuple[str, ...]], Histogram] = {}
        self._open: dict[str, int] = {}  # request with n > 1 that has begun -> most tokens of a sequence that ended
        for metric in METRICS:
            if metric.kind == "histogram" and not metric.labels:
                self._histogram(metric)
        fold.on_first_scheduled.append(self._on_first_scheduled)
        fold.on_token.append(self._on_token)
        fold.on_finished.append(self._on_finished)
        self.registry.register(self)

    # ---- out -------------------------------------------------------------------------------------------------------

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """(body, content type) for a scraper that accepts `accept`."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def collect(self) -> Iterator[Metric]:
        """All metrics as they are now, in the order of the table."""
        common = [self._info.name, "0"]
        for metric in METRICS:
            labels = ["model_name", "engine", *metric.labels]
            if metric.samples is None:
                family = HistogramMetricFamily(metric.name, metric.help, labels=labels)
                for (name, values), histogram in self._histograms.items():
                    if name == metric.name:
                        family.add_metric([*common, *values], histogram.buckets(), histogram.total)
                yield family
                continue
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            simple = kind(metric.name, metric.help, labels=labels)
            for values, value in metric.samples(self):
                simple.add_metric([*common, *values], value)
            yield simple

    def cache_config(self) -> tuple[str, ...]:
        """Label values of cache_config_info."""
        info = self._info
        return (
            str(info.block_size), str(info.num_blocks), str(self.fold.limits.num_usable_blocks), info.kv_cache_dtype,
            str(self._enable_prefix_caching),
        )  # fmt: skip

    def uptime_s(self) -> float:
        """Seconds since this was made."""
        return self._engine_now() - self._started_at

    # ---- in --------------------------------------------------------------------------------------------------------

    def on_records(self, records: Sequence[Record]) -> None:
        """Take the durations of steps; what happened to sequences comes through the fold's observers."""
        for record in records:
            if not isinstance(record, StepRecord):
                continue
            self._observe("vllm:iteration_tokens_total", sum(c.num_tokens for c in record.changes.computed))
            self._observe("pagedeck_step_duration_seconds", record.ended_at - record.started_at)
            for phase, seconds in record.phases:
                self._observe("pagedeck_step_phase_seconds", seconds, phase)

    def _on_first_scheduled(self, sequence: FoldedSequence, record: Record) -> None:
        assert sequence.first_scheduled_time is not None
        self._observe("vllm:request_queue_time_seconds", sequence.first_scheduled_time - sequence.arrival_time)
        if sequence.n > 1:
            self._open[sequence.request_id] = 0

    def _on_token(self, sequence: FoldedSequence, record: Record) -> None:
        assert isinstance(record, StepRecord)
        if sequence.last_token_time is None:
            self._observe("vllm:time_to_first_token_seconds", record.ended_at - sequence.arrival_time)
        else:
            gap = record.ended_at - sequence.last_token_time
            self._observe("vllm:inter_token_latency_seconds", gap)
            self._observe("vllm:time_per_output_token_seconds", gap)

    def _on_finished(self, sequence: FoldedSequence, finished: Finished, record: Record) -> None:
        stats = sequence.stats(record)
        self._observe("vllm:e2e_request_latency_seconds", stats.e2e_s)
        self._observe("vllm:request_generation_tokens", stats.num_output_tokens)
        self._observe("vllm:request_num_preemptions", stats.num_preemptions)
        if stats.prefill_s is not None and stats.decode_s is not None:
            self._observe("vllm:request_prefill_time_seconds", stats.prefill_s)
            self._observe("vllm:request_decode_time_seconds", stats.decode_s)
            self._observe("vllm:request_inference_time_seconds", stats.prefill_s + stats.decode_s)
            if stats.num_output_tokens > 1:
                per_token = stats.decode_s / (stats.num_output_tokens - 1)
                self._observe("vllm:request_time_per_output_token_seconds", per_token)
        self._finish_request(sequence)

    def _finish_request(self, sequence: FoldedSequence) -> None:
        """Observe what is counted once per request: at the end of the last of its sequences."""
        request_id, num_tokens = sequence.request_id, sequence.num_output_tokens
        if sequence.index == 0:  # the parent knows the parameters, and always ends
            self._observe("vllm:request_prompt_tokens", sequence.num_prompt_tokens)
            self._observe("vllm:request_params_n", sequence.n)
            self._observe("vllm:request_params_max_tokens", sequence.max_tokens)
        if request_id in self._open:
            num_tokens = self._open[request_id] = max(self._open[request_id], num_tokens)
            if any(s.request_id == request_id for s in self.fold.sequences.values()):
                return
            del self._open[request_id]
        self._observe("vllm:request_max_num_generation_tokens", num_tokens)

    def _observe(self, name: str, value: float, *labels: str) -> None:
        histogram = self._histograms.get((name, labels))
        if histogram is None:
            histogram = self._histogram(_ROWS[name], *labels)
        histogram.observe(value)

    def _histogram(self, metric: MetricRow, *labels: str) -> Histogram:
        bounds = metric.buckets
        if bounds is LENGTH_BUCKETS:
            bounds = tuple(b for b in bounds if b <= self._info.max_model_len)
        histogram = self._histograms[(metric.name, labels)] = Histogram(bounds)
        return histogram


_ROWS: dict[str, MetricRow] = {metric.name: metric for metric in METRICS}
