"""Under --deterministic a request's tokens and log-probabilities are the same bits, whatever happens around it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import StartupError
from engine.runner.executor import load_runner
from kernels.cpu import native_library
from tests.helpers.checkpoints import save_hf, tiny_model
from tests.helpers.engines import Recorder, make_request
from tests.helpers.tokenizers import VOCAB_SIZE

NUM_OUTPUT_TOKENS = 12
TEXT = "A short history of the lighthouse, from fires on hills to lamps that no one has to light. " * 5
Answer = list[tuple[int, float, tuple[int, ...], tuple[float, ...]]]

needs_native = pytest.mark.skipif(
    native_library.why_not() is not None, reason=f"no native kernels here: {native_library.why_not()}"
)


def answer(recorder: Recorder, name: str) -> Answer:
    """Its tokens, and the bits of their log-probabilities and of the best five."""
    logprobs = [entry for delta in recorder.deltas if delta.request_id == name for entry in delta.logprobs or ()]
    tokens = recorder.tokens(name)
    assert len(tokens) == len(logprobs) == NUM_OUTPUT_TOKENS
    return [(t, e.logprob, e.top_token_ids, e.top_logprobs) for t, e in zip(tokens, logprobs, strict=True)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.from_config(
        EngineConfig(dtype="bfloat16", num_kv_blocks=160, max_model_len=512, threads=2, deterministic=True)
    )


def run(engine: Engine, prompt: list[int], *, crowd: int = 0, **limits: object) -> tuple[Answer, Recorder]:
    """The answer to `prompt`, with `crowd` others before it and as many after it, under other limits for so long."""
    start = {name: getattr(engine.start_limits, name) for name in limits}
    recorder = Recorder(engine)
    if limits:
        recorder.take(engine.set_limits(limits))
    rng = random.Random(1)
    others = [[100 + (997 * i + j * j) % 30_000 for j in range(rng.randint(1, 90))] for i in range(2 * crowd)]
    for i, prompt_of_other in enumerate(others[:crowd]):
        add(recorder, f"before {i}", prompt_of_other)
    add(recorder, "it", prompt)
    for i, prompt_of_other in enumerate(others[crowd:]):
        add(recorder, f"after {i}", prompt_of_other)
    recorder.run()
    if start:
        engine.set_limits(start)
    return answer(recorder, "it"), recorder


def add(recorder: Recorder, name: str, prompt: list[int]) -> None:
    request = make_request(name, prompt, max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True, logprobs=5)
    recorder.take(recorder.engine.add(request))


@needs_native
@pytest.mark.model
@pytest.mark.slow
def test_the_same_bits_alone_in_a_crowd_in_chunks_over_a_prefix_and_after_preemptions(engine: Engine) -> None:
    prompt = engine.tokenizer.encode(TEXT)[:77]
    alone, _ = run(engine, prompt)
    assert engine.info.attention_backend.endswith("the same bits in any batch)")
    assert len({token for token, *_ in alone}) > NUM_OUTPUT_TOKENS // 2, "an answer that could not be wrong"

    hit, recorder = run(engine, prompt)
    assert [a.num_cached_tokens for r in recorder.records for a in r.changes.admitted] == [64]
    assert hit == alone

    for budget in (1, 16, 50):
        engine.reset_prefix_cache()
        chunked, _ = run(engine, prompt, max_num_batched_tokens=budget)
        assert chunked == alone, f"in chunks of {budget}"

    engine.reset_prefix_cache()
    crowded, _ = run(engine, prompt, crowd=10)
    assert crowded == alone

    engine.reset_prefix_cache()
    preempted, recorder = run(engine, prompt, crowd=3, num_usable_blocks=14, watermark=0.0)
    assert "it" in {p.seq_id for r in recorder.records for p in r.changes.preempted}
    assert preempted == alone


def tiny_config(tmp_path: Path, **changes: object) -> EngineConfig:
    folder = save_hf(tiny_model("llama", vocab_size=VOCAB_SIZE), tmp_path)
    return EngineConfig(model=str(folder), num_kv_blocks=20, threads=1, deterministic=True, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_kernels_that_do_not_promise_it_are_refused(tmp_path: Path, backend: str) -> None:
    with pytest.raises(StartupError, match=rf"^--deterministic: only native kernels promise it, not {backend} \("):
        load_runner(tiny_config(tmp_path, attention_backend=backend, dtype="float32"))


@pytest.mark.skipif(native_library.why_not() is not None, reason="no native kernels here")
def test_a_model_that_the_native_kernels_cannot_compute_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"^--deterministic: .*not native: it computes in bfloat16 or float32"):
        load_runner(tiny_config(tmp_path, dtype="float16"))
