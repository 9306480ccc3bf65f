"""Sends a workload over HTTP and notes when each token came.

One streaming `/v1/completions` per request, at its arrival time, with token ids as the prompt; any server that speaks
OpenAI's API will do. Times are seconds of this process's monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httpx

from engine.bench.workloads import Item, Workload

TIMEOUT = httpx.Timeout(None, connect=30.0)


@dataclass(slots=True)
class Timing:
    """What happened to one request."""

    item: Item
    sent_at: float = 0.0
    token_times: list[float] = field(default_factory=list)  # when each piece of output came
    ended_at: float = 0.0
    num_output_tokens: int = 0  # by the server's own count
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Sent to the first piece of output."""
        return self.token_times[0] - self.sent_at

    @property
    def e2e_s(self) -> float:
        """Sent to the end of the stream."""
        return self.ended_at - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Time between neighbouring pieces of output: the inter-token latencies."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Target:
    """A server under measurement."""

    base_url: str  # without /v1
    model: str
    api_key: str | None = field(default=None, repr=False)

    def client(self) -> httpx.AsyncClient:
        """A client with as many connections as requests."""
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            base_url=self.base_url, headers=headers, timeout=TIMEOUT, limits=limits, trust_env=False
        )


async def send_workload(target: Target, workload: Workload) -> list[Timing]:
    """Send every request at its time and wait for the last; in the order of the workload."""
    async with target.client() as client:
        start = time.perf_counter()
        return await asyncio.gather(*(_send_at(client, target.model, item, start) for item in workload.items))


async def _send_at(client: httpx.AsyncClient, model: str, item: Item, start: float) -> Timing:
    delay = start + item.arrival_s - time.perf_counter()
    if delay > 0:
        await asyncio.sleep(delay)
    timing = Timing(item)
    timing.sent_at = time.perf_counter()
    try:
        await _stream(client, model, timing)
    except (httpx.HTTPError, ValueError) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.ended_at = time.perf_counter()
    if timing.error is None and timing.num_output_tokens != item.max_tokens:
        timing.error = f"produced {timing.num_output_tokens} tokens instead of {item.max_tokens}"
    return timing


async def _stream(client: httpx.AsyncClient, model: str, timing: Timing) -> None:
    body = {
        "model": model,
        "prompt": list(timing.item.prompt_token_ids),
        "max_tokens": timing.item.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode(errors="replace")
            timing.error = f"HTTP {response.status_code}: {text[:300]}"
            return
        async for data in _events(response):
            now = time.perf_counter()
            if "error" in data:
                timing.error = f"in the stream: {data['error']}"
            elif data.get("choices"):
                timing.token_times.append(now)
            usage = data.get("usage")
            if isinstance(usage, dict):
                timing.num_output_tokens = int(usage["completion_tokens"])
    if not timing.token_times and timing.error is None:
        timing.error = "the stream ended without output"


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, object]]:
    """The JSON objects of a server-sent event stream, up to [DONE]."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                value = json.loads(data)
                if not isinstance(value, dict):
                    raise ValueError(f"an event that is no object: {data[:100]!r}")
                yield value


async def find_model(base_url: str, api_key: str | None) -> tuple[str, str]:
    """The first model that the server offers, and who it says owns it.

    Raises:
        httpx.HTTPError, ValueError: no server, or not one that speaks this API.
    """
    async with Target(base_url, "", api_key).client() as client:
        response = (await client.get("/v1/models")).raise_for_status()
        models = response.json()["data"]
        if not models:
            raise ValueError(f"{base_url}/v1/models lists no model")
        return str(models[0]["id"]), str(models[0].get("owned_by", "unknown"))


async def count_preemptions(target: Target) -> int | None:
    """`vllm:num_preemptions_total` of `/metrics`; None where there is no such number."""
    async with target.client() as client:
        response = await client.get("/metrics")
    if response.status_code != 200:
        return None
    return parse_counter(response.text.splitlines(), "vllm:num_preemptions_total")


def parse_counter(lines: Sequence[str], name: str) -> int | None:
    """The sum over the labels of a counter in the text format."""
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    return int(sum(values)) if values else None


async def reset_prefix_cache(target: Target) -> bool:
    """Empty the server's prefix cache; False if it offers no way to."""
    async with target.client() as client:
        for path in ("/admin/api/prefix-cache/reset", "/reset_prefix_cache"):
            response = await client.post(path)
            if response.is_success:
                return True
    return False
