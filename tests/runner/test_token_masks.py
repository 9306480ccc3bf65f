"""What may come next: allowed_token_ids, bad_words and structured output, each in its own row only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from engine.core.batch import NewSequence
from engine.runner.device_sampler import DeviceSampler
from engine.runner.inputs import RowTable
from engine.runner.sampler import Sampler, SampleResult
from engine.runner.transfer import DeviceLink
from engine.sampling_params import SamplingParams, StructuredSpec
from engine.structured.grammars import Grammars
from tests.helpers.tokenizers import EOS, IM_END, byte_tokenizer

VOCAB = 310  # more than the tokenizer has
ENDS = (EOS, IM_END)


@pytest.fixture(params=["host", "device"], autouse=True)
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both samplers do the same; the device's is tried with a CPU for a device."""
    make = make_sampler if request.param == "host" else make_device_sampler
    monkeypatch.setattr(Rows, "make", staticmethod(make))


def make_sampler() -> Sampler:
    return Sampler(VOCAB)


def make_device_sampler() -> Sampler:
    return DeviceSampler(VOCAB, link=DeviceLink(torch.device("cpu"), 64))


@dataclass
class Rows:
    """Rows that are sampled together; `outputs` are what each has said already."""

    params: list[SamplingParams]
    outputs: list[list[int]]
    make: ClassVar[Callable[..., Sampler]] = Sampler

    def __post_init__(self) -> None:
        self.sampler, self.table = type(self).make(), RowTable(2, 64, 16)
        grammars = Grammars(byte_tokenizer(), VOCAB)
        for index, (params, output) in enumerate(zip(self.params, self.outputs, strict=True)):
            new = NewSequence(f"s{index}", (1, 2, *output), 2, (0,), params, ENDS)
            matcher = None if params.structured is None else grammars.matcher(params.structured, output)
            self.sampler.set_row(self.table.add(new), params, ENDS, matcher)

    def step(self) -> SampleResult:
        """From logits that fall with the token id; what is sampled becomes output."""
        rows = np.arange(len(self.params))
        logits = (10 - 0.1 * torch.arange(VOCAB)).expand(len(rows), -1).clone()
        result = self.sampler.sample(logits, rows, self.table)
        self.table.append_tokens(rows, result.token_ids)
        return result


def rows(*params: SamplingParams, outputs: list[list[int]] | None = None) -> Rows:
    return Rows(list(params), outputs or [[] for _ in params])


def greedy(**values: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **values)  # type: ignore[arg-type]


def test_only_allowed_tokens_come() -> None:
    table = rows(greedy(allowed_token_ids=(309, 77)), greedy(), SamplingParams(seed=1, allowed_token_ids=(42,)))
    assert table.step().token_ids.tolist() == [77, 0, 42]


def test_a_bad_word_of_one_token_never_comes() -> None:
    assert rows(greedy(bad_words=((0,), (1,))), greedy()).step().token_ids.tolist() == [2, 0]


def test_a_bad_word_of_several_tokens_lacks_its_last_one() -> None:
    table = rows(greedy(bad_words=((7, 8, 0),)), greedy(bad_words=((7, 8, 0),)), outputs=[[7, 8], [9, 8]])
    assert table.step().token_ids.tolist() == [1, 0]


def test_a_bad_word_that_begins_in_the_prompt_is_none() -> None:
    assert rows(greedy(bad_words=((2, 0),))).step().token_ids.tolist() == [0]


def test_structured_output_goes_on_from_what_was_said() -> None:
    spec = StructuredSpec("regex", "abc")
    table = rows(greedy(structured=spec), greedy(structured=spec), greedy(), outputs=[[], [97, 98], []])
    said = [table.step().token_ids.tolist() for _ in range(4)]
    assert [step[0] for step in said] == [97, 98, 99, EOS]
    assert [step[1] for step in said] == [99, EOS, EOS, EOS]
    assert [step[2] for step in said] == [0, 0, 0, 0]


def test_min_tokens_keeps_the_end_away_only_while_something_else_may_come() -> None:
    short, long = StructuredSpec("regex", "a"), StructuredSpec("regex", "a+")
    table = rows(greedy(structured=short, min_tokens=5), greedy(structured=long, min_tokens=5))
    assert [table.step().token_ids.tolist() for _ in range(2)] == [[97, 97], [EOS, 97]]


def test_a_row_that_nothing_is_left_for_fails_alone_and_says_why() -> None:
    params = greedy(allowed_token_ids=(5,), bad_words=((5,),))
    result = rows(params, greedy()).step()
    assert result.is_failed.tolist() == [True, False]
    assert "no token may come next" in result.problems[0]
    assert result.token_ids[1] == 0


def test_log_probabilities_are_those_before_the_mask() -> None:
    masked, free = rows(greedy(allowed_token_ids=(77,), logprobs=1), greedy(logprobs=1)).step().logprobs
    assert masked is not None
    assert free is not None
    assert masked.top_token_ids == free.top_token_ids == (0,)
    assert masked.rank == 78


def test_a_row_that_is_used_again_has_forgotten_its_rules() -> None:
    table = rows(greedy(allowed_token_ids=(77,), bad_words=((0,),), structured=StructuredSpec("regex", "a")))
    table.sampler.set_row(0, greedy(), ENDS)
    assert table.step().token_ids.tolist() == [0]
