"""Choosing tokens without sorting the vocabulary.

The vocabulary is seen as groups of 128 tokens. The k-th largest of the groups' maxima is a threshold that at least k
tokens reach, so the tokens that reach it contain the k best: a few hundred candidates instead of 50,000. A row whose
top_p reaches further than its candidates is done again with all its tokens. Every threshold and every sum depends on
its own row only, so a row's token is the same in every batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_GROUP = 128
_ROWS_AT_ONCE = 4
_TOP_P_GROUPS = 64  # groups whose maxima make the first candidates of a row with top_p and no top_k

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


def _grouped(logits: torch.Tensor) -> torch.Tensor:
    """`[num_rows, num_groups, _GROUP]` of `[num_rows, vocab_size]`, padded with -inf."""
    rest = -logits.shape[1] % _GROUP
    if rest:
        logits = torch.nn.functional.pad(logits, (0, rest), value=-torch.inf)
    return logits.view(logits.shape[0], -1, _GROUP)


def all_finite(logits: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.sampling.all_finite`; a sum is finite only if all of it is."""
    return torch.isfinite(logits.sum(1))


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.sampling.argmax`; one pass of maxima, which vectorises where torch.argmax doesn't."""
    grouped = _grouped(logits)
    groups = grouped.amax(2).argmax(1)  # [num_rows]
    inside = grouped[torch.arange(grouped.shape[0]), groups].argmax(1)
    return groups * _GROUP + inside


class _Options(NamedTuple):
    """One value per row."""

    top_k: IntArray
    top_p: FloatArray
    min_p: FloatArray
    uniform: FloatArray

    def take(self, rows: IntArray) -> _Options:
        """Those of `rows`."""
        return _Options(self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows])


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """See `kernels.reference.sampling.sample`."""
    grouped = _grouped(logits / temperature.unsqueeze(1))
    options = _Options(top_k.numpy(), top_p.numpy(), min_p.numpy(), uniform.numpy())
    is_truncated = (options.top_k > 0) | (options.top_p < 1) | (options.min_p > 0)
    out = np.empty(logits.shape[0], dtype=np.int64)
    for is_mine, choose in ((~is_truncated, _sample_all), (is_truncated, _sample_truncated)):
        rows = np.flatnonzero(is_mine)
        if len(rows):
            part = grouped if len(rows) == len(out) else grouped[torch.from_numpy(rows)]
            out[rows] = choose(part, options.take(rows))
    return torch.from_numpy(out)


def _sample_all(grouped: torch.Tensor, options: _Options) -> IntArray:
    """Rows without truncation: by the groups' sums to a group, then inside it."""
    best = grouped.amax((1, 2))
    running = np.cumsum(_group_sums(grouped, best), axis=1, dtype=np.float64)  # [num_rows, num_groups]
    target = options.uniform * running[:, -1]
    rows = np.arange(len(target))
    group = np.minimum((running <= target[:, None]).sum(1), running.shape[1] - 1)
    before = np.where(group > 0, running[rows, group - 1], 0.0)
    chosen_groups = grouped[torch.from_numpy(rows), torch.from_numpy(group)]  # [num_rows, _GROUP]
    inside = torch.exp(chosen_groups - best.unsqueeze(1)).numpy().astype(np.float64)
    index = (np.cumsum(inside, axis=1) <= (target - before)[:, None]).sum(1)
    # The two sums differ by rounding: past the end means the last token of the group that has a weight.
    last = _GROUP - 1 - np.argmax(inside[:, ::-1] > 0, axis=1)
    chosen: IntArray = group * _GROUP + np.minimum(index, last)
    return chosen


def _group_sums(grouped: torch.Tensor, best: torch.Tensor) -> npt.NDArray[np.float32]:
    """Sum of exp(logit - best) of each group, `[num_rows, num_groups]`; a few rows at a time, so that the intermediate
    results stay in the cache."""
    sums = torch.empty(grouped.shape[:2])
    for first in range(0, grouped.shape[0], _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        torch.sum((grouped[some] - best[some, None, None]).exp_(), dim=2, out=sums[some])
    return sums.numpy()


def _sample_truncated(grouped: torch.Tensor, options: _Options) -> IntArray:
    top_k, top_p = options.top_k, options.top_p
    maxima = grouped.amax(2)  # [num_rows, num_groups]
    num_groups = maxima.shape[1]
    descending = -np.sort(-maxima.numpy(), axis=1)
    best = descending[:, 0].astype(np.float64)
    # Rank of the group maximum that is the threshold; past the last one = every token is a candidate.
    rank = np.where(top_k > 0, top_k, np.where(top_p < 1, _TOP_P_GROUPS, num_groups + 1))
    threshold = descending[np.arange(len(rank)), np.minimum(rank, num_groups) - 1].astype(np.float64)
    threshold[rank > num_groups] = -np.inf
    with np.errstate(divide="ignore"):
        # A hair lower, so that rounding drops no token that min_p keeps; the exact test comes later.
        by_min_p = best + np.log(options.min_p) - 1e-3
    # Where top_p is a share of what top_k left, all of that must be there.
    threshold = np.where((top_k > 0) & (top_p < 1), threshold, np.maximum(threshold, by_min_p))
    is_whole = (top_k <= 0) & (top_p < 1)  # top_p is a share of the whole distribution
    mass = np.full(len(best), np.nan)  # of what top_p is a share of; NaN = of what top_k left
    if is_whole.any():
        rows = torch.from_numpy(np.flatnonzero(is_whole))
        part = grouped if is_whole.all() else grouped[rows]
        mass[is_whole] = _group_sums(part, maxima[rows].amax(1)).sum(1, dtype=np.float64)
    chosen, is_covered = _walk(grouped, maxima, threshold, best, mass, options)
    again = np.flatnonzero(is_whole & ~is_covered & (threshold > by_min_p))
    if len(again):
        rows = torch.from_numpy(again)
        chosen[again] = _walk(
            grouped[rows], maxima[rows], by_min_p[again], best[again], mass[again], options.take(again)
        )[0]
    return chosen


def _walk(
    grouped: torch.Tensor,
    maxima: torch.Tensor,
    threshold: FloatArray,
    best: FloatArray,
    mass: FloatArray,
    options: _Options,
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """Choose among the tokens that reach their row's `threshold`.

    Returns:
        The token of each row, and whether its candidates' mass reached its top_p.
    """
    ids, scaled = _candidates(grouped, maxima, threshold)  # [num_rows, max_candidates], best first
    weights = np.exp(scaled.astype(np.float64) - best[:, None])  # padding: exp(-inf) = 0
    running = np.cumsum(weights, axis=1)
    rows = np.arange(len(best))
    num_kept = (weights > 0).sum(1)
    num_kept = np.where(options.top_k > 0, np.minimum(num_kept, options.top_k), num_kept)
    wanted = options.top_p * np.where(np.isnan(mass), running[rows, num_kept - 1], mass)
    num_in_top_p = np.where(options.top_p < 1, (running - weights < wanted[:, None]).sum(1), num_kept)
    num_in_min_p = (weights >= options.min_p[:, None]).sum(1)
    num_kept = np.minimum(np.minimum(num_kept, num_in_top_p), num_in_min_p)
    target = options.uniform * running[rows, num_kept - 1]
    index = np.minimum((running <= target[:, None]).sum(1), num_kept - 1)
    return ids[rows, index], running[:, -1] >= wanted


def _candidates(
    grouped: torch.Tensor, maxima: torch.Tensor, threshold: FloatArray
) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Ids and values of the tokens >= threshold, best first and by id among equals, padded with -inf to a rectangle."""
    num_rows, num_groups = maxima.shape
    limit: npt.NDArray[Any] = threshold[:, None]
    row_of, group_of = np.nonzero(maxima.numpy() >= limit)
    picked = grouped.view(-1, _GROUP)[torch.from_numpy(row_of * num_groups + group_of)].numpy()
    which, inside = np.nonzero(picked >= threshold[row_of][:, None])
    rows, ids, values = row_of[which], group_of[which] * _GROUP + inside, picked[which, inside]
    order = np.lexsort((-values, rows))  # stable, and ids ascend within a row
    counts = np.bincount(rows, minlength=num_rows)
    columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    table_ids = np.zeros((num_rows, int(counts.max())), dtype=np.int64)
    table_values = np.full(table_ids.shape, -np.inf, dtype=np.float32)
    table_ids[rows, columns] = ids[order]
    table_values[rows, columns] = values[order]
    return table_ids, table_values
