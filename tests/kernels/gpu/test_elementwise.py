"""Norm, rotary embedding, cache write and gates in Triton, interpreted, agree with the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.gpu import elementwise as gpu
from kernels.layout import KVLayout
from kernels.reference import elementwise as reference
from tests.helpers.paged_caches import poisoned_cache
from tests.helpers.tolerances import TOLERANCE, assert_close_only_to


def angles(num_tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin of random angles, `[num_tokens, head_dim]`."""
    half = torch.rand(num_tokens, head_dim // 2, generator=torch.manual_seed(3)) * 6
    return torch.cat((half, half), 1).cos(), torch.cat((-half, half), 1).sin()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 64), (7, 96), (33, 576), (3, 1025)])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.manual_seed(0)
    x = (torch.randn(shape, generator=generator) * 30).to(dtype)
    weight = torch.randn(shape[1], generator=generator).to(dtype)
    expected = reference.rms_norm(x, weight, 1e-5)
    wrong = reference.rms_norm(x.float(), weight, 1e-5) * 1.02
    assert_close_only_to(gpu.rms_norm(x, weight, 1e-5), expected, wrong)
    assert_close_only_to(gpu.rms_norm(x[0], weight, 1e-5), expected[0], wrong[0])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [32, 80, 128])
def test_rms_norm_of_each_head_of_a_view(head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.manual_seed(0)
    heads = torch.randn(9, 7, head_dim, generator=generator).to(dtype)[:, 2:5]
    weight = torch.randn(head_dim, generator=generator).to(dtype)
    expected = reference.rms_norm(heads, weight, 1e-6)
    assert_close_only_to(gpu.rms_norm(heads, weight, 1e-6), expected, expected * 1.02)


def test_eps_counts_where_values_are_small() -> None:
    x, weight = torch.full((1, 64), 1e-3), torch.ones(64)
    assert_close_only_to(gpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), torch.ones(1, 64))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 64), (5, 576)])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.manual_seed(0)
    x, residual = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(shape[1], generator=generator).to(dtype)
    sums = residual.clone()
    got = gpu.add_rms_norm(x, sums, weight, 1e-5)
    expected = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert_close_only_to(got, expected, expected * 1.02)
    assert torch.equal(sums, residual)  # both rounded once


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 64), (4, 80), (21, 32)])
def test_rope(num_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    cos, sin = angles(5, head_dim)
    fused = torch.randn(5, num_heads + 3, head_dim, generator=torch.manual_seed(0)).to(dtype)
    got, expected = fused.clone(), fused.clone()
    gpu.rope(got[:, :num_heads], cos, sin)
    reference.rope(expected[:, :num_heads], cos, sin)
    assert_close_only_to(got, expected, fused)
    assert torch.equal(got[:, num_heads:], fused[:, num_heads:])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", [(3, 1, 32, 16), (5, 2, 80, 32), (14, 2, 64, 64), (16, 8, 128, 16)])
def test_rope_and_write_kv(shape: tuple[int, int, int, int], has_norm: bool, dtype: torch.dtype) -> None:
    num_heads, num_kv_heads, head_dim, block_size = shape
    generator = torch.manual_seed(0)
    layout = KVLayout(num_kv_heads, block_size, head_dim)
    cos, sin = angles(4, head_dim)
    weights = torch.randn(2, head_dim, generator=generator).to(dtype)
    norms: dict[str, Any] = {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-5} if has_norm else {}
    fused = torch.randn(4, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    slots = torch.tensor([3, 2 * block_size, block_size + 1, -1])  # the last one is padding
    got, expected = fused.clone(), fused[:3].clone()
    cache, expected_cache = poisoned_cache(layout, 4, dtype), poisoned_cache(layout, 4, dtype)
    gpu.rope_and_write_kv(got, cos, sin, cache, slots, num_heads, num_kv_heads, **norms)
    reference.rope_and_write_kv(expected, cos[:3], sin[:3], expected_cache, slots[:3], num_heads, num_kv_heads, **norms)
    assert_close_only_to(got[:3, :num_heads], expected[:, :num_heads], fused[:3, :num_heads])
    assert torch.equal(torch.isnan(cache), torch.isnan(expected_cache))
    assert int(torch.isfinite(cache).sum()) == 3 * 2 * num_kv_heads * head_dim
    assert_close_only_to(cache.nan_to_num(), expected_cache.nan_to_num(), expected_cache.nan_to_num() * 1.02)


def test_heads_that_cannot_be_rotated_in_place_are_refused() -> None:
    cos, sin = angles(2, 32)
    with pytest.raises(ValueError, match="each token's must lie together"):
        gpu.rope(torch.zeros(2, 4, 64)[..., ::2], cos, sin)
    cache = torch.zeros(2, 2, 2, 16, 32)
    with pytest.raises(ValueError, match=r"isn't 4 \+ 2 \* 2 heads of 32"):
        gpu.rope_and_write_kv(torch.zeros(2, 7, 32), cos, sin, cache, torch.tensor([0, 1]), 4, 2)
    with pytest.raises(ValueError, match="both or neither"):
        gpu.rope_and_write_kv(
            torch.zeros(2, 8, 32), cos, sin, cache, torch.tensor([0, 1]), 4, 2, q_norm=torch.ones(32)
        )  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 8), (5, 192), (2, 2206)])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
def test_gates(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = (torch.randn(shape, generator=torch.manual_seed(0)) * 5).to(dtype)
    expected = getattr(reference, name)(gate_up)
    assert_close_only_to(getattr(gpu, name)(gate_up), expected, expected * 1.02)
    other = {"silu_and_mul": "gelu_and_mul", "gelu_and_mul": "silu_and_mul"}[name]
    assert_close_only_to(getattr(gpu, name)(gate_up), expected, getattr(reference, other)(gate_up))


def test_gates_of_extreme_values_are_finite() -> None:
    gate_up = torch.tensor([[-1e4, -100.0, 100.0, 1e4, 1.0, 1.0, 1.0, 1.0]])
    for gate in (gpu.silu_and_mul, gpu.gelu_and_mul):
        torch.testing.assert_close(gate(gate_up), torch.tensor([[0.0, 0.0, 100.0, 1e4]]))


def test_nothing_to_do_is_no_launch() -> None:
    none = torch.zeros(0, 4, 32)
    gpu.rope(none, none[:, 0], none[:, 0])
    assert gpu.rms_norm(none, torch.ones(32), 1e-5).shape == (0, 4, 32)
    assert gpu.silu_and_mul(torch.zeros(0, 64)).shape == (0, 32)
