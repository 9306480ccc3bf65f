"""In float32 the engine's greedy tokens are those of transformers, whatever happens to a request on the way.

transformers sees each prompt with the engine's answer behind it in one forward pass: if its most likely token at every
position is the engine's, greedy generation gives the same tokens (by induction over the positions).
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.core.limits import Limits
from engine.engine import Engine
from tests.helpers.engines import Recorder, make_request
from tests.helpers.oracle import load_oracle

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_OUTPUT_TOKENS = 16
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 90, 130, 200)
WORDS = ("the", "engine", "shares", "blocks", "of", "keys", "and", "values", "between", "every", "request", "12")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_config(
        EngineConfig(dtype="float32", num_kv_blocks=256, threads=2, max_model_len=1024, limits=Limits())
    )


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    """Twenty prompts of text, each of another length."""
    rng = random.Random(0)
    text = " ".join(rng.choice(WORDS) for _ in range(400))
    token_ids = engine.tokenizer.encode(text)
    return [token_ids[3 * i : 3 * i + length] for i, length in enumerate(LENGTHS)]


def run(
    engine: Engine, prompts: list[list[int]], *, together: bool, **limits: object
) -> tuple[list[list[int]], Recorder]:
    """The output tokens of each prompt."""
    recorder = Recorder(engine)
    start = {name: getattr(engine.start_limits, name) for name in limits}
    recorder.take(engine.set_limits({**limits, "watermark": 0.0}))
    for i, prompt in enumerate(prompts):
        recorder.take(engine.add(make_request(f"r{i}", prompt, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)))
        if not together:
            recorder.run()
    recorder.run()
    engine.scheduler.check_invariants()
    if start:
        engine.set_limits(start)
    return [recorder.tokens(f"r{i}") for i in range(len(prompts))], recorder


@pytest.fixture(scope="module")
def alone(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    engine.reset_prefix_cache()
    tokens, _ = run(engine, prompts, together=False)
    return tokens


def test_alone_it_says_what_transformers_says(
    model_file: Path, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    import torch

    oracle = load_oracle(model_file)

    for prompt, tokens in zip(prompts, alone, strict=True):
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + tokens[:-1]])).logits[0]
        assert tokens == logits[len(prompt) - 1 :].argmax(-1).tolist(), f"prompt of {len(prompt)} tokens"


def test_batched(engine: Engine, prompts: list[list[int]], alone: list[list[int]]) -> None:
    engine.reset_prefix_cache()
    tokens, recorder = run(engine, prompts, together=True)
    assert tokens == alone
    assert max(len(r.changes.computed) for r in recorder.records) == len(prompts)


def test_chunked(engine: Engine, prompts: list[list[int]], alone: list[list[int]]) -> None:
    engine.reset_prefix_cache()
    tokens, recorder = run(engine, prompts, together=True, max_num_batched_tokens=32)
    assert tokens == alone
    assert max(sum(c.num_tokens for c in r.changes.computed) for r in recorder.records) == 32


def test_with_a_prefix_hit(engine: Engine, prompts: list[list[int]], alone: list[list[int]]) -> None:
    engine.reset_prefix_cache()
    run(engine, prompts, together=True)
    tokens, recorder = run(engine, prompts, together=True)
    assert tokens == alone
    hits = [a.num_cached_tokens for r in recorder.records for a in r.changes.admitted]
    assert sorted(hits) == sorted((length - 1) // 16 * 16 for length in LENGTHS)


def test_with_forced_preemption(engine: Engine, prompts: list[list[int]], alone: list[list[int]]) -> None:
    engine.reset_prefix_cache()
    recorder = Recorder(engine)
    for i, prompt in enumerate(prompts):
        recorder.take(engine.add(make_request(f"r{i}", prompt, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)))
    for usable in (60, 40, 16):  # pull the pool from under what runs, three times
        for _ in range(3):
            recorder.take(engine.step())
        recorder.take(engine.set_limits({"num_usable_blocks": usable}))
    recorder.run()
    engine.set_limits({"num_usable_blocks": engine.info.num_blocks})
    assert [recorder.tokens(f"r{i}") for i in range(len(prompts))] == alone
    assert sum(len(r.changes.preempted) for r in recorder.records) >= 10


def test_siblings_that_share_and_copy_blocks(engine: Engine, prompts: list[list[int]], alone: list[list[int]]) -> None:
    recorder = Recorder(engine)
    for i in (4, 7, 16):  # 8, 17 and 65 tokens: a part-filled last block, to be copied
        recorder.take(engine.add(make_request(f"n{i}", prompts[i], n=3, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)))
    recorder.run()
    assert sum(e.kind == "copy" for r in recorder.records for e in r.changes.blocks) == 6
    for i in (4, 7, 16):
        assert [recorder.tokens(f"n{i}", index) for index in range(3)] == [alone[i]] * 3
