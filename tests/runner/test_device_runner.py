"""The runner where logits are on a device, with the CPU for one and interpreted kernels: one copy back per step."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.core.batch import Fork
from engine.runner.executor import load_runner
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from tests.helpers.checkpoints import greedy, save_hf, tiny_llama
from tests.runner.driver import GREEDY, Driver

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

PROMPT = [5, 17, 250, 3, 9]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(num_hidden_layers=1)


@pytest.fixture(scope="module")
def runner(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = save_hf(model, tmp_path_factory.mktemp("llama"))
    config = EngineConfig(
        str(folder), dtype="float32", num_kv_blocks=12, threads=1, attention_backend="triton", device="cpu",
        max_model_len=40,
    )  # fmt: skip
    return load_runner(config)


@pytest.fixture
def driver(runner: ModelRunner) -> Driver:
    runner.reset()
    return Driver(runner)


def fetches(runner: ModelRunner) -> int:
    assert runner._link is not None
    return runner._link.num_fetches


def test_logprobs_and_prompt_logprobs_come_with_the_tokens(
    driver: Driver, runner: ModelRunner, model: PreTrainedModel
) -> None:
    before = fetches(runner)
    driver.add("s", PROMPT, SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1))
    driver.add("t", PROMPT[:2], SamplingParams(temperature=0.7, seed=1, bad_words=((4,),)))
    sampled = driver.step(["s", "t"], forks=[Fork("s", "child", GREEDY)])
    assert fetches(runner) == before + 1
    assert [name for name, _ in driver.last.phases] == ["inputs", "launch", "device"]
    with torch.inference_mode():
        raw = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0], 1)
    best = int(raw[-1].argmax())
    assert sampled["s"].token_id == sampled["child"].token_id == best == greedy(model, PROMPT, 1)[0]
    entry = sampled["s"].logprobs
    assert entry is not None
    assert (entry.rank, entry.top_token_ids[0]) == (1, best)
    assert entry.logprob == pytest.approx(float(raw[-1, best]), abs=1e-4)
    (scores,) = driver.last.prompt_logprobs
    found = [score.logprob for score in scores.logprobs]
    assert found == pytest.approx([float(raw[i, PROMPT[i + 1]]) for i in range(len(PROMPT) - 1)], abs=1e-4)


def test_a_step_that_samples_nothing_copies_nothing_back(driver: Driver, runner: ModelRunner) -> None:
    before = fetches(runner)
    driver.add("s", PROMPT)
    assert driver.step(["s"], chunk=3) == {}
    assert fetches(runner) == before
    assert list(driver.step(["s"])) == ["s"]
    assert fetches(runner) == before + 1


def test_a_sequence_whose_kv_is_not_finite_fails_alone(
    driver: Driver, runner: ModelRunner, model: PreTrainedModel
) -> None:
    """The bad one asks for everything that would read its logits."""
    driver.add("bad", PROMPT, SamplingParams(temperature=1.0, seed=2, logprobs=1))
    driver.add("good", PROMPT[:3])
    driver.step(["bad", "good"])
    runner._kv_pool[0, driver.tables["bad"][0]] = float("nan")
    before = fetches(runner)
    sampled = driver.step(["bad", "good"])
    assert fetches(runner) == before + 1
    assert list(sampled) == ["good"]
    assert [seq_id for seq_id, _ in driver.last.failed] == ["bad"]
    assert "not finite" in driver.last.failed[0][1]
    assert driver.output("good") == greedy(model, PROMPT[:3], 2)
    runner._kv_pool.zero_()
