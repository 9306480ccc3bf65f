"""Where the time of a decode step goes: by phase on the real model, and the scheduler's part with pools of any size.

`python -m engine.bench.step_profile`; under HTTP load: `python -m app.bench.step_profile`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import asdict
from statistics import median

from engine.bench.report import Cell, emit, format_table, say
from engine.config import EngineConfig
from engine.core.batch import SampledToken
from engine.core.events import StepRecord
from engine.core.limits import Limits
from engine.core.prefix_cache import root_hash
from engine.core.profile import BOOKKEEPING, StepProfile, step_profile
from engine.core.scheduler import Scheduler
from engine.core.sequence import Sequence
from engine.engine import Engine, Request
from engine.sampling_params import SamplingParams

PROMPT_TOKENS = 32
POOL_SEQUENCES, POOL_BLOCK_SIZE = 64, 64  # fit into 100 blocks for as long as they are looked at


def main() -> int:
    """Print the profile of decode steps, then schedule and update alone for each size of the pool."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.step_profile", description=main.__doc__)
    parser.add_argument("--sequences", type=int, default=256, help="Sequences that decode. Default: 256.")
    parser.add_argument("--steps", type=int, default=50, help="Steps that are measured. Default: 50.")
    parser.add_argument("--pools", type=int, nargs="*", default=[100, 1000, 100_000], help="Numbers of blocks.")
    args = parser.parse_args()
    profile = profile_decodes(Engine.from_config(EngineConfig()), args.sequences, args.steps)
    say(f"{args.sequences} sequences decode, medians of {profile.num_steps} steps")
    say(profile_table(profile))
    emit({"sequences": args.sequences, **asdict(profile), "bookkeeping": round(profile.bookkeeping, 4)})
    for num_blocks in args.pools:
        seconds = schedule_and_update(num_blocks)
        say(f"{num_blocks:,} blocks: schedule and update of {POOL_SEQUENCES} decodes {seconds * 1e6:.0f} µs a step")
        emit({"num_blocks": num_blocks, "schedule_update_s": round(seconds, 7)})
    return 0


def profile_decodes(engine: Engine, num_sequences: int, num_steps: int) -> StepProfile:
    """Profile the steps in which `num_sequences` sequences decode, after as many as it takes to get there."""
    engine.set_limits({"max_num_seqs": num_sequences, "max_prefill_tokens_while_decoding": 0})
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + num_sequences, ignore_eos=True)
    for i in range(num_sequences):
        prompt = tuple((100 + 31 * i + 7 * k) % engine.info.vocab_size for k in range(PROMPT_TOKENS))
        engine.add(Request(f"profile-{i}", prompt, params, source="bench"))
    records: list[StepRecord] = []
    while len(records) < num_steps:
        record = engine.step().record
        if isinstance(record, StepRecord) and record.num_decode_tokens == num_sequences:
            records.append(record)
    for i in range(num_sequences):
        engine.abort(f"profile-{i}")
    return step_profile(records)


def profile_table(profile: StepProfile) -> str:
    """Phase, milliseconds and percent of the step; what is not the model's has a mark."""
    rows: list[SequenceOf[Cell]] = [
        (f"{name} *" if name in BOOKKEEPING else name, seconds * 1e3, 100 * seconds / profile.step_s)
        for name, seconds in profile.phases
    ]
    rows.append(("step", profile.step_s * 1e3, 100.0))
    return format_table(("phase", "ms", "%"), rows) + f"\n* bookkeeping: {100 * profile.bookkeeping:.2f} %"


def schedule_and_update(num_blocks: int, num_steps: int = 50) -> float:
    """Median seconds of `schedule` and `update` of a decode step, without a model."""
    limits = Limits(max_num_seqs=POOL_SEQUENCES, max_num_batched_tokens=100_000)
    scheduler = Scheduler(num_blocks, POOL_BLOCK_SIZE, 10_000, limits)
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    for i in range(POOL_SEQUENCES):
        scheduler.add(
            Sequence(
                seq_id=f"s{i}", request_id=f"s{i}", index=0, source="bench", priority=0, queue_index=i,
                arrival_time=0.0, num_prompt_tokens=8, token_ids=list(range(8)), sampling_params=params,
                max_tokens=1000, eos_token_ids=(), root_hash=root_hash(str(i)), num_pending_forks=0,
                queue_deadline=None, deadline=None,
            )
        )  # fmt: skip
    seconds = []
    for _ in range(num_steps):
        started_at = time.perf_counter()
        batch = scheduler.schedule()
        scheduled_s = time.perf_counter() - started_at
        sampled = [SampledToken(s.seq_id, 7, None) for s in batch.scheduled]
        started_at = time.perf_counter()
        scheduler.update(batch, sampled, {}, {})
        scheduler.log.take()
        seconds.append(scheduled_s + time.perf_counter() - started_at)
    return median(seconds[1:])  # the first admits


if __name__ == "__main__":
    raise SystemExit(main())
