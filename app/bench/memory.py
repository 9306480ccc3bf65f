"""Whether a server's memory stays flat: thousands of short requests, and its resident memory after each thousand.

`python -m app.bench.memory [--requests 10000]`; Linux only, it reads /proc. The KV pool takes its memory from the
system as its blocks are first written, so the server gets a pool that the first thousand requests have been all over.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx

from app.bench.client import Target, find_model
from app.bench.server_process import running_server
from engine.bench.report import emit, say

PROMPT_TOKENS, OUTPUT_TOKENS, CONCURRENCY, WARM_UP = 4, 2, 64, 1000
NUM_BLOCKS = 512


def main() -> int:
    """Print resident MiB after each thousand requests; 1 if it grew by more than --tolerance after the first."""
    parser = argparse.ArgumentParser(prog="python -m app.bench.memory", description=main.__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="Default: 10,000.")
    parser.add_argument("--tolerance", type=float, default=0.02, help="Growth that is allowed. Default: 0.02 = 2 %%.")
    args = parser.parse_args()
    with running_server([f"--num-kv-blocks={NUM_BLOCKS}", "--disable-log-requests", "--log-level=warning"]) as server:
        sizes = asyncio.run(_measure(server.base_url, server.pid, args.requests))
    growth = sizes[-1] / sizes[0] - 1
    say(f"from {sizes[0]:.1f} to {sizes[-1]:.1f} MiB after the first {WARM_UP:,} requests: {100 * growth:+.2f} %")
    emit({"requests": args.requests, "resident_mib": sizes, "growth": round(growth, 5)})
    return 0 if growth <= args.tolerance else 1


async def _measure(base_url: str, pid: int, num_requests: int) -> list[float]:
    model, _ = await find_model(base_url, None)
    sizes = []
    async with Target(base_url, model).client() as client:
        for start in range(0, num_requests, WARM_UP):
            numbers = iter(range(start, min(start + WARM_UP, num_requests)))
            await asyncio.gather(*(_send(client, model, numbers) for _ in range(CONCURRENCY)))
            sizes.append(round(resident_mib(pid), 1))
            say(f"{start + WARM_UP:6,} requests: {sizes[-1]:.1f} MiB")
    return sizes


async def _send(client: httpx.AsyncClient, model: str, numbers: Iterator[int]) -> None:
    """One client that asks again and again, each time something else; every other answer is streamed."""
    for number in numbers:
        prompt = [100 + (number * 31 + 7 * k) % 48_000 for k in range(PROMPT_TOKENS)]
        body = {"model": model, "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "stream": number % 2 == 0}
        (await client.post("/v1/completions", json=body)).raise_for_status()


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{pid}/status has no VmRSS")


if __name__ == "__main__":
    raise SystemExit(main())
