"""Choosing tokens, one row at a time, in float64.

A truncated row's tokens are walked best first (equal ones by token id), an untruncated row's by token id; the token
where the running sum of the weights passes `uniform * total` is taken. So a row's token depends on that row alone.
"""

from __future__ import annotations

import torch

_MAX_LOGIT = 1e30  # a penalty's bound, so that an extreme one leaves numbers that a temperature can still divide


def all_finite(logits: torch.Tensor) -> torch.Tensor:
    """Whether all of each row is finite.

    Args:
        logits: `[num_rows, vocab_size]`, float32.

    Returns:
        `[num_rows]`, bool.
    """
    return torch.isfinite(logits).all(1)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The best token of each row, the smallest id among equals.

    Args:
        logits: `[num_rows, vocab_size]`, float32.

    Returns:
        `[num_rows]`, int64.
    """
    best = [int((row == row.max()).nonzero()[0, 0]) for row in logits]
    return torch.tensor(best, dtype=torch.int64)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """One token per row: temperature, then top_k, top_p (of what top_k left) and min_p, then the inverse of the CDF.

    Args:
        logits: `[num_rows, vocab_size]`, float32.
        temperature: `[num_rows]`, float32, > 0.
        top_k: `[num_rows]`, int64, <= 0 = all.
        top_p: `[num_rows]`, float64, in (0, 1]: the fewest best tokens whose probability reaches top_p.
        min_p: `[num_rows]`, float64: tokens at least min_p times as likely as the best.
        uniform: `[num_rows]`, float64, in [0, 1).

    Returns:
        `[num_rows]`, int64.
    """
    chosen = []
    for row, scaled in enumerate(logits / temperature.unsqueeze(1)):
        k, p, least = int(top_k[row]), float(top_p[row]), float(min_p[row])
        weights = torch.exp(scaled.double() - scaled.max())
        if k <= 0 and p >= 1 and least <= 0:
            ids = torch.arange(scaled.numel())
        else:
            ids = torch.argsort(scaled, descending=True, stable=True)
            ids = ids[:k] if k > 0 else ids
            running = torch.cumsum(weights[ids], 0)
            if p < 1:
                ids = ids[running - weights[ids] < p * running[-1]]
            ids = ids[weights[ids] >= least]
        running = torch.cumsum(weights[ids], 0)
        index = int((running <= float(uniform[row]) * running[-1]).sum())
        chosen.append(int(ids[min(index, ids.numel() - 1)]))
    return torch.tensor(chosen, dtype=torch.int64)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) per (seed, position): two rounds of the splitmix64 generator (Steele et al. 2014).

    Args:
        seeds: `[n]`, int64, the bits of an unsigned number.
        positions: `[n]`, int64, >= 0.

    Returns:
        `[n]`, float64.
    """
    numbers = []
    for seed, position in zip(seeds.tolist(), positions.tolist(), strict=True):
        numbers.append((_mix((_mix(seed) + position) % 2**64) >> 11) * 2.0**-53)
    return torch.tensor(numbers, dtype=torch.float64)


def _mix(state: int) -> int:
    z = (state + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def penalise(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num_prompt_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Lower the logits of known tokens, in place: repetition (Keskar et al. 2019), then presence and frequency.

    Args:
        logits: `[num_rows, vocab_size]`, float32.
        token_ids: `[num_rows, max_tokens]`, int32; entries past a row's tokens are never read.
        num_prompt_tokens: `[num_rows]`, of them the prompt's, which come first.
        num_tokens: `[num_rows]`, known tokens.
        repetition: `[num_rows]`, float32, > 0: divides a known token's positive logit, multiplies another; 1 = none.
        presence: `[num_rows]`, float32, subtracted once from each token of the output.
        frequency: `[num_rows]`, float32, subtracted as often as the output has the token.
        counts: `[num_rows, vocab_size]`, int32, scratch: zeros, and zeros again afterwards.
    """
    for row in range(logits.shape[0]):
        known = token_ids[row, : int(num_tokens[row])].tolist()
        output = known[int(num_prompt_tokens[row]) :]
        for token in set(known):
            x = logits[row, token]
            if repetition[row] != 1:
                x = (x / repetition[row] if x > 0 else x * repetition[row]).clamp(-_MAX_LOGIT, _MAX_LOGIT)
            if count := output.count(token):
                x = x - (frequency[row] * count + presence[row])
            logits[row, token] = x


def add_bias(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor, values: torch.Tensor) -> None:
    """Add `values` `[n]` to the logits of `token_ids` `[n]` in `rows` `[n]` (int64), in place."""
    for row, token, value in zip(rows.tolist(), token_ids.tolist(), values, strict=True):
        logits[row, token] += value


def forbid(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Set the logits of `token_ids` `[n]` in `rows` `[n]` (int64) to -inf, in place."""
    for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
        logits[row, token] = -torch.inf
