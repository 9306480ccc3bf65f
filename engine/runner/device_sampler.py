"""The sampler where logits are on a device: it waits once, for the tokens.

What the host's sampler reads in between, whether a row is finite or has any token left, is computed beside the tokens
here and comes with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.core.batch import TokenLogprobs
from engine.runner.inputs import IntArray, RowTable
from engine.runner.sampler import (
    MIN_TEMPERATURE,
    Sampler,
    SampleResult,
    logprob_entries,
    logprob_tensors,
    uniform,
)
from engine.runner.token_masks import NOTHING_LEFT


class DeviceSampler(Sampler):
    """See `Sampler`."""

    def sample(self, logits: torch.Tensor, rows: IntArray, table: RowTable) -> SampleResult:
        """See `Sampler.sample`."""
        params = self._rows[rows]
        with_logprobs = np.flatnonzero(params["num_logprobs"] >= 0)
        is_plain = not len(with_logprobs) and bool((params["temperature"] < MIN_TEMPERATURE).all())
        is_finite = self._all_finite(logits)
        if not is_plain:  # the best token of a row that has failed is never read
            logits.masked_fill_(~is_finite.unsqueeze(1), 0.0)
        places = self._send(with_logprobs)
        raw = torch.log_softmax(logits[places], dim=1) if len(with_logprobs) else None
        problems = self._process(logits, rows, params, table)
        masked = np.flatnonzero(params["has_mask"])
        results = [is_finite]
        if len(masked):
            results.append(logits.amax(1) > -torch.inf)
            logits.masked_fill_(~results[-1].unsqueeze(1), 0.0)
        chosen = self._chosen(logits, params, table.num_tokens[rows])
        results.append(chosen)
        if raw is not None:
            num_best = int(params["num_logprobs"][with_logprobs].max())
            results += logprob_tensors(raw, chosen[places], num_best)
        arrays = list(self._link.later(*results)())
        is_failed = ~arrays.pop(0)
        if len(masked):
            for place in masked[~arrays.pop(0)[masked] & ~is_failed[masked]].tolist():
                problems.setdefault(place, NOTHING_LEFT)
        for place in problems:
            is_failed[place] = True
        token_ids = arrays.pop(0)
        self._masks.accept(rows, np.flatnonzero(params["has_mask"] & ~is_failed), token_ids)
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            entries = logprob_entries(arrays, params["num_logprobs"][with_logprobs])
            for index, entry in zip(with_logprobs, entries, strict=True):
                logprobs[index] = entry
        return SampleResult(token_ids, is_failed, logprobs, problems)

    def _chosen(self, logits: torch.Tensor, params: npt.NDArray[Any], positions: IntArray) -> torch.Tensor:
        """The next token of each row, int64. Where some are greedy and some not, both are computed for all."""
        is_greedy = params["temperature"] < MIN_TEMPERATURE
        best = self._argmax(logits) if is_greedy.any() else None
        if best is not None and is_greedy.all():
            return best
        temperature = np.where(is_greedy, np.float32(1), params["temperature"])
        columns = (temperature, *(params[name] for name in ("top_k", "top_p", "min_p")))
        numbers = uniform(params["seed"], positions)
        drawn = self._sample(logits, *(self._send(column) for column in columns), self._send(numbers))
        return drawn if best is None else torch.where(self._send(is_greedy), best, drawn)

    def _mask(self, logits: torch.Tensor, rows: IntArray, places: IntArray, table: RowTable) -> dict[int, str]:
        masked, banned, problems = self._masks.masks(rows, places)
        if masked:
            is_banned = self._send(banned)
            for index, place in enumerate(masked):
                logits[place].masked_fill_(is_banned[index], -torch.inf)
        words = [
            word + place * self._vocab_size
            for place in places.tolist()
            for word in self._masks.banned_words(int(rows[place]), table)
        ]
        if words:
            logits.view(-1).index_fill_(0, self._send(np.array(words, dtype=np.int64)), -torch.inf)
        for place in problems:
            logits[place] = 0.0  # so that a token can be chosen, which is never read
        return problems

    def _without_finished(self, logits: torch.Tensor, rows: IntArray, places: IntArray) -> IntArray:
        """Excludes the ends of sequences with structured output, unless nothing else may come; returns the others."""
        rest = []
        for place in places.tolist():
            if not self._masks.has_matcher(int(rows[place])):
                rest.append(place)
                continue
            others = logits[place].clone()
            others.index_fill_(0, self._send(self._end_tokens[int(rows[place])]), -torch.inf)
            logits[place] = torch.where(others.max() > -torch.inf, others, logits[place])
        return np.array(rest, dtype=np.int64)
