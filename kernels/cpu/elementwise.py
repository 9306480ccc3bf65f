"""Norm, rotary embedding and gate in few vectorised calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.reference.elementwise.rms_norm`; computed in float32, rounded once."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rope(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `kernels.reference.elementwise.rope`; in place, in float32."""
    wide = heads.float()
    rotated = wide * cos.unsqueeze(1)
    heads.copy_(rotated.addcmul_(wide.roll(heads.shape[-1] // 2, -1), sin.unsqueeze(1)))


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.elementwise.silu_and_mul`; rounded twice below float32."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
