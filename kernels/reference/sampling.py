"""Choosing tokens, one row at a time, in float64.

A truncated row's tokens are walked best first (equal ones by token id), an untruncated row's by token id; the token
where the running sum of the weights passes `uniform * total` is taken. So a row's token depends on that row alone.
"""

from __future__ import annotations

import torch


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
