"""The fast attention agrees with the readable one, on shapes that are not round numbers."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.cpu import attention as cpu
from kernels.layout import KVLayout, layout_of
from kernels.reference import attention as reference
from tests.helpers.paged_caches import filled, poisoned_cache

# float32: both sum in float32, in another order. bfloat16: the output is rounded to 8 bits (2^-9 relative) and the
# fast version also rounds the softmax's weights.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
SHAPES = [  # head_dim, num_kv_heads, group, block_size
    (64, 3, 3, 16),
    (80, 2, 1, 8),
    (96, 1, 4, 32),
    (40, 2, 3, 16),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seq_lens", [[1], [16, 32], [7, 33, 1, 64, 18], [5, 900, 3, 150, 2]])
def test_decode_agrees_with_the_reference(
    seq_lens: list[int], shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    cache, tables, lengths = filled(seq_lens, shape, dtype)
    query = torch.randn(len(seq_lens), shape[1] * shape[2], shape[0], generator=torch.manual_seed(1)).to(dtype)
    scale = 1 / math.sqrt(shape[0])
    expected = reference.paged_decode(query, cache, tables, lengths, scale)
    assert torch.isfinite(expected).all()
    got = cpu.paged_decode(query, cache, tables, lengths, scale)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_rows_of_very_different_length_are_not_padded_to_the_longest() -> None:
    _, tables, lengths = filled([5, 900, 3, 150, 2], SHAPES[0], torch.float32)
    groups = cpu.plan_decode(KVLayout(3, 16, 64), tables, lengths, torch.float32)
    assert [group.num_blocks for group in groups] == [57, 10]
    gathered = sum(group.num_rows * group.num_blocks * 16 for group in groups)
    assert gathered - int(lengths.sum()) <= 512 + 5 * 16


def test_a_group_stays_small_enough_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, tables, lengths = filled([40, 40, 40, 40, 40], SHAPES[0], torch.float32)
    layout = layout_of(cache)
    monkeypatch.setattr(cpu, "_MAX_GROUP_BYTES", 2 * 48 * 2 * 3 * 64 * 4)  # two rows of 48 tokens
    groups = cpu.plan_decode(layout, tables, lengths, torch.float32)
    assert [group.num_rows for group in groups] == [2, 2, 1]
    query = torch.randn(5, 9, 64, generator=torch.manual_seed(1))
    torch.testing.assert_close(
        cpu.paged_decode(query, cache, tables, lengths, 0.125, groups),
        reference.paged_decode(query, cache, tables, lengths, 0.125),
        atol=2e-5,
        rtol=2e-5,
    )


@pytest.mark.parametrize("is_batched", [False, True])
def test_large_scores_keep_their_precision_in_bfloat16(is_batched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores around 40: rounded to 8 bits they would be off by 0.1, the weights by 10 %."""
    monkeypatch.setattr(cpu, "_MIN_PRODUCTS", 1 if is_batched else 10**9)
    cache, tables, lengths = filled([70, 64, 33, 50], SHAPES[0], torch.bfloat16)
    query = (torch.randn(4, 9, 64, generator=torch.manual_seed(1)) * 8).bfloat16()
    expected = reference.paged_decode(query.float(), cache, tables, lengths, 0.125)
    got = cpu.paged_decode(query, cache, tables, lengths, 0.125).float()
    assert (got - expected).norm() / expected.norm() < 0.004


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 40}, {"soft_cap": 2.0}, {"window": 21, "soft_cap": 1.5}])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_batched", [False, True])
def test_windows_and_capped_scores_agree_with_the_reference(
    is_batched: bool, dtype: torch.dtype, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "_MIN_PRODUCTS", 1 if is_batched else 10**9)
    monkeypatch.setattr(cpu, "_QUERY_TILE", 8)
    monkeypatch.setattr(cpu, "_MAX_PADDED_TOKENS", 50)  # several groups
    cache, tables, lengths = filled([5, 133, 1, 64, 90], SHAPES[0], dtype)
    generator = torch.manual_seed(1)
    query = torch.randn(5, 9, 64, generator=generator).to(dtype)
    args = (query, cache, tables, lengths, 0.125)
    expected = reference.paged_decode(*args, **options)
    got = cpu.paged_decode(*args, **options)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert not torch.allclose(reference.paged_decode(*args), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    starts = torch.tensor([0, 5, 30, 31, 34, 54])  # whole, chunks over cached context
    query = torch.randn(54, 9, 64, generator=generator).to(dtype)
    prefill = (query, cache, tables, lengths, starts, 0.125)
    expected = reference.paged_prefill(*prefill, **options)
    got = cpu.paged_prefill(*prefill, **options)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_window_of_one_sees_only_its_own_value_and_a_large_cap_changes_nothing() -> None:
    """The oracle itself, once, where the answer is known."""
    cache, tables, lengths = filled([21], SHAPES[0], torch.float32)
    query = torch.randn(1, 9, 64, generator=torch.manual_seed(1))
    values = cache[int(tables[0, 1]), 1, :, 20 % 16]  # [3, 64]
    got = reference.paged_decode(query, cache, tables, lengths, 0.125, window=1)[0]
    torch.testing.assert_close(got, values.repeat_interleave(3, dim=0))
    plain = reference.paged_decode(query, cache, tables, lengths, 0.125)
    capped = reference.paged_decode(query, cache, tables, lengths, 0.125, soft_cap=1e4)
    torch.testing.assert_close(capped, plain)
    flat = reference.paged_decode(query, cache, tables, lengths, 0.125, soft_cap=1e-6)[0]  # all scores near zero
    mean = torch.cat([cache[int(tables[0, 0]), 1], cache[int(tables[0, 1]), 1, :, :5]], dim=1).mean(1)
    torch.testing.assert_close(flat, mean.repeat_interleave(3, dim=0), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("num_cached", "num_new"),
    [([0], [1]), ([0, 0], [17, 5]), ([40, 0, 3], [9, 16, 1]), ([16], [40]), ([100, 7], [2, 30])],
)
def test_prefill_agrees_with_the_reference(
    num_cached: list[int], num_new: list[int], shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    cache, tables, lengths = filled([c + n for c, n in zip(num_cached, num_new, strict=True)], shape, dtype)
    query = torch.randn(sum(num_new), shape[1] * shape[2], shape[0], generator=torch.manual_seed(1)).to(dtype)
    starts = torch.tensor([0, *num_new]).cumsum(0)
    scale = 1 / math.sqrt(shape[0])
    expected = reference.paged_prefill(query, cache, tables, lengths, starts, scale)
    assert torch.isfinite(expected).all()
    got = cpu.paged_prefill(query, cache, tables, lengths, starts, scale)
    torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_long_chunk_over_cached_context_is_computed_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_QUERY_TILE", 8)
    cache, tables, lengths = filled([45], SHAPES[0], torch.float32)
    query = torch.randn(30, 9, 64, generator=torch.manual_seed(1))
    starts = torch.tensor([0, 30])
    plan = cpu.plan_prefill(layout_of(cache), tables, lengths, starts, torch.float32)
    assert [tuple(mask.shape) for mask in plan[0].masks] == [(8, 23), (8, 31), (8, 39), (6, 45)]
    got = cpu.paged_prefill(query, cache, tables, lengths, starts, 0.125, plan)
    torch.testing.assert_close(
        got, reference.paged_prefill(query, cache, tables, lengths, starts, 0.125), atol=2e-5, rtol=2e-5
    )


def test_the_reference_is_softmax_attention() -> None:
    """Against the textbook formula on plain tensors, so that the oracle itself is checked once."""
    cache, tables, lengths = filled([21], SHAPES[0], torch.float32)
    query = torch.randn(1, 9, 64, generator=torch.manual_seed(1))
    blocks = cache[tables[0, :2].long()]  # [2, 2, 3, 16, 64]
    keys, values = (blocks[:, i].transpose(1, 2).reshape(-1, 3, 64)[:21] for i in (0, 1))
    scores = torch.einsum("hd,lhd->hl", query[0], keys.repeat_interleave(3, dim=1)) / 8
    expected = torch.einsum("hl,lhd->hd", scores.softmax(-1), values.repeat_interleave(3, dim=1))
    torch.testing.assert_close(reference.paged_decode(query, cache, tables, lengths, 0.125)[0], expected)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_writing_stores_each_token_in_its_slot_and_nothing_else(
    shape: tuple[int, int, int, int], cache_dtype: torch.dtype
) -> None:
    head_dim, num_kv_heads, _, block_size = shape
    layout = KVLayout(num_kv_heads, block_size, head_dim)
    slots = torch.tensor([5 * block_size + 3, 0, 2 * block_size - 1, 5 * block_size + 2])
    qkv = torch.randn(4, 3 * num_kv_heads, head_dim, generator=torch.manual_seed(2))
    caches = [poisoned_cache(layout, 7, cache_dtype) for _ in range(2)]
    for module, cache in zip((reference, cpu), caches, strict=True):
        module.write_kv(cache, qkv[:, num_kv_heads:], slots)  # a view of the fused projection
    assert int(torch.isfinite(caches[0]).sum()) == 4 * 2 * num_kv_heads * head_dim
    torch.testing.assert_close(caches[0], caches[1], atol=0, rtol=0, equal_nan=True)


def test_a_plan_gives_the_same_result_as_none() -> None:
    cache, tables, lengths = filled([33, 20], SHAPES[0], torch.float32)
    query = torch.randn(2, 9, 64, generator=torch.manual_seed(1))
    plan = cpu.plan_decode(layout_of(cache), tables, lengths, torch.float32)
    assert torch.equal(
        cpu.paged_decode(query, cache, tables, lengths, 0.125, plan),
        cpu.paged_decode(query, cache, tables, lengths, 0.125),
    )


def test_a_cache_in_another_dtype_is_read_in_the_querys() -> None:
    cache, tables, lengths = filled([33, 20], SHAPES[0], torch.bfloat16)
    query = torch.randn(2, 9, 64, generator=torch.manual_seed(1))
    torch.testing.assert_close(
        cpu.paged_decode(query, cache, tables, lengths, 0.125),
        reference.paged_decode(query, cache, tables, lengths, 0.125),
        atol=2e-5,
        rtol=2e-5,
    )


@pytest.mark.parametrize("module", [cpu, reference])
def test_shapes_that_do_not_fit_are_refused(module: object) -> None:
    cache, tables, lengths = filled([3], SHAPES[0], torch.float32)
    with pytest.raises(ValueError, match="multiple of 3 KV heads"):
        module.paged_decode(torch.zeros(1, 8, 64), cache, tables, lengths, 1.0)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="KV cache is a contiguous"):
        module.paged_decode(torch.zeros(1, 9, 64), cache[:, 0], tables, lengths, 1.0)  # type: ignore[attr-defined]
