"""Choosing tokens in Triton, interpreted: the reference's tokens, without a sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.runner import sampler
from kernels.gpu import sampling as gpu
from kernels.reference import sampling as reference


def options(num_rows: int, **values: float) -> dict[str, torch.Tensor]:
    """Per-row options for `sample`, all rows alike."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    dtypes = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64}
    return {
        name: torch.full((num_rows,), values.get(name, default), dtype=dtypes[name])
        for name, default in defaults.items()
    }


def logits_of(num_rows: int, vocab_size: int, spread: float, *, rounded: bool = False) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.manual_seed(0)) * spread
    return logits.bfloat16().float() if rounded else logits  # rounded: many equal values


TRUNCATIONS: list[dict[str, float]] = [
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 900},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 200, "top_p": 0.5, "min_p": 0.9},
    {"top_p": 0.95, "min_p": 0.001, "temperature": 1.7},
]


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize(("vocab_size", "spread"), [(1000, 3.0), (50, 0.5)])
def test_tokens_equal_the_references(vocab_size: int, spread: float, truncation: dict[str, float]) -> None:
    logits = logits_of(3, vocab_size, spread, rounded=True)
    uniform = torch.tensor([0.0, 1 - 2**-20, 0.37], dtype=torch.float64)
    args = options(3, **truncation)
    expected = reference.sample(logits, **args, uniform=uniform)
    assert gpu.sample(logits, **args, uniform=uniform).tolist() == expected.tolist()
    other = reference.sample(logits, **args, uniform=(uniform + 0.5) % 1)  # the number counts, where there's a choice
    single = ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 0.05}, {"top_k": 200, "top_p": 0.5, "min_p": 0.9})
    assert other.tolist() != expected.tolist() or truncation in single


@pytest.mark.parametrize("truncation", [{}, {"top_k": 40}, {"top_p": 0.9, "temperature": 0.7}])
def test_a_vocabulary_of_several_tiles(truncation: dict[str, float]) -> None:
    logits = logits_of(2, 9001, 3.0)
    uniform = torch.tensor([0.2, 0.83], dtype=torch.float64)
    args = options(2, **truncation)
    expected = reference.sample(logits, **args, uniform=uniform)
    assert gpu.sample(logits, **args, uniform=uniform).tolist() == expected.tolist()


@pytest.mark.parametrize("truncation", [{"top_p": 0.98}, {"top_k": 4100}, {"min_p": 0.9}])
def test_a_flat_distribution_of_which_more_is_left_than_is_copied_out(truncation: dict[str, float]) -> None:
    logits = logits_of(1, 4500, 0.01)
    uniform = torch.tensor([0.6], dtype=torch.float64)
    args = options(1, **truncation)
    expected = reference.sample(logits, **args, uniform=uniform)
    assert gpu.sample(logits, **args, uniform=uniform).tolist() == expected.tolist()


def test_equal_logits_are_taken_by_token_id() -> None:
    logits = torch.zeros(4, 300)
    logits[:, ::3] = 1.0
    uniform = torch.tensor([0.0, 0.31, 0.62, 0.999], dtype=torch.float64)
    for truncation in ({"top_k": 130}, {"top_p": 0.7}, {"top_k": 50, "top_p": 0.5}):
        args = options(4, **truncation)
        expected = reference.sample(logits, **args, uniform=uniform)
        assert gpu.sample(logits, **args, uniform=uniform).tolist() == expected.tolist()


def test_masked_tokens_are_never_chosen() -> None:
    logits = logits_of(4, 300, 1.0)
    logits[:, ::2] = -torch.inf
    uniform = torch.linspace(0, 1 - 2**-53, 4, dtype=torch.float64)
    for truncation in ({}, {"top_k": 200}, {"top_p": 0.9}, {"min_p": 0.1}):
        tokens = gpu.sample(logits, **options(4, **truncation), uniform=uniform)
        assert (tokens % 2 == 1).all(), truncation
        assert (tokens > 0).all()
        assert (tokens < 300).all()


def test_a_row_gives_the_same_token_alone_and_in_a_batch_of_other_kinds() -> None:
    logits = logits_of(5, 700, 2.0, rounded=True)
    args = options(5)
    args["top_k"], args["temperature"] = torch.tensor([0, 30, 0, 0, 5]), torch.tensor([1.0, 0.5, 2.0, 0.9, 1.1])
    args["top_p"] = torch.tensor([1.0, 1.0, 0.8, 1.0, 0.9], dtype=torch.float64)
    args["min_p"][3] = 0.05
    uniform = torch.tensor([0.1, 0.9, 0.4, 0.6, 0.7], dtype=torch.float64)
    together = gpu.sample(logits, **args, uniform=uniform).tolist()
    assert together == reference.sample(logits, **args, uniform=uniform).tolist()
    for row in range(5):
        alone = {name: value[row : row + 1] for name, value in args.items()}
        assert gpu.sample(logits[row : row + 1], **alone, uniform=uniform[row : row + 1]).tolist() == [together[row]]


@pytest.mark.parametrize("vocab_size", [50, 4096, 9001])
def test_argmax_takes_the_first_of_equals(vocab_size: int) -> None:
    logits = logits_of(4, vocab_size, 1.0, rounded=True)
    logits[0, [7, 30, vocab_size - 1]] = 9.0
    logits[1] = -1.0
    logits[2] = -torch.inf
    expected = reference.argmax(logits)
    assert expected[:3].tolist() == [7, 0, 0]
    assert gpu.argmax(logits).tolist() == expected.tolist()


@pytest.mark.parametrize("vocab_size", [1, 50, 9001])
def test_rows_with_infinity_or_nan_are_found(vocab_size: int) -> None:
    logits = logits_of(5, vocab_size, 1.0)
    logits[0, -1], logits[2, 0], logits[3, vocab_size // 2] = float("nan"), float("inf"), -float("inf")
    assert gpu.all_finite(logits).tolist() == reference.all_finite(logits).tolist() == [False, True, False, False, True]


def test_random_numbers_are_the_samplers() -> None:
    """So a seed gives the same tokens wherever the model runs."""
    seeds = torch.tensor([0, 1, -5, 2**63 - 1, -(2**63), 12345] * 30)
    positions = torch.arange(180) ** 3
    expected = sampler.uniform(seeds.numpy().view(np.uint64), positions.numpy())
    assert gpu.uniform(seeds, positions).tolist() == expected.tolist()
    assert reference.uniform(seeds, positions).tolist() == expected.tolist()


def test_penalties() -> None:
    generator = torch.manual_seed(0)
    logits = torch.randn(5, 300, generator=generator) * 5
    tokens = torch.randint(0, 60, (5, 1100), dtype=torch.int32, generator=generator)
    num_prompt, num_tokens = torch.tensor([10, 0, 50, 3, 1040]), torch.tensor([100, 30, 50, 77, 1100])
    for row, n in enumerate(num_tokens.tolist()):
        tokens[row, n:] = 2**31 - 1  # stale entries are never read
    repetition = torch.tensor([1.3, 1.0, 1.2, 1.0, 0.7])
    presence, frequency = torch.tensor([0, 0.5, 0.2, 0.0, 0.1]), torch.tensor([0.1, 0.3, 0.0, 0.0, -0.2])
    counts = torch.zeros(5, 300, dtype=torch.int32)
    got, expected = logits.clone(), logits.clone()
    args = (tokens, num_prompt, num_tokens, repetition, presence, frequency, counts)
    gpu.penalise(got, *args)
    reference.penalise(expected, *args)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert not counts.any()  # clean for the next step
    assert torch.equal(got[3], logits[3])
    assert ((got != logits).sum(1) > 0).tolist() == [True, True, True, False, True]
    with pytest.raises(ValueError, match=r"must be a dense \(5, 300\)"):
        gpu.penalise(got, *args[:-1], counts[:, :200])


@pytest.mark.filterwarnings("ignore:overflow encountered in divide")  # numpy's, which interprets; a device is silent
def test_extreme_penalties_leave_numbers_that_a_temperature_can_divide() -> None:
    logits = torch.tensor([[1e30, -1e30, 3.0]])
    one, tokens = torch.ones(1), torch.tensor([[0, 1]], dtype=torch.int32)
    counts = torch.zeros(1, 3, dtype=torch.int32)
    gpu.penalise(logits, tokens, torch.tensor([2]), torch.tensor([2]), one * 1e-10, one * 0, one * 0, counts)
    assert logits.tolist() == [[pytest.approx(1e30), pytest.approx(-1e20), 3.0]]


def test_bias_and_forbidden_tokens() -> None:
    logits = logits_of(3, 40, 1.0)
    rows, tokens = torch.tensor([0, 2, 2]), torch.tensor([5, 39, 0])
    values = torch.tensor([1.5, -2.0, 100.0])
    results = []
    for module in (gpu, reference):
        changed = logits.clone()
        module.add_bias(changed, rows, tokens, values)
        module.forbid(changed, rows[:1], tokens[:1] + 1)
        results.append(changed)
    assert torch.equal(results[0], results[1])
    assert (results[0] != logits).nonzero().tolist() == [[0, 5], [0, 6], [2, 0], [2, 39]]


def test_logits_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="must be float32 with dense rows"):
        gpu.argmax(torch.zeros(2, 8, dtype=torch.bfloat16))
