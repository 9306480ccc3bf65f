"""In float32 the engine's greedy tokens are those of transformers, whatever happens to a request on the way.

The matrix: models (the embedded one; tiny random ones with odd head sizes) by what happens (alone, batched, in chunks
of any budget, on a prefix hit, copied on write, preempted once and many times, streamed through the engine's thread).

transformers sees each prompt with the engine's answer behind it in one forward pass: if its most likely token at every
position is the engine's, greedy generation gives the same tokens (by induction over the positions).
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.core.limits import Limits
from engine.engine import Engine
from engine.request_stream import RequestStream
from engine.runner.executor import load_runner
from engine.runner.model_runner import ModelRunner
from engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from kernels.cpu import native_library
from tests.helpers.checkpoints import save_hf, tiny_model
from tests.helpers.engines import Recorder, make_request
from tests.helpers.oracle import load_oracle
from tests.helpers.tokenizers import VOCAB_SIZE, byte_tokenizer

NUM_OUTPUT_TOKENS = 16
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 90, 130, 200)
WORDS = ("the", "engine", "shares", "blocks", "of", "keys", "and", "values", "between", "every", "request", "12")

# Heads that are no power of two, one KV head for all, a KV head each, a head that isn't hidden_size / num_heads.
TINY: dict[str, dict[str, Any]] = {
    "llama: 6 heads of 20, 2 KV": {"kind": "llama"},
    "llama: 7 heads of 6, 1 KV": {
        "kind": "llama", "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 6, "hidden_size": 42,
    },
    "llama: 3 heads of 40, 3 KV": {
        "kind": "llama", "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 40, "hidden_size": 54,
    },
    "mistral: 8 heads of 14, 4 KV": {
        "kind": "mistral", "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 14, "sliding_window": None,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """An engine, what it is asked, and who knows the answers."""

    engine: Engine
    oracle: Any  # a transformers model
    prompts: list[list[int]]
    alone: list[list[int]]  # the engine's own answers, one request at a time
    streamed: list[tuple[list[int], str]]  # the same with their text, all at once through an engine's thread


def tiny_runner(folder: Path, backend: str, **changes: Any) -> tuple[ModelRunner, Any]:
    """A random checkpoint here and in transformers."""
    model = tiny_model(changes.pop("kind"), vocab_size=VOCAB_SIZE, max_position_embeddings=1024, **changes)
    config = EngineConfig(
        model=str(save_hf(model, folder)), dtype="float32", num_kv_blocks=256, threads=1, attention_backend=backend
    )
    return load_runner(config), model


CASES = [
    pytest.param(("smollm2", "auto"), id="smollm2", marks=[pytest.mark.model, pytest.mark.slow]),
    *(pytest.param((name, backend), id=f"{name}, {backend}") for name in TINY for backend in ("cpu", "native")),
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, backend = request.param
    rng = random.Random(0)
    if name == "smollm2":
        config = EngineConfig(dtype="float32", num_kv_blocks=256, threads=2, max_model_len=1024)
        runner, oracle = load_runner(config), load_oracle(request.getfixturevalue("model_file"))
        tokenizer = load_tokenizer(config.model)
        text = tokenizer.encode(" ".join(rng.choice(WORDS) for _ in range(400)))
        prompts = [text[3 * i : 3 * i + length] for i, length in enumerate(LENGTHS)]
    else:
        if backend == "native" and (reason := native_library.why_not()) is not None:
            pytest.skip(f"no native kernels here: {reason}")
        runner, oracle = tiny_runner(tmp_path_factory.mktemp("tiny"), backend, **TINY[name])
        tokenizer = byte_tokenizer()
        prompts = [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]
    answers = streamed(runner, tokenizer, prompts)
    engine = Engine(runner, tokenizer, Limits())
    alone, _ = run(engine, prompts, together=False)
    return Case(engine, oracle, prompts, alone, answers)


def run(
    engine: Engine, prompts: list[list[int]], *, together: bool = True, **limits: object
) -> tuple[list[list[int]], Recorder]:
    """The output tokens of each prompt, under other limits for so long."""
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


def test_alone_it_says_what_transformers_says(case: Case) -> None:
    for prompt, tokens in zip(case.prompts, case.alone, strict=True):
        with torch.no_grad():
            logits = case.oracle(torch.tensor([prompt + tokens[:-1]])).logits[0]
        assert tokens == logits[len(prompt) - 1 :].argmax(-1).tolist(), f"prompt of {len(prompt)} tokens"
    distinct = {token for tokens in case.alone for token in tokens}
    assert len(distinct) > 20, "answers that could not be wrong"


def test_batched(case: Case) -> None:
    case.engine.reset_prefix_cache()
    tokens, recorder = run(case.engine, case.prompts)
    assert tokens == case.alone
    assert max(len(r.changes.computed) for r in recorder.records) == len(case.prompts)


@pytest.mark.parametrize("budget", [1, 16, 100])
def test_in_chunks_of_any_budget(case: Case, budget: int) -> None:
    case.engine.reset_prefix_cache()
    some = slice(0, 12) if budget == 1 else slice(None)  # 560 steps are enough
    tokens, recorder = run(case.engine, case.prompts[some], max_num_batched_tokens=budget)
    assert tokens == case.alone[some]
    assert max(sum(c.num_tokens for c in r.changes.computed) for r in recorder.records) == budget


def test_with_a_prefix_hit(case: Case) -> None:
    case.engine.reset_prefix_cache()
    run(case.engine, case.prompts)
    tokens, recorder = run(case.engine, case.prompts)
    assert tokens == case.alone
    hits = [a.num_cached_tokens for r in recorder.records for a in r.changes.admitted]
    assert sorted(hits) == sorted((length - 1) // 16 * 16 for length in LENGTHS)


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_once(case: Case, caching: bool) -> None:
    """After a reset nothing of what was computed is found again: all of it is recomputed."""
    engine, recorder = case.engine, Recorder(case.engine)
    engine.reset_prefix_cache()
    for i, prompt in enumerate(case.prompts[10:]):
        recorder.take(engine.add(make_request(f"r{i}", prompt, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)))
    for _ in range(5):
        recorder.take(engine.step())
    recorder.take(engine.set_limits({"num_usable_blocks": 20}))
    if not caching:
        engine.reset_prefix_cache()
    engine.set_limits({"num_usable_blocks": engine.info.num_blocks})
    recorder.run()
    preempted = [p.seq_id for r in recorder.records for p in r.changes.preempted]
    assert len(preempted) == len(set(preempted)) >= 3
    recomputed = [a.num_cached_tokens for r in recorder.records for a in r.changes.admitted if a.is_resumed]
    assert (max(recomputed) > 0) == caching
    assert [recorder.tokens(f"r{i}") for i in range(10)] == case.alone[10:]


def test_preempted_many_times(case: Case) -> None:
    """A pool of 23 blocks for what needs 80: each is thrown out again and again."""
    case.engine.reset_prefix_cache()
    tokens, recorder = run(case.engine, case.prompts, num_usable_blocks=23, max_num_batched_tokens=64)
    assert tokens == case.alone
    times: dict[str, int] = {}
    engine = case.engine
    recorder = Recorder(engine)
    for i, prompt in enumerate(case.prompts):
        recorder.take(engine.add(make_request(f"r{i}", prompt, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)))
    for usable in (60, 40, 16, 60, 20, 70, 16):  # pull the pool from under what runs, again and again
        for _ in range(2):
            recorder.take(engine.step())
        recorder.take(engine.set_limits({"num_usable_blocks": usable}))
    recorder.run()
    engine.set_limits({"num_usable_blocks": engine.info.num_blocks})
    assert [recorder.tokens(f"r{i}") for i in range(len(case.prompts))] == case.alone
    for record in recorder.records:
        for preempted in record.changes.preempted:
            times[preempted.seq_id] = times.get(preempted.seq_id, 0) + 1
    assert sum(times.values()) >= 20
    assert max(times.values()) >= 3


def test_siblings_that_share_and_copy_blocks(case: Case) -> None:
    engine, recorder = case.engine, Recorder(case.engine)
    for i in (4, 7, 16):  # 8, 17 and 65 tokens: a part-filled last block, to be copied
        request = make_request(f"n{i}", case.prompts[i], n=3, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
        recorder.take(engine.add(request))
    recorder.run()
    assert sum(e.kind == "copy" for r in recorder.records for e in r.changes.blocks) == 6
    for i in (4, 7, 16):
        assert [recorder.tokens(f"n{i}", index) for index in range(3)] == [case.alone[i]] * 3


def test_streamed_from_the_engine_s_thread(case: Case) -> None:
    """The deltas of all streams, put together, are the tokens and the text of the answers."""
    assert [tokens for tokens, _ in case.streamed] == case.alone
    num_compared = 0
    for prompt, (tokens, text) in zip(case.prompts, case.streamed, strict=True):
        before, whole = (case.engine.tokenizer.decode(ids) for ids in (prompt, prompt + tokens))
        if "\ufffd" not in whole:  # random bytes are seldom text
            assert text == whole[len(before) :]
            num_compared += 1
    assert num_compared or case.engine.tokenizer.vocab_size == VOCAB_SIZE


def streamed(runner: ModelRunner, tokenizer: Tokenizer, prompts: list[list[int]]) -> list[tuple[list[int], str]]:
    """(tokens, text) of each prompt's answer, all at once through the thread of an engine that has never run."""

    async def read(stream: RequestStream) -> tuple[list[int], str]:
        deltas = [delta async for delta in stream]
        return [token for delta in deltas for token in delta.token_ids], "".join(delta.text for delta in deltas)

    async def stream_all() -> list[tuple[list[int], str]]:
        engine = AsyncEngine(Engine(runner, tokenizer, Limits()))
        await engine.start()
        try:
            requests = [
                make_request(f"s{i}", prompt, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
                for i, prompt in enumerate(prompts)
            ]
            return await asyncio.gather(*[read(await engine.submit(request)) for request in requests])
        finally:
            await engine.stop()

    answers = asyncio.run(stream_all())
    runner.reset()
    return answers
