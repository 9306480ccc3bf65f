"""A seeded storm against a running server: whatever clients and admins do, the books balance at the end.

Requests of all shapes, aborts, disconnects, timeouts, bad input, limit changes, pauses and single steps. Each client
notes what it saw; afterwards the sum of what they saw must equal what `/metrics` counted, and nothing may be in use.

    python -m tests.e2e.chaos --base-url http://127.0.0.1:8000 --requests 2000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

KINDS = (
    ("plain",) * 6
    + ("stream",) * 6
    + ("many",) * 2
    + ("disconnect",) * 3
    + ("abort",) * 3
    + ("timeout",) * 2
    + ("bad",) * 3
)
BAD_BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "x", "temperature": 9},
    {"prompt": "x", "logit_bias": {"999999": 1}},
    {"prompt": [], "max_tokens": 4},
    {"prompt": "x", "stop_token_ids": [-1]},
    {"prompt": "x", "n": 0},
    {"prompt": [1] * 9000, "max_tokens": 4},
    {"prompt": {"a": 1}},
)


@dataclass
class Books:
    """What the clients saw."""

    ends: Counter[str] = field(default_factory=Counter)  # sequences by finish reason, as far as a client saw the end
    unseen: int = 0  # sequences whose client left before their end
    output_tokens: int = 0  # of requests whose usage was seen
    refused: Counter[int] = field(default_factory=Counter)  # by status
    failures: list[str] = field(default_factory=list)  # what must not happen


class Chaos:
    """One storm.

    Args:
        base_url: the server.
        num_requests: how many requests in all.
        seed: of every choice.
        concurrency: requests at once.
    """

    def __init__(self, base_url: str, num_requests: int, seed: int, concurrency: int = 24) -> None:
        self.base_url, self.num_requests, self.concurrency = base_url, num_requests, concurrency
        self.rng = random.Random(seed)
        self.books = Books()
        self.done = 0

    async def run(self) -> tuple[Books, dict[str, float]]:
        """Weather it; returns the books and the difference of the server's counters."""
        limits = httpx.Limits(max_connections=self.concurrency + 8)
        async with httpx.AsyncClient(base_url=self.base_url, timeout=600, limits=limits) as client:
            before = await metrics(client)
            slots = asyncio.Semaphore(self.concurrency)
            admin = asyncio.create_task(self._admin(client))
            tasks = [asyncio.create_task(self._one(client, slots, i)) for i in range(self.num_requests)]
            await asyncio.gather(*tasks)
            admin.cancel()
            await asyncio.gather(admin, return_exceptions=True)
            await client.post("/admin/api/engine/resume")
            await self._until_idle(client)
            after = await metrics(client)
        return self.books, {name: after[name] - before.get(name, 0.0) for name in after}

    async def _until_idle(self, client: httpx.AsyncClient) -> None:
        """A client that left is noticed at the latest when the engine has nothing of it any more."""
        for _ in range(600):
            state = (await client.get("/admin/api/state")).json()
            if not state["running"] and not state["waiting"]:
                return
            await asyncio.sleep(0.05)
        self.books.failures.append("the engine is not idle half a minute after the last request")

    async def _one(self, client: httpx.AsyncClient, slots: asyncio.Semaphore, index: int) -> None:
        async with slots:
            kind = self.rng.choice(KINDS)
            try:
                await getattr(self, f"_{kind}")(client, index)
            except Exception as error:  # noqa: BLE001 - whatever went wrong is the finding
                self.books.failures.append(f"{kind} {index}: {type(error).__name__}: {error}")
            self.done += 1

    def _body(self, **extra: Any) -> dict[str, Any]:
        rng = self.rng
        head = [1000 + i for i in range(rng.choice([0, 16, 40]))]
        body = {
            "prompt": head + [rng.randrange(100, 40000) for _ in range(rng.randint(1, 60))],
            "max_tokens": rng.randint(1, 40), "temperature": rng.choice([0, 0, 1.0]), "ignore_eos": rng.random() < 0.7,
            "priority": rng.randint(0, 2),
        }  # fmt: skip
        return {**body, **extra}

    async def _plain(self, client: httpx.AsyncClient, index: int, **extra: Any) -> None:
        response = await client.post("/v1/completions", json=self._body(**extra))
        if response.status_code != 200:
            self._refusal(response)
            return
        answer = response.json()
        self.books.ends.update(choice["finish_reason"] for choice in answer["choices"])
        self.books.output_tokens += answer["usage"]["completion_tokens"]

    async def _many(self, client: httpx.AsyncClient, index: int) -> None:
        await self._plain(client, index, n=self.rng.randint(2, 3))

    async def _timeout(self, client: httpx.AsyncClient, index: int) -> None:
        name = self.rng.choice(["queue_timeout_s", "request_timeout_s"])
        await self._plain(client, index, **{name: self.rng.choice([0.01, 0.2, 1.0])})

    async def _bad(self, client: httpx.AsyncClient, index: int) -> None:
        response = await client.post("/v1/completions", json=self.rng.choice(BAD_BODIES))
        if response.status_code not in (400, 422) or "error" not in response.json():
            self.books.failures.append(f"bad input {index} was answered {response.status_code}: {response.text[:200]}")
        self.books.refused[response.status_code] += 1

    async def _stream(self, client: httpx.AsyncClient, index: int, leave_after: int | None = None) -> None:
        body = self._body(stream=True, stream_options={"include_usage": True})
        num_chunks, seen_end = 0, False
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                self._refusal(response)
                return
            if leave_after == 0:
                self.books.unseen += 1
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                num_chunks += 1
                if chunk.get("usage"):
                    self.books.output_tokens += chunk["usage"]["completion_tokens"]
                for choice in chunk["choices"]:
                    if choice["finish_reason"]:
                        self.books.ends[choice["finish_reason"]] += 1
                        seen_end = True
                if leave_after is not None and num_chunks >= leave_after and not seen_end:
                    self.books.unseen += 1
                    return
        if not seen_end:
            self.books.failures.append(f"stream {index} ended without a finish reason")

    async def _disconnect(self, client: httpx.AsyncClient, index: int) -> None:
        await self._stream(client, index, leave_after=self.rng.randint(0, 6))

    async def _abort(self, client: httpx.AsyncClient, index: int) -> None:
        """An admin aborts whatever is there, twice; its client sees the end as `abort`."""
        state = (await client.get("/admin/api/state")).json()
        rows = state["running"] + state["waiting"]
        if rows:
            row = self.rng.choice(rows)
            for _ in range(2):
                receipt = await client.post(f"/admin/api/requests/{row['request_id']}/abort", json={})
                if receipt.status_code != 200:
                    self.books.failures.append(f"abort was answered {receipt.status_code}: {receipt.text[:200]}")
        await self._plain(client, index)

    def _refusal(self, response: httpx.Response) -> None:
        self.books.refused[response.status_code] += 1
        if response.status_code not in (400, 503):
            self.books.failures.append(f"refused with {response.status_code}: {response.text[:200]}")

    async def _admin(self, client: httpx.AsyncClient) -> None:
        """Change limits, pause, step and resume until cancelled, once every few requests."""
        rng, seen = self.rng, -1
        while True:
            await asyncio.sleep(0.05)
            if self.done // 8 == seen:
                continue
            seen = self.done // 8
            match rng.choice(["limits", "limits", "pause", "reset"]):
                case "limits":
                    etag = (await client.get("/admin/api/limits")).headers["etag"]
                    change = rng.choice([
                        {"max_num_seqs": rng.choice([3, 8, 64])}, {"num_usable_blocks": rng.choice([12, 24, 64])},
                        {"max_num_batched_tokens": rng.choice([16, 256, 2048])}, {"watermark": rng.choice([0.0, 0.05])},
                        {"scheduling_policy": rng.choice(["fcfs", "priority"])},
                    ])  # fmt: skip
                    answer = await client.patch("/admin/api/limits", json=change, headers={"If-Match": etag})
                    if answer.status_code not in (200, 412):
                        self.books.failures.append(
                            f"PATCH limits was answered {answer.status_code}: {answer.text[:200]}"
                        )
                case "pause":
                    await client.post("/admin/api/engine/pause", json={"reason": "chaos"})
                    await client.post("/admin/api/engine/step", json={"n": rng.randint(1, 3)})
                    await client.post("/admin/api/engine/resume")
                case "reset":
                    await client.post("/admin/api/prefix-cache/reset")


async def metrics(client: httpx.AsyncClient) -> dict[str, float]:
    """{name{labels}: value}, without the labels that every metric has."""
    found = {}
    for line in (await client.get("/metrics")).text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = re.sub(r'(model_name|engine)="[^"]*",?', "", name).replace("{}", "").replace(",}", "}")
            found[name] = float(value)
    return found


def imbalances(books: Books, difference: dict[str, float], state: dict[str, Any]) -> list[str]:
    """What doesn't add up; empty when all is well."""
    problems = list(books.failures)
    ended = {
        reason: int(difference.get(f'vllm:request_success_total{{finished_reason="{reason}"}}', 0))
        for reason in ("stop", "length", "abort", "timeout", "error")
    }
    for reason in ("stop", "length", "timeout", "error"):
        # A client that left may have missed an end; nobody can have seen one that didn't happen.
        if not books.ends[reason] <= ended[reason] <= books.ends[reason] + books.unseen:
            problems.append(f"{reason}: clients saw {books.ends[reason]}, /metrics counted {ended[reason]}")
    if sum(ended.values()) != sum(books.ends.values()) + books.unseen:
        problems.append(f"{sum(ended.values())} ends counted, {sum(books.ends.values())} seen and {books.unseen} not")
    generated = difference["vllm:generation_tokens_total"]
    if generated < books.output_tokens:
        problems.append(f"clients received {books.output_tokens} tokens, {generated:.0f} were generated")
    if not books.unseen and not books.ends["abort"] and generated != books.output_tokens:
        problems.append(f"clients received {books.output_tokens} tokens of {generated:.0f}")
    kv = state["kv"]
    if kv["used"] or kv["shared"] or kv["free"] + kv["cached"] != kv["num_blocks"]:
        problems.append(f"blocks are not all free or cached: {kv}")
    if state["running"] or state["waiting"]:
        problems.append("something still runs or waits")
    return problems


def main() -> int:
    """Run a storm against a server that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    books, difference = asyncio.run(Chaos(args.base_url, args.requests, args.seed).run())
    state = httpx.get(f"{args.base_url}/admin/api/state").json()
    problems = imbalances(books, difference, state)
    print(f"ends {dict(books.ends)}, unseen {books.unseen}, refused {dict(books.refused)}")  # noqa: T201
    print(f"preemptions {difference['vllm:num_preemptions_total']:.0f}, tokens {books.output_tokens}")  # noqa: T201
    for problem in problems[:50]:
        print(f"PROBLEM: {problem}")  # noqa: T201
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
