"""Alone = batched = chunked = cached = preempted = forked = transformers, on a tiny random Llama in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import EngineConfig
from engine.core.batch import Fork
from engine.runner.executor import load_runner
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from kernels.cpu import native_library
from tests.helpers.checkpoints import greedy, save_hf, tiny_llama
from tests.runner.driver import GREEDY, Driver

NUM_TOKENS = 12
LENGTHS = (1, 16, 37, 50, 5)


def prompts() -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(7)
    return {f"s{n}": torch.randint(0, 331, (n,), generator=generator).tolist() for n in LENGTHS}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama()


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> dict[str, list[int]]:
    return {name: greedy(model, prompt, NUM_TOKENS) for name, prompt in prompts().items()}


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(model, tmp_path_factory.mktemp("llama"))


def make_runner(folder: Path, backend: str = "cpu", **changes: object) -> ModelRunner:
    values = {"dtype": "float32", "num_kv_blocks": 40, "threads": 1, "attention_backend": backend} | changes
    return load_runner(EngineConfig(model=str(folder), **values))  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=["cpu", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and (reason := native_library.why_not()) is not None:
        pytest.skip(f"no native kernels here: {reason}")
    return str(request.param)


@pytest.fixture(scope="module")
def runner(folder: Path, backend: str) -> ModelRunner:
    return make_runner(folder, backend)


@pytest.fixture
def driver(runner: ModelRunner) -> Driver:
    runner.reset()
    return Driver(runner)


def test_the_continuations_are_not_trivial(expected: dict[str, list[int]]) -> None:
    assert all(len(set(tokens)) > NUM_TOKENS // 2 for tokens in expected.values())


@pytest.mark.parametrize("name", list(prompts()))
def test_alone(name: str, driver: Driver, expected: dict[str, list[int]]) -> None:
    driver.add(name, prompts()[name])
    driver.run([name], NUM_TOKENS)
    assert driver.output(name) == expected[name]


@pytest.mark.parametrize("chunk", [1, 7, 16, 32, 1000])
def test_together_whole_and_in_chunks(chunk: int, driver: Driver, expected: dict[str, list[int]]) -> None:
    """With a chunk of 7, short sequences decode while long ones still prefill."""
    for name, prompt in prompts().items():
        driver.add(name, prompt)
    driver.run(list(prompts()), NUM_TOKENS, chunk=chunk)
    assert {name: driver.output(name) for name in prompts()} == expected


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_other_block_sizes(folder: Path, backend: str, block_size: int, expected: dict[str, list[int]]) -> None:
    driver = Driver(make_runner(folder, backend, block_size=block_size, num_kv_blocks=400 // block_size))
    for name, prompt in prompts().items():
        driver.add(name, prompt)
    driver.run(list(prompts()), NUM_TOKENS, chunk=20)
    assert {name: driver.output(name) for name in prompts()} == expected


def test_the_reference_backend(folder: Path, expected: dict[str, list[int]]) -> None:
    driver = Driver(make_runner(folder, "reference"))
    for name in ("s37", "s5"):
        driver.add(name, prompts()[name])
    driver.run(["s37", "s5"], 4, chunk=9)
    assert driver.output("s37") == expected["s37"][:4]
    assert driver.output("s5") == expected["s5"][:4]


def test_a_prefix_that_another_sequence_computed(driver: Driver, expected: dict[str, list[int]]) -> None:
    prompt = prompts()["s50"]
    driver.add("first", prompt)
    driver.step(["first"])
    shared = driver.tables["first"][:3]
    driver.remove("first", keep=shared)
    driver.add("second", prompt, shared_blocks=shared)
    driver.run(["second"], NUM_TOKENS)
    assert driver.output("second") == expected["s50"]


def test_a_preempted_sequence_comes_back_with_all_its_tokens(driver: Driver, expected: dict[str, list[int]]) -> None:
    driver.add("s37", prompts()["s37"])
    driver.run(["s37"], 6)
    tokens = driver.tokens["s37"]
    driver.remove("s37")
    driver.add("s37", tokens, num_prompt_tokens=37)
    driver.run(["s37"], NUM_TOKENS, chunk=11)
    assert driver.output("s37") == expected["s37"]


@pytest.mark.parametrize("name", ["s37", "s16"])
def test_forks_share_blocks_until_they_write(name: str, driver: Driver, expected: dict[str, list[int]]) -> None:
    """s37 ends inside a block, which is copied before the first write; s16 fills its block, which stays shared."""
    driver.add(name, prompts()[name])
    driver.add("other", prompts()["s5"])
    sampled = driver.step(["other", name], forks=[Fork(name, "child", GREEDY), Fork(name, "child 2", GREEDY)])
    assert [token.seq_id for token in driver.last.sampled] == ["other", name, "child", "child 2"]
    assert sampled["child"].token_id == sampled[name].token_id == expected[name][0]
    if len(prompts()[name]) % driver.block_size:
        for writer in ("child", name):
            driver.copy_on_write(writer, len(driver.tables[writer]) - 1)
    driver.run([name, "child", "child 2", "other"], NUM_TOKENS)
    for seq_id in (name, "child", "child 2"):
        assert driver.output(seq_id) == expected[name], seq_id
    assert driver.output("other") == expected["s5"]


def test_forks_diverge_by_their_own_parameters(driver: Driver) -> None:
    """Each child's tokens are those of a sequence of its own with the same seed."""
    prompt = prompts()["s37"]
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in (5, 6, 7)]
    driver.add("p", prompt, params[0])
    driver.step(["p"], forks=[Fork("p", f"c{i}", params[i]) for i in (1, 2)])
    for seq_id in ("p", "c1"):
        driver.copy_on_write(seq_id, 2)
    driver.run(["p", "c1", "c2"], NUM_TOKENS)
    for i, seq_id in enumerate(("p", "c1", "c2")):
        driver.add(f"alone {i}", prompt, params[i])
        driver.run([f"alone {i}"], NUM_TOKENS)
        assert driver.output(seq_id) == driver.output(f"alone {i}")
    assert len({tuple(driver.output(seq_id)) for seq_id in ("p", "c1", "c2")}) == 3


def test_a_seeded_sequence_samples_the_same_tokens_in_any_company(driver: Driver) -> None:
    params = SamplingParams(temperature=1.3, top_p=0.95, seed=11, presence_penalty=0.5, repetition_penalty=1.2)
    driver.add("alone", prompts()["s37"], params)
    driver.run(["alone"], NUM_TOKENS)
    driver.add("s50", prompts()["s50"], SamplingParams(temperature=0.8, top_k=5, seed=1))
    driver.add("s5", prompts()["s5"])
    driver.add("again", prompts()["s37"], params)
    driver.run(["s50", "s5", "again"], NUM_TOKENS, chunk=10)
    assert driver.output("again") == driver.output("alone")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_log_probabilities_are_the_same_bits_in_any_company(folder: Path, backend: str, dtype: str) -> None:
    """Alone, in chunks, and among 36 others that decode and prefill: a row's sums don't depend on its batch."""
    if backend != "native":
        pytest.skip("only the native kernels promise this")
    driver = Driver(make_runner(folder, backend, dtype=dtype, num_kv_blocks=300))
    params = SamplingParams(temperature=0.0, logprobs=5)
    found: dict[str, list[object]] = {}

    def run(name: str, others: list[str], chunk: int) -> None:
        driver.add(name, prompts()["s50"], params)
        found[name] = []
        while len(found[name]) < 8:
            sampled = driver.step([*others, name], chunk=chunk)
            found[name] += [sampled[name]._replace(seq_id="")] if name in sampled else []

    run("alone", [], 1000)
    run("chunked", [], 7)
    for i in range(36):
        driver.add(f"o{i}", [i + 1] * (1 + i))
    run("together", [f"o{i}" for i in range(36)], 9)
    assert found["alone"] == found["chunked"] == found["together"]


def test_rows_grow_past_the_first_allocation(folder: Path, model: PreTrainedModel) -> None:
    driver = Driver(make_runner(folder, num_kv_blocks=200))
    capacity = driver.runner._table.capacity
    names = [f"s{i}" for i in range(capacity + 36)]
    for i, name in enumerate(names):
        driver.add(name, [i, i + 1, 3])
    driver.run(names, 3)
    assert driver.runner._table.capacity == 2 * capacity
    for name in (names[0], names[-1]):
        assert driver.output(name) == greedy(model, driver.tokens[name][:3], 3)


def test_a_sequence_whose_kv_is_not_finite_fails_alone(driver: Driver, expected: dict[str, list[int]]) -> None:
    driver.add("bad", prompts()["s16"], SamplingParams(temperature=0.0, logprobs=1))
    driver.add("s37", prompts()["s37"])
    driver.step(["bad", "s37"])
    driver.runner._kv_pool[1, driver.tables["bad"][0]] = float("nan")
    sampled = driver.step(["bad", "s37"], forks=[Fork("bad", "child", GREEDY)])
    assert list(sampled) == ["s37"]
    assert [seq_id for seq_id, _ in driver.last.failed] == ["bad"]
    assert "not finite" in driver.last.failed[0][1]
    driver.remove("bad")
    driver.run(["s37"], NUM_TOKENS)
    assert driver.output("s37") == expected["s37"]


def test_a_block_that_held_nan_is_clean_for_its_next_owner(driver: Driver, expected: dict[str, list[int]]) -> None:
    driver.runner._kv_pool.fill_(float("nan"))
    try:
        for name, prompt in prompts().items():
            driver.add(name, prompt)
        driver.run(list(prompts()), NUM_TOKENS, chunk=13)
        assert {name: driver.output(name) for name in prompts()} == expected
    finally:
        driver.runner._kv_pool.zero_()


def test_logprobs_are_those_of_the_models_distribution(driver: Driver, model: PreTrainedModel) -> None:
    prompt = prompts()["s37"]
    params = SamplingParams(temperature=0.5, seed=3, logprobs=4, repetition_penalty=2.0, top_k=3)
    driver.add("s", prompt, params)
    driver.add("none", prompt)
    driver.add("zero", prompt, SamplingParams(temperature=0.0, logprobs=0))
    sampled = driver.step(["s", "none", "zero"])
    with torch.inference_mode():
        raw = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], 0)
    entry = sampled["s"].logprobs
    assert entry is not None
    best = raw.topk(4)
    assert entry.top_token_ids == tuple(best.indices.tolist())
    assert entry.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-4)
    assert entry.logprob == pytest.approx(float(raw[sampled["s"].token_id]), abs=1e-4)
    assert entry.rank == int((raw > raw[sampled["s"].token_id]).sum()) + 1
    assert sampled["none"].logprobs is None
    zero = sampled["zero"].logprobs
    assert zero is not None
    assert (zero.rank, zero.top_token_ids) == (1, ())


def test_phases_of_a_step_and_an_empty_step(driver: Driver, backend: str) -> None:
    driver.add("s5", prompts()["s5"])
    driver.step(["s5"])
    layers = ["attention", "linear", "elementwise"] if backend == "native" else ["forward"]
    assert [name for name, _ in driver.last.phases] == ["inputs", *layers, "head", "sample"]
    assert all(seconds >= 0 for _, seconds in driver.last.phases)
    driver.remove("s5")
    assert driver.step([]) == {}
    assert driver.runner._table.row_of == {}


def test_inputs_cost_nothing_per_block_of_the_pool(folder: Path) -> None:
    """A pool of a million blocks takes address space, not start-up or step work."""
    driver = Driver(make_runner(folder, num_kv_blocks=100_000))
    assert driver.runner._kv_pool.shape[1] == 100_000
    driver.free = [99_999, 5]
    driver.add("s16", prompts()["s16"])
    driver.run(["s16"], 2)
    assert driver.tables["s16"] == [99_999, 5]
