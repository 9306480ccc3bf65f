"""The log-probabilities of a prompt's tokens are those of transformers, in whatever chunks the prompt is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.core.batch import PromptLogprobs, TokenLogprobs
from engine.runner.executor import load_runner
from engine.sampling_params import SamplingParams
from tests.helpers.checkpoints import save_hf, tiny_llama
from tests.runner.driver import Driver

LENGTHS = {"a": 75, "b": 16, "c": 1}  # 75: more than one chunk of logits


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(model, tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("chunk", [7, 10**9])
def test_they_are_those_of_transformers(model: PreTrainedModel, folder: Path, chunk: int) -> None:
    runner = load_runner(EngineConfig(model=str(folder), dtype="float32", num_kv_blocks=40, threads=1))
    driver = Driver(runner)
    generator = torch.Generator().manual_seed(3)
    prompts = {name: torch.randint(0, 331, (n,), generator=generator).tolist() for name, n in LENGTHS.items()}
    for name, prompt in prompts.items():
        driver.add(name, prompt, SamplingParams(temperature=0.0, prompt_logprobs=3))
    driver.add("other", prompts["a"], SamplingParams(temperature=0.0))
    found: dict[str, list[TokenLogprobs]] = {name: [] for name in [*LENGTHS, "other"]}
    while missing := [name for name in found if not driver.output(name)]:
        driver.step(missing, chunk=chunk)
        for seq_id, first_position, logprobs in driver.last.prompt_logprobs:
            assert first_position == len(found[seq_id]) + 1
            found[seq_id].extend(logprobs)
    assert {name: len(entries) for name, entries in found.items()} == {"a": 74, "b": 15, "c": 0, "other": 0}
    for name in "ab":
        with torch.inference_mode():
            expected = torch.log_softmax(model(torch.tensor([prompts[name]])).logits[0].float(), dim=1)
        for position, entry in enumerate(found[name]):
            row, token = expected[position], prompts[name][position + 1]
            assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert entry.top_token_ids == tuple(row.topk(3).indices.tolist())
            assert entry.rank == int((row > row[token]).sum()) + 1


def test_nothing_is_kept_of_a_sequence_that_is_gone(folder: Path) -> None:
    runner = load_runner(EngineConfig(model=str(folder), dtype="float32", num_kv_blocks=40, threads=1))
    driver = Driver(runner)
    driver.add("a", [1, 2, 3], SamplingParams(temperature=0.0, prompt_logprobs=0))
    driver.step(["a"])
    assert [type(score) for score in driver.last.prompt_logprobs] == [PromptLogprobs]
    driver.remove("a")
    driver.add("a", [1, 2, 3])
    driver.step(["a"])
    assert driver.last.prompt_logprobs == ()
