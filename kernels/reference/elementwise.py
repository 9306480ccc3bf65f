"""Norm, rotary embedding and gate as their papers define them, in float32, rounded once at the end."""

from __future__ import annotations

import math

import torch

from kernels.reference.attention import write_kv


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension (Zhang & Sennrich 2019).

    Args:
        x: `[..., hidden_size]`.
        weight: `[hidden_size]`.
        eps: added to the mean square.
    """
    wide = x.float()
    return (wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `x` to `residual`, in place, and returns `rms_norm` of the sum as it was rounded.

    Args:
        x, residual: `[num_tokens, hidden_size]`.
        weight, eps: as in `rms_norm`.
    """
    residual += x
    return rms_norm(residual, weight, eps)


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


def rope_and_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Rotates queries in place, stores rotated keys, and values, in the cache; before that, norms them if asked to.

    Args:
        qkv: `[num_tokens, num_heads + 2 * num_kv_heads, head_dim]`, queries, keys, values. Whether its keys are changed
            too is left open: the cache has them.
        cos, sin: as in `rope`.
        kv_cache, slot_mapping: as in `write_kv`.
        num_heads, num_kv_heads: of queries, and of keys and of values.
        q_norm, k_norm: `[head_dim]`, weights of an `rms_norm` of each query and key, both or neither (Qwen3).
        eps: of that norm.
    """
    for norm, heads in ((q_norm, qkv[:, :num_heads]), (k_norm, qkv[:, num_heads : num_heads + num_kv_heads])):
        if norm is not None:
            heads.copy_(rms_norm(heads, norm, eps))
    rope(qkv[:, : num_heads + num_kv_heads], cos, sin)
    write_kv(kv_cache, qkv[:, num_heads:], slot_mapping)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` (Shazeer 2020).

    Args:
        gate_up: `[num_tokens, 2 * intermediate_size]`, the gate's half first.

    Returns:
        `[num_tokens, intermediate_size]`.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(gate_up.dtype)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` with the tanh approximation of GELU (Hendrycks & Gimpel 2016).

    Args:
        gate_up: `[num_tokens, 2 * intermediate_size]`, the gate's half first.

    Returns:
        `[num_tokens, intermediate_size]`.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return (0.5 * gate * (1 + torch.tanh(inner)) * up).to(gate_up.dtype)
