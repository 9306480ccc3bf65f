"""What structured output costs: `python -m engine.bench.structured [--model NAME] [--num-seqs N]`.

First each spec alone: compiling it, and one mask and one accepted token on a random walk through what it allows, which
visits more states than a model would. Then the whole engine: one batch with and without structured output, and the
time that a step spends on choosing tokens. One JSON line each on stdout, a table on stderr.
"""

from __future__ import annotations

import argparse
import random
import time
from statistics import median

import numpy as np

from engine.bench.report import emit, format_table, percentile, say
from engine.bench.structured_cases import specs
from engine.config import EngineConfig
from engine.core.events import StepRecord
from engine.engine import Engine, Request
from engine.sampling_params import SamplingParams, StructuredSpec
from engine.structured.grammars import Grammars
from engine.tokenizer.tokenizer import Tokenizer, load_tokenizer

WALK_STEPS = 64
NUM_TOKENS = 32


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description="the cost of structured output")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--num-seqs", type=int, default=16)
    args = parser.parse_args()
    measure_specs(load_tokenizer(args.model))
    measure_engine(Engine.from_config(EngineConfig(model=args.model)), args.num_seqs)


def measure_specs(tokenizer: Tokenizer) -> None:
    """Each spec alone."""
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    grammars.compile(StructuredSpec("regex", "a"))  # the vocabulary's own preparation, once per process
    rows = []
    masks: list[float] = []
    for spec in specs():
        started = time.perf_counter()
        grammars.hold(spec.text, spec, None)
        compile_ms = (time.perf_counter() - started) * 1e3
        fills, accepts = walk(grammars, spec, tokenizer)
        masks += fills
        row = (compile_ms, median(fills), max(fills), median(accepts))
        rows.append((spec.kind, spec.text[:40], *row))
        names = ("compile_ms", "mask_us", "mask_us_max", "accept_us")
        emit({"kind": spec.kind, "spec": spec.text, **dict(zip(names, row, strict=True))})
    say(format_table(("kind", "spec", "compile ms", "mask µs", "mask µs max", "accept µs"), rows))
    p99 = percentile(masks, 99)
    say(f"{len(masks)} masks: median {median(masks):.0f} µs, p99 {p99:.0f} µs, max {max(masks):.0f} µs")


def walk(grammars: Grammars, spec: StructuredSpec, tokenizer: Tokenizer) -> tuple[list[float], list[float]]:
    """Microseconds of each mask and of each accepted token."""
    rng = random.Random(0)
    mask = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    matcher = grammars.matcher(spec)
    fills, accepts = [], []
    for _ in range(WALK_STEPS):
        started = time.perf_counter()
        problem = matcher.fill(mask)
        fills.append((time.perf_counter() - started) * 1e6)
        assert problem is None, problem
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token_id = int(rng.choice(allowed))
        started = time.perf_counter()
        matcher.accept((token_id,))
        accepts.append((time.perf_counter() - started) * 1e6)
        if token_id in tokenizer.eos_token_ids:
            matcher = grammars.matcher(spec)
    return fills, accepts


def measure_engine(engine: Engine, num_seqs: int) -> None:
    """One batch of `num_seqs`, free and structured, `NUM_TOKENS` each."""
    prompt = tuple(engine.tokenizer.encode("Write one JSON value:"))
    rows = []
    for name in ("free", "structured", "free", "structured"):
        for index, spec in zip(range(num_seqs), specs() * num_seqs, strict=False):
            params = SamplingParams(
                seed=index, ignore_eos=True, max_tokens=NUM_TOKENS, structured=spec if name == "structured" else None
            )
            engine.add(Request(f"{name}-{index}", prompt, params))
        steps = []
        while engine.has_work:
            record = engine.step().record
            assert isinstance(record, StepRecord)
            steps.append((dict(record.phases)["sample"] * 1e3, (record.ended_at - record.started_at) * 1e3))
        sample_ms, step_ms = (median(values) for values in zip(*steps[1:], strict=True))
        rows.append((name, num_seqs, sample_ms, step_ms))
        emit({"batch": name, "num_seqs": num_seqs, "sample_ms": sample_ms, "step_ms": step_ms})
    say(format_table(("batch", "sequences", "sample ms", "step ms"), rows))


if __name__ == "__main__":
    main()
