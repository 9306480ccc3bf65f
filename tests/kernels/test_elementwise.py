"""Norm, rotary embedding and gate: the fast versions agree with the readable ones."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from kernels.cpu import elementwise as cpu
from kernels.layout import KVLayout
from kernels.reference import elementwise as reference
from tests.helpers.paged_caches import poisoned_cache

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


@pytest.mark.parametrize("module", [cpu, reference])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_add_rms_norm_is_the_addition_and_then_the_norm(module: ModuleType, dtype: torch.dtype) -> None:
    generator = torch.manual_seed(0)
    x, residual = (torch.randn(7, 96, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(96, generator=generator).to(dtype)
    total = x + residual
    got = module.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(got, module.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rope_and_write_kv_agrees_with_the_reference(dtype: torch.dtype, has_norm: bool) -> None:
    generator = torch.manual_seed(0)
    layout, slots = KVLayout(2, 16, 80), torch.tensor([3, 40, 17])
    angles = torch.rand(3, 40, generator=generator) * 6
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((-angles, angles), 1).sin()
    weights = torch.randn(2, 80, generator=generator).to(dtype)
    norms = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-5} if has_norm else {}
    fused = torch.randn(3, 9, 80, generator=generator).to(dtype)
    results = []
    for module in (cpu, reference):
        qkv, cache = fused.clone(), poisoned_cache(layout, 4, dtype)
        module.rope_and_write_kv(qkv, cos, sin, cache, slots, 5, 2, **norms)
        results.append((qkv[:, :5], cache))
    (queries, cache), (expected, expected_cache) = results
    tolerance = {"atol": 4 * TOLERANCE[dtype], "rtol": 4 * TOLERANCE[dtype]}
    torch.testing.assert_close(queries, expected, **tolerance)
    torch.testing.assert_close(cache, expected_cache, equal_nan=True, **tolerance)
    assert int(torch.isfinite(cache).sum()) == 3 * 4 * 80
    assert torch.equal(cache[2, 1, :, 8], fused[1, 7:])  # values are stored as they are


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
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_gates(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape, generator=torch.manual_seed(0)) * 5).to(dtype)
    got, expected = getattr(cpu, name)(gate_up), getattr(reference, name)(gate_up)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=2 * TOLERANCE[dtype])


def test_the_reference_gates_are_the_named_functions() -> None:
    gate_up = torch.randn(5, 192, generator=torch.manual_seed(0)) * 3
    gate, up = gate_up.chunk(2, dim=1)
    torch.testing.assert_close(reference.silu_and_mul(gate_up), F.silu(gate) * up)
    torch.testing.assert_close(reference.gelu_and_mul(gate_up), F.gelu(gate, approximate="tanh") * up)
