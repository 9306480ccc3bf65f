"""The embedded model says what transformers says, from the same token ids."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from engine.config import EngineConfig
from engine.runner.executor import load_runner
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.weights.checkpoint import resolve_model
from tests.helpers.checkpoints import greedy
from tests.runner.driver import Driver

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_TOKENS = 12
# "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n" and two plain texts.
PROMPTS = {
    "chat": [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    "short": [504, 2644],
    "long": [(i * 7919 + 13) % 40_000 + 100 for i in range(45)],
}


@pytest.fixture(scope="module")
def oracle() -> PreTrainedModel:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    path = resolve_model("smollm2").path
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def expected(oracle: PreTrainedModel) -> dict[str, list[int]]:
    return {name: greedy(oracle, prompt, NUM_TOKENS) for name, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return load_runner(EngineConfig(dtype="float32", num_kv_blocks=40, threads=2))


def test_greedy_tokens_together_and_in_chunks(runner: ModelRunner, expected: dict[str, list[int]]) -> None:
    driver = Driver(runner)
    for name, prompt in PROMPTS.items():
        driver.add(name, prompt)
    driver.run(list(PROMPTS), NUM_TOKENS, chunk=32)
    assert {name: driver.output(name) for name in PROMPTS} == expected


def test_greedy_tokens_alone_over_a_cached_prefix(runner: ModelRunner, expected: dict[str, list[int]]) -> None:
    runner.reset()
    driver = Driver(runner)
    driver.add("first", PROMPTS["long"])
    driver.step(["first"])
    shared = driver.tables["first"][:2]
    driver.remove("first", keep=shared)
    driver.add("long", PROMPTS["long"], shared_blocks=shared)
    driver.run(["long"], NUM_TOKENS)
    assert driver.output("long") == expected["long"]


def test_logprobs(runner: ModelRunner, oracle: PreTrainedModel) -> None:
    runner.reset()
    driver = Driver(runner)
    driver.add("s", PROMPTS["chat"], SamplingParams(temperature=0.0, logprobs=5))
    entry = driver.step(["s"])["s"].logprobs
    assert entry is not None
    with torch.inference_mode():
        raw = torch.log_softmax(oracle(torch.tensor([PROMPTS["chat"]])).logits[0, -1], 0)
    assert entry.top_token_ids == tuple(raw.topk(5).indices.tolist())
    assert entry.top_logprobs == pytest.approx(raw.topk(5).values.tolist(), abs=1e-3)


def test_bfloat16_stays_near_float32(oracle: PreTrainedModel) -> None:
    """Teacher-forced over the long prompt: the log-probability of each next token moves by bfloat16's rounding only."""
    prompt = PROMPTS["chat"]
    driver = Driver(load_runner(EngineConfig(dtype="bfloat16", num_kv_blocks=40, threads=2)))
    with torch.inference_mode():
        raw = torch.log_softmax(oracle(torch.tensor([prompt])).logits[0], -1)
    lengths = {str(length): length for length in range(4, len(prompt))}
    for name, length in lengths.items():
        driver.add(name, prompt[:length], SamplingParams(temperature=0.0, logprobs=5))
    differences = []
    for name, token in driver.step(list(lengths)).items():
        assert token.logprobs is not None
        for token_id, logprob in zip(token.logprobs.top_token_ids, token.logprobs.top_logprobs, strict=True):
            differences.append(abs(logprob - float(raw[lengths[name] - 1, token_id])))
    assert len(differences) == 5 * len(lengths)
    assert math.fsum(differences) / len(differences) < 0.1
    assert max(differences) < 0.5


def test_info_names_the_model(runner: ModelRunner) -> None:
    info = runner.info
    assert (info.name, info.architecture) == ("SmolLM2-135M-Instruct", "LlamaForCausalLM")
    assert (info.num_layers, info.num_heads, info.num_kv_heads, info.head_dim) == (30, 9, 3, 64)
    assert (info.hidden_size, info.vocab_size) == (576, 49_152)
    assert info.num_parameters == 134_515_008
    assert info.weights_bytes == 4 * info.num_parameters
    assert info.quantization == "Q4_1 dequantised to float32"
    assert info.kv_bytes_per_block == 30 * 2 * 3 * 16 * 64 * 4
    assert info.max_model_len == 640  # what 40 blocks hold
