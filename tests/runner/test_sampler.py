"""Each sampling parameter does what it says, to its own row only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest
import torch

from engine.core.batch import NewSequence
from engine.runner.device_sampler import DeviceSampler
from engine.runner.inputs import RowTable
from engine.runner.sampler import Sampler, uniform
from engine.runner.transfer import DeviceLink
from engine.sampling_params import SamplingParams

VOCAB = 300
EOS = (2,)


@pytest.fixture(params=["host", "device"], autouse=True)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both samplers do the same; the device's is tried with a CPU for a device."""
    make = make_sampler if request.param == "host" else make_device_sampler
    monkeypatch.setattr(Rows, "make", staticmethod(make))
    return str(request.param)


def make_sampler() -> Sampler:
    return Sampler(VOCAB)


def make_device_sampler() -> Sampler:
    return DeviceSampler(VOCAB, link=DeviceLink(torch.device("cpu"), 64))


@dataclass
class Rows:
    """Rows with given tokens and parameters, sampled together from given logits."""

    params: list[SamplingParams]
    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    make: ClassVar[Callable[..., Sampler]] = Sampler

    def __post_init__(self) -> None:
        self.prompts = self.prompts or [[5, 6, 7] for _ in self.params]
        self.outputs = self.outputs or [[] for _ in self.params]
        self.sampler = type(self).make()
        self.table = RowTable(2, 64, 16)
        for index, params in enumerate(self.params):
            tokens = (*self.prompts[index], *self.outputs[index])
            new = NewSequence(f"s{index}", tokens, len(self.prompts[index]), (0,), params, EOS)
            self.sampler.set_row(self.table.add(new), params, EOS)

    def sample(self, logits: torch.Tensor) -> list[int]:
        rows = np.arange(len(self.params))
        return self.sampler.sample(logits.clone(), rows, self.table).token_ids.tolist()


def ramp(num_rows: int = 1) -> torch.Tensor:
    """Logits that fall with the token id: 0 is the best, then 1, ..."""
    return (10 - 0.1 * torch.arange(VOCAB)).expand(num_rows, -1).clone()


def greedy(**values: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **values)  # type: ignore[arg-type]


def test_greedy_takes_the_best() -> None:
    assert Rows([greedy()]).sample(ramp()) == [0]


def test_logit_bias_moves_a_tokens_logit() -> None:
    assert Rows([greedy(logit_bias=((200, 100.0),)), greedy()]).sample(ramp(2)) == [200, 0]
    assert Rows([greedy(logit_bias=((0, -100.0), (1, -0.5)))]).sample(ramp()) == [2]


def test_repetition_penalty_counts_prompt_and_output_once_each() -> None:
    """Hugging Face's rule: divide what is positive, multiply what is negative, however often it occurred."""
    rows = Rows([greedy(repetition_penalty=1.05)], [[0, 0, 0]], [[1, 1]])
    # Logits 10, 9.9, 9.8: 10 / 1.05 = 9.52, 9.9 / 1.05 = 9.43.
    assert rows.sample(ramp()) == [2]
    assert Rows([greedy(repetition_penalty=1.01)], [[0, 0, 0]], [[1, 1]]).sample(ramp()) == [0]
    assert Rows([greedy(repetition_penalty=2.0)], [[0]], [[1]]).sample(ramp() - 100) == [2]
    assert Rows([greedy(repetition_penalty=0.5)], [[40]], [[]]).sample(ramp()) == [40]


def test_presence_penalty_counts_output_tokens_once() -> None:
    params = greedy(presence_penalty=0.25)
    assert Rows([params], [[0]], [[]]).sample(ramp()) == [0], "the prompt doesn't count"
    assert Rows([params], [[9]], [[0, 1, 1, 1]]).sample(ramp()) == [2]
    assert Rows([greedy(presence_penalty=0.05)], [[9]], [[0, 0, 0]]).sample(ramp()) == [0]


def test_frequency_penalty_counts_each_occurrence() -> None:
    params = greedy(frequency_penalty=0.04)
    assert Rows([params], [[0, 0, 0, 0]], [[]]).sample(ramp()) == [0], "the prompt doesn't count"
    assert Rows([params], [[9]], [[0, 0]]).sample(ramp()) == [0]
    assert Rows([params], [[9]], [[0, 0, 0]]).sample(ramp()) == [1]
    assert Rows([greedy(frequency_penalty=-2.0)], [[9]], [[50, 50, 50]]).sample(ramp()) == [50]


def test_penalties_of_one_row_leave_the_others_and_the_next_step_alone() -> None:
    params = [greedy(), greedy(presence_penalty=2.0, frequency_penalty=1.0), greedy(repetition_penalty=3.0), greedy()]
    rows = Rows(params, [[0]] * 4, [[0], [0, 0, 1], [1], [0]])
    assert rows.sample(ramp(4)) == [0, 2, 2, 0]
    assert rows.sample(ramp(4)) == [0, 2, 2, 0]


def test_min_tokens_keeps_end_tokens_away_until_there_are_enough() -> None:
    best_is_eos, best_is_stop = ramp(), ramp()
    best_is_eos[0, 2], best_is_stop[0, 77] = 50.0, 50.0
    params = greedy(min_tokens=2, stop_token_ids=(77,))
    for output, blocked in (([], True), ([8], True), ([8, 8], False)):
        rows = Rows([params], [[5]], [output])
        assert rows.sample(best_is_eos) == [0 if blocked else 2]
        assert rows.sample(best_is_stop) == [0 if blocked else 77]
    # Where the end token doesn't end anything, it is a token like any other.
    assert Rows([greedy(min_tokens=2, ignore_eos=True)]).sample(best_is_eos) == [2]


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(temperature=2.0, top_k=3), range(3)),
        (SamplingParams(temperature=1.0, top_k=-1, top_p=0.2), range(3)),  # probabilities 0.095, 0.086, 0.078 ...
        (SamplingParams(temperature=1.0, min_p=0.85), range(2)),  # e^-0.1 = 0.905, e^-0.2 = 0.819
        (SamplingParams(temperature=0.5, min_p=0.85), range(1)),  # temperature first: e^-0.2 = 0.819
        (SamplingParams(temperature=1.0, top_k=5, top_p=0.3), range(2)),  # of five: 0.242, 0.219
    ],
)
def test_truncation_bounds_what_is_sampled(params: SamplingParams, allowed: range) -> None:
    seen = set()
    for seed in range(150):
        seeded = SamplingParams(
            temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p, seed=seed
        )
        seen |= set(Rows([seeded]).sample(ramp()))
    assert seen == set(allowed)


def test_a_tiny_temperature_is_greedy_and_extreme_penalties_stay_finite() -> None:
    assert Rows([SamplingParams(temperature=1e-9, seed=1)]).sample(ramp()) == [0]
    extreme = SamplingParams(temperature=1e-5, repetition_penalty=1e-30, seed=1)
    assert Rows([extreme], [[40]], [[]]).sample(ramp()) == [40]


def test_the_distribution_is_the_softmax_by_chi_square() -> None:
    """One sequence position per draw: 20,000 tokens against softmax(logits / temperature)."""
    n = 20_000
    logits = torch.randn(12, generator=torch.manual_seed(4)) * 1.5
    row = torch.full((1, VOCAB), -1e9)
    row[0, :12] = logits
    tokens = []
    for first in range(0, n, 500):
        params = [SamplingParams(temperature=0.8, seed=first + i) for i in range(500)]
        tokens += Rows(params).sample(row.expand(500, -1))
    observed = np.bincount(tokens, minlength=12)
    expected = torch.softmax(logits.double() / 0.8, 0).numpy() * n
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert observed.sum() == n
    assert statistic < 31.3  # the 0.1 % quantile of chi-square with 11 degrees of freedom


def test_a_number_depends_on_seed_and_position_only() -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    positions = np.array([0, 5, 5, 9])
    together = uniform(seeds, positions)
    for index in range(4):
        assert uniform(seeds[index : index + 1], positions[index : index + 1])[0] == together[index]
    assert len(set(together.tolist())) == 4


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_numbers_are_even_and_independent(vary: str) -> None:
    """Neighbouring seeds and neighbouring positions: means, a chi-square over 64 bins, correlation of neighbours."""
    n = 64_000
    steps, fixed = np.arange(n), np.full(n, 12345)
    seeds, positions = (steps, fixed) if vary == "seed" else (fixed, steps)
    numbers = uniform(seeds.astype(np.uint64), positions)
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert abs(numbers.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5
    bins = np.bincount((numbers * 64).astype(int), minlength=64)
    assert ((bins - n / 64) ** 2 / (n / 64)).sum() < 103.4  # 0.1 % quantile, 63 degrees of freedom
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 4 / n**0.5


def test_seeds_and_positions_do_not_trade_places() -> None:
    """(seed, position + 1) isn't (seed + 1, position): siblings with seed + i aren't shifted copies of each other."""
    seeds, positions = np.meshgrid(np.arange(60, dtype=np.uint64), np.arange(60))
    numbers = uniform(seeds.ravel(), positions.ravel())
    assert len(set(numbers.tolist())) == 3600


def test_a_row_is_sampled_the_same_in_every_batch() -> None:
    generator = torch.manual_seed(2)
    logits = (torch.randn(24, VOCAB, generator=generator) * 3).bfloat16().float()
    params = [
        SamplingParams(
            temperature=0.2 + 0.1 * i, top_k=(0, 7, -1)[i % 3], top_p=(1.0, 0.9)[i % 2], min_p=0.02 * (i % 4), seed=i,
            repetition_penalty=1 + 0.1 * (i % 5), presence_penalty=0.3 * (i % 2),
            logit_bias=((i, 2.0),) if i % 6 else (),
        )
        for i in range(24)
    ]  # fmt: skip
    prompts = [[i, i + 1, 2 * i] for i in range(24)]
    together = Rows(params, prompts).sample(logits)
    for i in range(24):
        assert Rows([params[i]], [prompts[i]]).sample(logits[i : i + 1]) == [together[i]]


def test_rows_that_are_not_finite_fail_alone() -> None:
    rows = Rows([greedy(), greedy(logprobs=2), greedy(), greedy()])
    logits = ramp(4)
    logits[1, 3], logits[2, 0] = float("nan"), float("inf")
    result = rows.sampler.sample(logits, np.arange(4), rows.table)
    assert result.is_failed.tolist() == [False, True, True, False]
    assert result.token_ids[[0, 3]].tolist() == [0, 0]


def test_a_reused_row_forgets_its_last_owner() -> None:
    rows = Rows([greedy(logit_bias=((9, 100.0),), min_tokens=5, presence_penalty=2.0, logprobs=3)], [[5]], [[0]])
    rows.table.remove("s0")
    row = rows.table.add(NewSequence("next", (5,), 1, (0,), greedy(), EOS))
    assert row == 0
    rows.sampler.set_row(row, greedy(), EOS)
    result = rows.sampler.sample(ramp(), np.arange(1), rows.table)
    assert result.token_ids.tolist() == [0]
    assert result.logprobs == [None]
