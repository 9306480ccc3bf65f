"""From logits to tokens: what a request's sampling parameters do, for many rows at once.

Order: logit_bias; repetition, presence and frequency penalty; structured output and allowed_token_ids; bad_words;
min_tokens; temperature; top_k, top_p, min_p; then one uniform number per row, made from (seed, position) alone. A
row costs what it asks for: a greedy row is an argmax. Log-probabilities are those of the logits as the model gave them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.core.batch import TokenLogprobs
from engine.runner.inputs import IntArray, RowTable
from engine.runner.token_masks import TokenMasks
from engine.runner.transfer import Array, HostLink, Link
from engine.sampling_params import SamplingParams
from engine.structured.grammars import Matcher
from kernels.registry import select

# Below this a temperature would only overflow: the best token is certain.
MIN_TEMPERATURE = 1e-5
_MAX_LOGIT = 1e30

UIntArray = npt.NDArray[np.uint64]

# What a row's parameters are, as the vectorised code reads them.
_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("seed", np.uint64),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
        ("min_tokens", np.int64),
        ("num_logprobs", np.int64),  # -1 = none
        ("has_bias", np.bool_),
        ("has_mask", np.bool_),  # see engine.runner.token_masks
    ]
)


def uniform(seeds: UIntArray, positions: IntArray) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position): two rounds of the splitmix64 generator (Steele et al. 2014).

    Args:
        seeds: `[n]`.
        positions: `[n]`, >= 0.
    """
    return (_mix(_mix(seeds) + positions.astype(np.uint64)) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: UIntArray) -> UIntArray:
    z = state + np.uint64(0x9E3779B97F4A7C15)  # arrays wrap around modulo 2^64
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One entry per row asked for."""

    token_ids: IntArray  # [n]; meaningless where is_failed
    is_failed: npt.NDArray[np.bool_]  # [n], the row's logits are not finite, or there is a problem
    logprobs: list[TokenLogprobs | None]
    problems: dict[int, str] = field(default_factory=dict)  # place -> why no token can come next


class Sampler:
    """The parameters of every row, in arrays that grow with the runner's rows."""

    def __init__(
        self, vocab_size: int, *, kernels: str = "auto", device: str = "cpu", link: Link | None = None
    ) -> None:
        """Args: vocab_size, tokens; kernels, whose implementation of the choice itself; device, where the logits are,
        and link, how to get there."""
        self._vocab_size = vocab_size
        self._link = link or HostLink()
        self._all_finite: Callable[..., torch.Tensor] = select("all_finite", device, kernels).load()
        self._argmax: Callable[..., torch.Tensor] = select("argmax", device, kernels).load()
        self._sample: Callable[..., torch.Tensor] = select("sample", device, kernels).load()
        self._counts = torch.zeros(0, device=device)  # scratch: zero between calls
        self._rows = np.zeros(1, dtype=_ROW)
        self._end_tokens: dict[int, IntArray] = {}
        self._bias: dict[int, tuple[IntArray, npt.NDArray[np.float32]]] = {}
        self._masks = TokenMasks(vocab_size)

    def set_row(
        self, row: int, params: SamplingParams, eos_token_ids: tuple[int, ...], matcher: Matcher | None = None
    ) -> None:
        """`row` is to be sampled with `params`, whose seed is set unless it is greedy, and follow `matcher`."""
        if row >= len(self._rows):
            self._rows = np.concatenate((self._rows, np.zeros(max(len(self._rows), row), dtype=_ROW)))
        self._rows[row] = (
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            (params.seed or 0) & (2**64 - 1),
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
            params.min_tokens,
            -1 if params.logprobs is None else params.logprobs,
            bool(params.logit_bias),
            self._masks.set_row(row, params, matcher),
        )
        if params.logit_bias:
            ids, values = zip(*params.logit_bias, strict=True)
            self._bias[row] = np.array(ids, dtype=np.int64), np.array(values, dtype=np.float32)
        if params.min_tokens:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
            self._end_tokens[row] = np.array(sorted(ends), dtype=np.int64)

    def sample(self, logits: torch.Tensor, rows: IntArray, table: RowTable) -> SampleResult:
        """Choose the next token of each of `rows`.

        Args:
            logits: `[n, vocab_size]`, float32; changed.
            rows: `[n]`.
            table: the rows' tokens.
        """
        is_failed = ~self._all_finite(logits).numpy()
        if is_failed.any():
            logits[torch.from_numpy(is_failed)] = 0.0
        params = self._rows[rows]
        with_logprobs = np.flatnonzero(params["num_logprobs"] >= 0)
        raw = torch.log_softmax(logits[torch.from_numpy(with_logprobs)], dim=1) if len(with_logprobs) else None
        problems = self._process(logits, rows, params, table)
        for place in problems:
            is_failed[place] = True
            logits[place] = 0.0
        token_ids = self._choose(logits, params, table.num_tokens[rows])
        self._masks.accept(rows, np.flatnonzero(params["has_mask"] & ~is_failed), token_ids)
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if raw is not None:
            asked = params["num_logprobs"][with_logprobs]
            for index, entry in zip(with_logprobs, token_logprobs(raw, token_ids[with_logprobs], asked), strict=True):
                logprobs[index] = entry
        return SampleResult(token_ids, is_failed, logprobs, problems)

    def _choose(self, logits: torch.Tensor, params: npt.NDArray[Any], positions: IntArray) -> IntArray:
        is_greedy = params["temperature"] < MIN_TEMPERATURE
        if is_greedy.all():
            return np.asarray(self._argmax(logits).numpy())
        token_ids = np.empty(len(params), dtype=np.int64)
        greedy, random = np.flatnonzero(is_greedy), np.flatnonzero(~is_greedy)
        if len(greedy):
            token_ids[greedy] = self._argmax(logits[torch.from_numpy(greedy)]).numpy()
        part = logits[torch.from_numpy(random)] if len(greedy) else logits
        mine = params[random]
        options = (torch.from_numpy(mine[name].copy()) for name in ("temperature", "top_k", "top_p", "min_p"))
        numbers = torch.from_numpy(uniform(mine["seed"], positions[random]))
        token_ids[random] = self._sample(part, *options, numbers).numpy()
        return token_ids

    def _process(
        self, logits: torch.Tensor, rows: IntArray, params: npt.NDArray[Any], table: RowTable
    ) -> dict[int, str]:
        """Bias, penalties, masks and min_tokens, in place; returns the places that no token is left for, and why."""
        flat = logits.view(-1)
        biased = np.flatnonzero(params["has_bias"])
        if len(biased):
            ids = np.concatenate([self._bias[rows[i]][0] + i * self._vocab_size for i in biased])
            values = np.concatenate([self._bias[rows[i]][1] for i in biased])
            flat.index_add_(0, self._send(ids), self._send(values))
        repeats = np.flatnonzero(params["repetition"] != 1)
        if len(repeats):
            known, owners = self._tokens(rows, repeats, table, is_output_only=False)
            _penalise_repetition(flat, known, self._send(params["repetition"][repeats][owners]))
        counts = np.flatnonzero((params["presence"] != 0) | (params["frequency"] != 0))
        if len(counts):
            known, owners = self._tokens(rows, counts, table, is_output_only=True)
            presence, frequency = params["presence"][counts][owners], params["frequency"][counts][owners]
            self._penalise_counts(flat, known, self._send(presence), self._send(frequency))
        masked = np.flatnonzero(params["has_mask"])
        problems = self._mask(logits, rows, masked, table) if len(masked) else {}
        num_output = table.num_tokens[rows] - table.num_prompt_tokens[rows]
        unfinished = np.flatnonzero(num_output < params["min_tokens"])
        if len(masked):  # where only the end is left, it comes
            unfinished = self._without_finished(logits, rows, unfinished)
        if len(unfinished):
            ids = np.concatenate([self._end_tokens[rows[i]] + i * self._vocab_size for i in unfinished])
            flat.index_fill_(0, self._send(ids), -torch.inf)
        return problems

    def _send(self, array: Array) -> torch.Tensor:
        return self._link.send(array)

    def _mask(self, logits: torch.Tensor, rows: IntArray, places: IntArray, table: RowTable) -> dict[int, str]:
        return self._masks.apply(logits, rows, places, table)

    def _without_finished(self, logits: torch.Tensor, rows: IntArray, places: IntArray) -> IntArray:
        return self._masks.without_finished(logits, rows, places, self._end_tokens)

    def _tokens(
        self, rows: IntArray, which: IntArray, table: RowTable, *, is_output_only: bool
    ) -> tuple[torch.Tensor, IntArray]:
        """Flat index into the logits of each known token of the rows `which`, and the place of its row in `which`."""
        parts = []
        for index in which:
            row = rows[index]
            first = table.num_prompt_tokens[row] if is_output_only else 0
            ids = table.token_ids[row, first : table.num_tokens[row]].astype(np.int64)
            parts.append(ids + index * self._vocab_size)
        owners = np.repeat(np.arange(len(which)), [len(part) for part in parts])
        return self._send(np.concatenate(parts)), owners

    def _penalise_counts(
        self,
        flat: torch.Tensor,
        ids: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> None:
        if self._counts.numel() < flat.numel():
            self._counts = torch.zeros(flat.numel(), device=flat.device)
        self._counts.index_add_(0, ids, torch.ones(ids.numel(), device=flat.device))
        penalty = frequency * self._counts[ids] + presence
        # A token that occurs twice is written twice, with the same value.
        flat[ids] = flat[ids] - penalty
        self._counts.index_fill_(0, ids, 0.0)


def _penalise_repetition(flat: torch.Tensor, ids: torch.Tensor, factor: torch.Tensor) -> None:
    values = flat[ids]
    # Bounded, so that an extreme penalty leaves numbers that a temperature can still divide.
    flat[ids] = torch.where(values > 0, values / factor, values * factor).clamp_(-_MAX_LOGIT, _MAX_LOGIT)


def token_logprobs(raw: torch.Tensor, token_ids: IntArray, asked: IntArray) -> list[TokenLogprobs]:
    """Of each row of log-probabilities `raw` `[n, vocab_size]`, with the `asked` `[n]` best tokens."""
    tensors = logprob_tensors(raw, torch.from_numpy(token_ids), int(asked.max()))
    return logprob_entries([tensor.numpy() for tensor in tensors], asked)


def logprob_tensors(raw: torch.Tensor, token_ids: torch.Tensor, num_best: int) -> tuple[torch.Tensor, ...]:
    """Of `raw` `[n, vocab_size]`: log-probability and rank of `token_ids`, `[n]`; ids and values of the best,
    `[n, num_best]`."""
    chosen = raw.gather(1, token_ids.unsqueeze(1))
    ranks = (raw > chosen).sum(1) + 1
    best = raw.topk(min(num_best, raw.shape[1]), dim=1)
    return chosen.squeeze(1), ranks, best.indices, best.values


def logprob_entries(arrays: Sequence[Array], asked: IntArray) -> list[TokenLogprobs]:
    """What `logprob_tensors` computed, with the `asked` `[n]` best tokens of each row."""
    chosen, ranks, best_ids, best_values = (array.tolist() for array in arrays)
    return [
        TokenLogprobs(value, rank, tuple(ids[:count]), tuple(values[:count]))
        for value, rank, ids, values, count in zip(chosen, ranks, best_ids, best_values, asked.tolist(), strict=True)
    ]
