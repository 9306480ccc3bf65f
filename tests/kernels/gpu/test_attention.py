"""The Triton attention, interpreted, agrees with the reference on shapes that are not round numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernels.gpu import attention as gpu
from kernels.layout import KVLayout, layout_of
from kernels.reference import attention as reference
from tests.helpers.paged_caches import filled, poisoned_cache
from tests.helpers.tolerances import TOLERANCE, assert_close_only_to

SHAPES = [  # head_dim, num_kv_heads, group, block_size
    (32, 2, 1, 16),
    (64, 2, 3, 16),
    (80, 2, 1, 32),
    (96, 1, 7, 16),
    (128, 1, 8, 64),
]
SPECIAL = {"window": 37, "soft_cap": 1.5}
CASES = [(shape, dtype, {}) for shape in SHAPES for dtype in TOLERANCE]
CASES += [
    (SHAPES[1], torch.bfloat16, SPECIAL),
    (SHAPES[3], torch.float16, SPECIAL),
    (SHAPES[4], torch.float32, SPECIAL),
]


def query_of(num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """Random, `[num_tokens, num_heads, head_dim]`, a view of a fused projection as the engine's is."""
    head_dim, num_kv_heads, group, _ = shape
    fused = torch.randn(num_tokens, (group + 2) * num_kv_heads, head_dim, generator=torch.manual_seed(1)).to(dtype)
    return fused[:, : group * num_kv_heads]


def compare_decode(
    seq_lens: list[int], shape: tuple[int, int, int, int], dtype: torch.dtype, plan: Any = None, **options: Any
) -> None:
    cache, tables, lengths = filled(seq_lens, shape, dtype)
    query, scale = query_of(len(seq_lens), shape, dtype), 1 / math.sqrt(shape[0])
    got = gpu.paged_decode(query, cache, tables, lengths, scale, plan, **options)
    assert got.dtype == dtype
    expected = reference.paged_decode(query.float(), cache, tables, lengths, scale, **options)
    wrong = reference.paged_decode(query.float(), cache, tables, (lengths - 1).clamp_(1), scale, **options)
    assert_close_only_to(got, expected, wrong)


def compare_prefill(
    num_cached: list[int], num_new: list[int], shape: tuple[int, int, int, int], dtype: torch.dtype, **options: Any
) -> None:
    cache, tables, lengths = filled([c + n for c, n in zip(num_cached, num_new, strict=True)], shape, dtype)
    query, scale = query_of(sum(num_new), shape, dtype), 1 / math.sqrt(shape[0])
    starts = torch.tensor([0, *num_new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    got = gpu.paged_prefill(query, cache, tables, lengths, starts, scale, **options)
    assert got.dtype == dtype
    expected = reference.paged_prefill(query.float(), cache, tables, lengths, starts, scale, **options)
    options |= {"window": 2} if options.get("window") == 1 else {}  # a single token has the same weight at any scale
    wrong = reference.paged_prefill(query.float(), cache, tables, lengths, starts, 1.1 * scale, **options)
    assert_close_only_to(got, expected, wrong)


@pytest.mark.parametrize(("shape", "dtype", "options"), CASES)
def test_decode(shape: tuple[int, int, int, int], dtype: torch.dtype, options: dict[str, Any]) -> None:
    compare_decode([5, 1, 150], shape, dtype, **options)


@pytest.mark.parametrize(("shape", "dtype", "options"), CASES)
def test_prefill(shape: tuple[int, int, int, int], dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Chunks over cached prefixes beside a whole prompt and a single token."""
    compare_prefill([100, 0, 40, 16], [2, 35, 1, 18], shape, dtype, **options)


@pytest.mark.parametrize("num_sections", [1, 3, 20])
@pytest.mark.parametrize("options", [{}, {"window": 300, "soft_cap": 2.0}])
def test_a_long_sequence_is_the_same_in_any_number_of_sections(num_sections: int, options: dict[str, Any]) -> None:
    """Sections that hold nothing are left unwritten, which their NaN would show."""
    compare_decode([520, 3], SHAPES[1], torch.float32, gpu.DecodePlan(num_sections), **options)


@pytest.mark.parametrize("window", [1, 16, 33, 1000])
def test_windows_at_the_borders_of_blocks_and_tiles(window: int) -> None:
    compare_decode([97, 32, 33], SHAPES[1], torch.float32, window=window)
    compare_prefill([60, 0], [40, 33], SHAPES[1], torch.float32, window=window)


def test_pieces_of_a_prefill_end_at_the_sequences_ends() -> None:
    """Tiles of 32 rows hold 10 tokens of 3 heads: sequences of one piece, of exactly one, of several, in any order."""
    compare_prefill([0] * 8, [10, 1, 9, 11, 20, 1, 21, 3], (32, 1, 3, 16), torch.float32)
    compare_prefill([3, 50], [10, 10], (32, 1, 3, 16), torch.float32)


def test_more_query_heads_than_a_tile_has_rows() -> None:
    compare_decode([40], (32, 2, 17, 16), torch.float32)
    compare_decode([270], (32, 1, 20, 16), torch.float32, gpu.DecodePlan(2))
    compare_prefill([20], [5], (32, 1, 20, 16), torch.float32)
    with pytest.raises(ValueError, match="33 query heads per KV head are more than the 32 rows"):
        compare_prefill([20], [5], (32, 1, 33, 16), torch.float32)


def test_large_scores_neither_overflow_nor_lose_their_order() -> None:
    cache, tables, lengths = filled([70, 33], SHAPES[1], torch.float32)
    query = query_of(2, SHAPES[1], torch.float32) * 100
    for options in ({}, {"soft_cap": 30.0}):
        got = gpu.paged_decode(query, cache, tables, lengths, 0.125, **options)
        expected = reference.paged_decode(query, cache, tables, lengths, 0.125, **options)
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=2e-4)  # scores of 300 are rounded to 3e-5


@pytest.mark.parametrize("num_sections", [1, 4])
def test_rows_for_padding_give_zeros_and_write_nothing(num_sections: int) -> None:
    cache, tables, lengths = filled([40, 7, 9], SHAPES[1], torch.float32)
    query = query_of(3, SHAPES[1], torch.float32)
    whole = gpu.paged_decode(query, cache, tables, lengths, 0.125, gpu.DecodePlan(num_sections))
    lengths[1] = 0
    got = gpu.paged_decode(query, cache, tables, lengths, 0.125, gpu.DecodePlan(num_sections))
    assert torch.equal(got[[0, 2]], whole[[0, 2]])
    assert torch.equal(got[1], torch.zeros_like(got[1]))


def test_a_plan_allocates_its_scratch_once() -> None:
    cache, tables, lengths = filled([300], SHAPES[1], torch.float32)
    query = query_of(1, SHAPES[1], torch.float32)
    plan = gpu.plan_decode(layout_of(cache), tables, lengths, torch.float32)
    assert plan.num_sections == 2  # a table of 336 tokens
    first = gpu.paged_decode(query, cache, tables, lengths, 0.125, plan)
    scratch = plan.sections(query)
    assert torch.equal(gpu.paged_decode(query, cache, tables, lengths, 0.125, plan), first)
    assert plan.sections(query)[0] is scratch[0]


def test_a_cache_in_another_dtype_is_read_in_the_querys() -> None:
    cache, tables, lengths = filled([33, 20], SHAPES[1], torch.bfloat16)
    query = query_of(2, SHAPES[1], torch.float32)
    expected = reference.paged_decode(query, cache, tables, lengths, 0.125)
    assert_close_only_to(gpu.paged_decode(query, cache, tables, lengths, 0.125), expected, expected * 1.001)


@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_writing_stores_each_token_in_its_slot_and_nothing_else(
    shape: tuple[int, int, int, int], cache_dtype: torch.dtype, source_dtype: torch.dtype
) -> None:
    head_dim, num_kv_heads, _, block_size = shape
    layout = KVLayout(num_kv_heads, block_size, head_dim)
    slots = torch.tensor([5 * block_size + 3, 0, 2 * block_size - 1, 5 * block_size + 2])
    qkv = torch.randn(5, 3 * num_kv_heads, head_dim, generator=torch.manual_seed(2)).to(source_dtype)
    expected, got = poisoned_cache(layout, 7, cache_dtype), poisoned_cache(layout, 7, cache_dtype)
    reference.write_kv(expected, qkv[:4, num_kv_heads:], slots)
    gpu.write_kv(got, qkv[:, num_kv_heads:], torch.cat((slots, torch.tensor([-1]))))  # the last one is padding
    assert int(torch.isfinite(got).sum()) == 4 * 2 * num_kv_heads * head_dim
    torch.testing.assert_close(got, expected, atol=0, rtol=0, equal_nan=True)


def test_shapes_that_do_not_fit_are_refused() -> None:
    cache, tables, lengths = filled([3], SHAPES[1], torch.float32)
    with pytest.raises(ValueError, match="multiple of 2 KV heads"):
        gpu.paged_decode(torch.zeros(1, 7, 64), cache, tables, lengths, 1.0)
    with pytest.raises(ValueError, match="KV cache is a contiguous"):
        gpu.paged_decode(torch.zeros(1, 6, 64), cache[:, 0], tables, lengths, 1.0)
    with pytest.raises(ValueError, match="head_dim 512 is more than the 256"):
        gpu.paged_decode(torch.zeros(1, 2, 512), torch.zeros(1, 2, 1, 16, 512), tables, lengths, 1.0)
