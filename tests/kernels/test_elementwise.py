"""Norm, rotary embedding and gate: the fast versions agree with the readable ones."""

from __future__ import annotations

import pytest
import torch

from kernels.cpu import elementwise as cpu
from kernels.reference import elementwise as reference

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (33, 576)])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 30).to(dtype)
    weight = torch.randn(shape[1], generator=generator).to(dtype)
    torch.testing.assert_close(
        cpu.rms_norm(x, weight, 1e-5),
        reference.rms_norm(x, weight, 1e-5),
        atol=TOLERANCE[dtype],
        rtol=TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 64), (4, 80), (12, 6)])
def test_rope(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.manual_seed(0)
    angles = torch.rand(5, head_dim // 2, generator=generator) * 6
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((-angles, angles), 1).sin()
    fused = torch.randn(5, num_heads + 3, head_dim, generator=generator).to(dtype)
    got, expected = fused.clone(), fused.clone()
    cpu.rope(got[:, :num_heads], cos, sin)
    reference.rope(expected[:, :num_heads], cos, sin)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(got[:, num_heads:], fused[:, num_heads:])
    # A rotation keeps lengths, and at angle 0 everything.
    torch.testing.assert_close(
        got.float().norm(dim=-1), fused.float().norm(dim=-1), atol=4 * TOLERANCE[dtype], rtol=4 * TOLERANCE[dtype]
    )
    still = fused.clone()
    cpu.rope(still, torch.ones(5, head_dim), torch.zeros(5, head_dim))
    assert torch.equal(still, fused)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 8), (5, 192)])
def test_silu_and_mul(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape, generator=torch.manual_seed(0)) * 5).to(dtype)
    torch.testing.assert_close(
        cpu.silu_and_mul(gate_up), reference.silu_and_mul(gate_up), atol=TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype]
    )
