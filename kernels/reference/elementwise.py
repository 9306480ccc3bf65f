"""Norm, rotary embedding and gate as their papers define them, in float32, rounded once at the end."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang & Sennrich 2019).

    Args:
        x: `[..., hidden_size]`.
        weight: `[hidden_size]`.
        eps: added to the mean square.
    """
    wide = x.float()
    return (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate each head by its token's position, in place (Su et al. 2021; dimension i is paired with i + head_dim/2).

    Args:
        heads: `[num_tokens, num_heads, head_dim]`, may be a view.
        cos: `[num_tokens, head_dim]`, float32, of each dimension's angle (both halves are the same).
        sin: likewise, the first half negated: a dimension is `x * cos + partner * sin`.
    """
    half = heads.shape[-1] // 2
    first, second = heads[..., :half].float(), heads[..., half:].float()
    c, s = cos[:, None, :half], sin[:, None, half:]
    rotated = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
    heads.copy_(rotated.to(heads.dtype))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` (Shazeer 2020).

    Args:
        gate_up: `[num_tokens, 2 * intermediate_size]`, the gate's half first.

    Returns:
        `[num_tokens, intermediate_size]`.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)
