"""Where the time of a step goes while a server streams: clients read tokens, viewers watch /engine, the GIL is shared.

`python -m app.bench.step_profile [--clients 64] [--viewers 2]`
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib

import httpx

from app.bench.client import Target, find_model, send_workload
from app.bench.server_process import running_server
from engine.bench.report import Cell, emit, format_table, say
from engine.bench.workloads import Item, Workload

PROMPT_TOKENS, OUTPUT_TOKENS, NUM_STEPS = 32, 200, 150


def main() -> int:
    """Print the medians of a step's phases, without viewers and with them, alternating."""
    parser = argparse.ArgumentParser(prog="python -m app.bench.step_profile", description=main.__doc__)
    parser.add_argument("--clients", type=int, default=64, help="Streaming requests. Default: 64.")
    parser.add_argument("--viewers", type=int, default=2, help="Readers of the engine's event stream. Default: 2.")
    parser.add_argument("--reps", type=int, default=2, help="Repetitions of each. Default: 2.")
    args = parser.parse_args()
    with running_server(["--disable-log-requests"]) as server:
        for rep in range(args.reps):
            for viewers in (0, args.viewers):
                profile = asyncio.run(profile_under_load(server.base_url, args.clients, viewers))
                say(f"rep {rep}: {args.clients} clients, {viewers} viewers, {profile['num_steps']} steps")
                say(_table(profile))
                emit({"rep": rep, "clients": args.clients, "viewers": viewers, **profile})
    return 0


async def profile_under_load(base_url: str, num_clients: int, num_viewers: int) -> dict[str, object]:
    """Stream to all clients at once and read the profile of the last steps."""
    model, _ = await find_model(base_url, None)
    target = Target(base_url, model)
    prompts = [tuple(100 + (31 * i + 7 * k) % 48_000 for k in range(PROMPT_TOKENS)) for i in range(num_clients)]
    workload = Workload("profile", tuple(Item(prompt, OUTPUT_TOKENS) for prompt in prompts))
    viewers = [asyncio.create_task(_watch(target)) for _ in range(num_viewers)]
    try:
        timings = await send_workload(target, workload)
        async with target.client() as client:
            response = (await client.get("/admin/api/phases", params={"limit": NUM_STEPS})).raise_for_status()
    finally:
        for viewer in viewers:
            viewer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await viewer
    errors = [timing.error for timing in timings if timing.error is not None]
    if errors:
        raise RuntimeError(f"{len(errors)} requests failed, the first with: {errors[0]}")
    profile: dict[str, object] = response.json()
    return profile


async def _watch(target: Target) -> None:
    async with target.client() as client, client.stream("GET", "/admin/api/events") as response:
        response.raise_for_status()
        async for _ in response.aiter_bytes():
            pass


def _table(profile: dict[str, object]) -> str:
    phases, step_ms = profile["phases"], profile["step_ms"]
    assert isinstance(phases, list)
    assert isinstance(step_ms, float)
    rows: list[tuple[Cell, ...]] = [
        (f"{phase['name']} *" if phase["is_bookkeeping"] else phase["name"], phase["ms"], 100 * phase["ms"] / step_ms)
        for phase in phases
    ]
    rows.append(("step", step_ms, 100.0))
    share = sum(phase["ms"] for phase in phases if phase["is_bookkeeping"]) / step_ms
    return format_table(("phase", "ms", "%"), rows) + f"\n* bookkeeping: {100 * share:.2f} %"


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except httpx.HTTPError as error:
        raise SystemExit(f"the server: {error or type(error).__name__}") from None
