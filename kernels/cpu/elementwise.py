"""Norm, rotary embedding and gate in few vectorised calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.cpu.attention import write_kv


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.reference.elementwise.rms_norm`; computed in float32, rounded once."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.reference.elementwise.add_rms_norm`."""
    residual += x
    return rms_norm(residual, weight, eps)


def rope(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `kernels.reference.elementwise.rope`; in place, in float32."""
    wide = heads.float()
    rotated = wide * cos.unsqueeze(1)
    heads.copy_(rotated.addcmul_(wide.roll(heads.shape[-1] // 2, -1), sin.unsqueeze(1)))


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
    """See `kernels.reference.elementwise.rope_and_write_kv`; one operation after the other."""
    if q_norm is not None and k_norm is not None:
        queries, keys = qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads]
        queries.copy_(rms_norm(queries, q_norm, eps))
        keys.copy_(rms_norm(keys, k_norm, eps))
    rope(qkv[:, : num_heads + num_kv_heads], cos, sin)
    write_kv(kv_cache, qkv[:, num_heads:], slot_mapping)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.elementwise.silu_and_mul`; rounded twice below float32."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.elementwise.gelu_and_mul`; rounded twice below float32."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
