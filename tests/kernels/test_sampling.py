"""The sampler without a sort chooses the same tokens as the one that sorts."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from kernels.cpu import native_library, native_sampling
from kernels.cpu import sampling as torch_sampling
from kernels.reference import sampling as reference


@pytest.fixture(params=["cpu", "native"])
def cpu(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "cpu":
        return torch_sampling
    if (reason := native_library.why_not()) is not None:
        pytest.skip(f"no native kernels here: {reason}")
    return native_sampling


def options(num_rows: int, **values: float) -> dict[str, torch.Tensor]:
    """Per-row options for `sample`, all rows alike."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    dtypes = {"temperature": torch.float32, "top_k": torch.int64, "top_p": torch.float64, "min_p": torch.float64}
    return {
        name: torch.full((num_rows,), values.get(name, default), dtype=dtypes[name])
        for name, default in defaults.items()
    }


def logits_of(num_rows: int, vocab_size: int, spread: float, *, rounded: bool = False, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.manual_seed(seed)) * spread
    return logits.bfloat16().float() if rounded else logits  # rounded: many equal values


TRUNCATIONS: list[dict[str, float]] = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 900},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 200, "top_p": 0.5, "min_p": 0.9},
    {"top_p": 0.95, "min_p": 0.001, "temperature": 1.7},
    {"top_p": 0.3, "min_p": 0.2, "temperature": 0.7},
]


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(("vocab_size", "spread"), [(1000, 3.0), (12_801, 2.0), (50, 0.5)])
@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_tokens_equal_the_references(
    cpu: ModuleType, truncation: dict[str, float], vocab_size: int, spread: float, rounded: bool
) -> None:
    logits = logits_of(24, vocab_size, spread, rounded=rounded)
    uniform = torch.rand(24, dtype=torch.float64, generator=torch.manual_seed(1))
    uniform[0], uniform[1] = 0.0, 1 - 2**-20
    args = options(24, **truncation)
    expected = reference.sample(logits, **args, uniform=uniform)
    got = cpu.sample(logits, **args, uniform=uniform)
    assert got.tolist() == expected.tolist()


def test_a_row_gives_the_same_token_alone_and_in_any_batch(cpu: ModuleType) -> None:
    num_rows = 40
    generator = torch.manual_seed(3)
    logits = logits_of(num_rows, 5000, 2.0, rounded=True)
    args = options(num_rows)
    args["top_k"] = torch.randint(-1, 300, (num_rows,), generator=generator)
    args["top_p"] = (
        torch.rand(num_rows, dtype=torch.float64, generator=generator)
        .clamp(0.05)
        .where(torch.arange(num_rows) % 3 > 0, torch.ones((), dtype=torch.float64))
    )
    args["top_k"][::4] = 0
    args["min_p"][::5] = 0.05
    args["temperature"] = torch.rand(num_rows, generator=generator) + 0.2
    uniform = torch.rand(num_rows, dtype=torch.float64, generator=generator)
    together = cpu.sample(logits, **args, uniform=uniform).tolist()
    for row in range(num_rows):
        alone = {name: value[row : row + 1] for name, value in args.items()}
        assert cpu.sample(logits[row : row + 1], **alone, uniform=uniform[row : row + 1]).tolist() == [together[row]]
    back = torch.arange(num_rows).flip(0)
    flipped = cpu.sample(logits[back], **{name: value[back] for name, value in args.items()}, uniform=uniform[back])
    assert flipped.flip(0).tolist() == together


@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.9}, {"top_k": 7}])
def test_an_even_grid_of_uniform_numbers_reproduces_the_distribution(
    cpu: ModuleType, truncation: dict[str, float]
) -> None:
    """The inverse of the CDF at n evenly spaced points gives each token its probability, to within 1/n."""
    n = 5000
    logits = logits_of(1, 200, 2.0)
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    tokens = cpu.sample(logits.expand(n, -1), **options(n, **truncation), uniform=uniform)
    shares = np.bincount(tokens.numpy(), minlength=200) / n
    probabilities = torch.softmax(logits[0].double(), 0)
    order = probabilities.argsort(descending=True)
    keep = torch.ones(200, dtype=torch.bool)
    if "top_k" in truncation:
        keep[order[7:]] = False
    if "top_p" in truncation:
        before = probabilities[order].cumsum(0) - probabilities[order]
        keep[order[before >= 0.9]] = False
    expected = probabilities.where(keep, torch.zeros((), dtype=torch.float64))
    expected /= expected.sum()
    assert np.abs(shares - expected.numpy()).max() <= 1.01 / n


def test_masked_tokens_are_never_chosen(cpu: ModuleType) -> None:
    logits = logits_of(64, 300, 1.0)
    logits[:, ::2] = -torch.inf
    uniform = torch.linspace(0, 1 - 2**-53, 64, dtype=torch.float64)
    for truncation in TRUNCATIONS:
        tokens = cpu.sample(logits, **options(64, **truncation), uniform=uniform)
        assert (tokens % 2 == 1).all(), truncation


@pytest.mark.parametrize("vocab_size", [50, 128, 1000])
def test_argmax_takes_the_first_of_equals(cpu: ModuleType, vocab_size: int) -> None:
    logits = logits_of(9, vocab_size, 1.0, rounded=True)
    logits[0, [7, 30, 45]] = 9.0
    logits[1] = -1.0
    expected = reference.argmax(logits)
    assert expected[:2].tolist() == [7, 0]
    assert cpu.argmax(logits).tolist() == expected.tolist()


@pytest.mark.parametrize("vocab_size", [1, 50, 1000])
def test_rows_with_infinity_or_nan_are_found(cpu: ModuleType, vocab_size: int) -> None:
    logits = logits_of(5, vocab_size, 1.0)
    logits[0, -1], logits[2, 0], logits[3, vocab_size // 2] = float("nan"), float("inf"), -float("inf")
    assert cpu.all_finite(logits).tolist() == reference.all_finite(logits).tolist() == [False, True, False, False, True]


def test_a_flat_distribution_over_a_large_vocabulary(cpu: ModuleType) -> None:
    """Where nearly every token is within the top_p, and every logit is the same."""
    logits = torch.cat([logits_of(3, 49_152, 0.01), torch.zeros(1, 49_152)])
    uniform = torch.tensor([0.1, 0.5, 0.999, 0.7], dtype=torch.float64)
    args = options(4, top_p=0.98)
    expected = reference.sample(logits, **args, uniform=uniform)
    assert cpu.sample(logits, **args, uniform=uniform).tolist() == expected.tolist()
