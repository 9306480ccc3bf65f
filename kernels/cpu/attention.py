"""Paged attention from PyTorch's own operations: gather the blocks, then dense attention over the copy.

A gather copies whole tiles (see `kernels.layout`), in the order that makes the result `[2, rows, heads, length, dim]`.
What depends on the block tables only is the plan, made once per step and used in every layer.

A sequence's last block may hold anything past its end, NaN included, and a masked score of NaN is still NaN: those
vectors of the gathered copy are set to zero before they are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.layout import KVLayout, check_query, layout_of, tiles_of_blocks, vectors_of_slots

# Padding a row costs the gather and the product of its padding; another group costs some calls per layer, about as
# much as this many tokens.
_MAX_PADDED_TOKENS = 512
# A larger group would not stay in the last cache between its gather and its products.
_MAX_GROUP_BYTES = 8 * 2**20
# From this many matrices on, batched bfloat16 products beat PyTorch's flash attention, which makes two small calls for
# each; below, their own overhead shows.
_MIN_PRODUCTS = 12
# Queries per masked call of a prefill over cached context: bounds the mask to tile x length.
_QUERY_TILE = 512


def plan_write(layout: KVLayout, slot_mapping: torch.Tensor) -> torch.Tensor:
    """Vector of each token's heads for `write_kv`: `[num_tokens * 2 * num_kv_heads]`."""
    return vectors_of_slots(layout, slot_mapping).reshape(-1)


def write_kv(
    kv_cache: torch.Tensor, key_value: torch.Tensor, slot_mapping: torch.Tensor, plan: torch.Tensor | None = None
) -> None:
    """See `kernels.reference.attention.write_kv`."""
    layout = layout_of(kv_cache)
    vectors = plan_write(layout, slot_mapping) if plan is None else plan
    source = key_value.reshape(-1, layout.head_dim).to(kv_cache.dtype)
    kv_cache.view(-1, layout.head_dim).index_copy_(0, vectors, source)


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows of similar length that are gathered and computed together."""

    rows: torch.Tensor | None  # [n] indices into the batch; None = all of it, in order
    num_rows: int
    num_blocks: int  # gathered per row
    tiles: torch.Tensor  # [2 * n * num_kv_heads * num_blocks] tiles to gather
    unfilled: torch.Tensor  # gathered vectors past the end of their row
    mask: torch.Tensor | None  # [n, 1, 1, num_blocks * block_size], 0 or -inf; None = every row is full


def plan_decode(
    layout: KVLayout, block_tables: torch.Tensor, seq_lens: torch.Tensor, dtype: torch.dtype
) -> list[DecodeGroup]:
    """Groups of rows for `paged_decode` with queries of `dtype`."""
    lengths = seq_lens.tolist()
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])  # sorted() is stable: equal ones stay in order
    max_tokens = _MAX_GROUP_BYTES // (2 * layout.num_kv_heads * layout.head_dim * dtype.itemsize)
    groups: list[list[int]] = []
    padded = 0
    for row in order:
        longest = lengths[groups[-1][0]] if groups else 0
        padded += longest - lengths[row]
        if not groups or padded > _MAX_PADDED_TOKENS or longest * (len(groups[-1]) + 1) > max_tokens:
            groups.append([])
            padded = 0
        groups[-1].append(row)
    if len(groups) == 1:
        return [_decode_group(layout, block_tables, seq_lens, None, dtype)]
    return [_decode_group(layout, block_tables, seq_lens, torch.tensor(sorted(rows)), dtype) for rows in groups]


def _decode_group(
    layout: KVLayout, block_tables: torch.Tensor, seq_lens: torch.Tensor, rows: torch.Tensor | None, dtype: torch.dtype
) -> DecodeGroup:
    tables = block_tables if rows is None else block_tables[rows]
    lengths = (seq_lens if rows is None else seq_lens[rows]).to(torch.int64)
    num_rows, num_blocks = int(lengths.numel()), layout.num_blocks_for(int(lengths.max()))
    # Entries past a row's last block may be anything: its first block stands in, and is zeroed in the copy.
    is_used = torch.arange(num_blocks) * layout.block_size < lengths.unsqueeze(1)  # [n, num_blocks]
    tables = torch.where(is_used, tables[:, :num_blocks], tables[:, :1])
    positions = torch.arange(num_blocks * layout.block_size)
    is_past = positions >= lengths.unsqueeze(1)  # [n, num_blocks * block_size]
    every_head = is_past.unsqueeze(1).expand(2, -1, layout.num_kv_heads, -1)
    mask = None
    if bool(is_past.any()):
        mask = torch.zeros(is_past.shape, dtype=dtype).masked_fill_(is_past, -torch.inf)[:, None, None, :]
    tiles = tiles_of_blocks(layout, tables).view(num_rows, 2, -1).transpose(0, 1)  # [2, n, num_kv_heads * num_blocks]
    unfilled = every_head.reshape(-1).nonzero().squeeze(1)
    return DecodeGroup(rows, num_rows, num_blocks, tiles.reshape(-1), unfilled, mask)


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    plan: list[DecodeGroup] | None = None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """See `kernels.reference.attention.paged_decode`; `plan` is what `plan_decode` made of the same tables."""
    layout = layout_of(kv_cache)
    check_query(query, layout)
    plan = plan_decode(layout, block_tables, seq_lens, query.dtype) if plan is None else plan
    out = torch.empty_like(query)
    for group in plan:
        q, lengths = (query, seq_lens) if group.rows is None else (query[group.rows], seq_lens[group.rows])
        mask = _with_window(group, lengths, layout, window, query.dtype) if window else group.mask
        result = _decode(q, kv_cache, layout, scale, group, mask, soft_cap)
        if group.rows is None:
            return result
        out[group.rows] = result
    return out


def _with_window(
    group: DecodeGroup, lengths: torch.Tensor, layout: KVLayout, window: int, dtype: torch.dtype
) -> torch.Tensor:
    """The group's mask, and -inf for what lies before each row's last `window` tokens."""
    positions = torch.arange(group.num_blocks * layout.block_size)
    is_old = positions < (lengths - window).unsqueeze(1)  # [n, num_blocks * block_size]
    mask = torch.zeros(is_old.shape, dtype=dtype).masked_fill_(is_old, -torch.inf)[:, None, None, :]
    return mask if group.mask is None else mask + group.mask


def _decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layout: KVLayout,
    scale: float,
    group: DecodeGroup,
    mask: torch.Tensor | None,
    soft_cap: float,
) -> torch.Tensor:
    flat = torch.index_select(kv_cache.view(-1, layout.block_size * layout.head_dim), 0, group.tiles)
    if group.unfilled.numel():
        flat.view(-1, layout.head_dim).index_fill_(0, group.unfilled, 0)
    shape = (2, group.num_rows, layout.num_kv_heads, group.num_blocks * layout.block_size, layout.head_dim)
    keys, values = flat.view(shape).to(query.dtype)
    # The query heads that share a KV head are the "queries" of one small attention: nothing is repeated for GQA.
    q = query.reshape(group.num_rows, layout.num_kv_heads, -1, layout.head_dim)
    if soft_cap:
        out = _capped(q, keys, values, mask, scale, soft_cap)
    elif query.dtype == torch.bfloat16 and group.num_rows * layout.num_kv_heads >= _MIN_PRODUCTS:
        out = _batched_products(q, keys, values, mask, scale)
    else:
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(query.shape)


def _capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    soft_cap: float,
) -> torch.Tensor:
    """Attention with capped scores, which PyTorch's own doesn't have: in float32, step by step.

    Args:
        query: `[n, heads, num, head_dim]`.
        keys, values: `[n, heads, length, head_dim]`.
        mask: what broadcasts to `[n, heads, num, length]`, 0 or -inf, or None.
        scale, soft_cap: as in the reference; soft_cap > 0.
    """
    scores = query.float() @ keys.float().transpose(-1, -2)  # [n, heads, num, length]
    scores = torch.tanh(scores.mul_(scale / soft_cap)).mul_(soft_cap)
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    return (weights @ values.float()).to(query.dtype)


def _batched_products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Softmax attention by batched bfloat16 products, which sum in float32 and round their result.

    Scores rounded to 8 bits would be off by percents where they are large. So the product is made twice: the second
    time the best score of the first is subtracted inside it, before rounding, and the scores that matter are near zero,
    where rounding is fine.

    Args:
        query: `[n, num_kv_heads, group, head_dim]`.
        keys, values: `[n, num_kv_heads, length, head_dim]`, contiguous.
        mask: `[n, 1, 1, length]` of 0 and -inf, or None.
        scale: factor of the dot products.

    Returns:
        The query's shape.
    """
    q, v = query.flatten(0, 1), values.flatten(0, 1)
    k = keys.flatten(0, 1).transpose(1, 2)  # [n * num_kv_heads, head_dim, length]
    scores = torch.bmm(q, k)  # [n * num_kv_heads, group, length]
    if mask is not None:
        scores.view(*query.shape[:3], -1).add_(mask)
    shift = (scores.amax(-1, keepdim=True) * -scale).view(*query.shape[:3], 1)
    shift = shift.expand(*query.shape[:3], keys.shape[2]) if mask is None else shift + mask
    shifted = torch.baddbmm(shift.reshape(scores.shape), q, k, alpha=scale)
    weights = torch.softmax(shifted, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.bmm(weights, v).view(query.shape)


@dataclass(frozen=True, slots=True)
class PrefillSequence:
    """One sequence's new tokens."""

    start: int  # its tokens in the batch: [start, end)
    end: int
    seq_len: int  # including them
    tiles: torch.Tensor  # [2 * num_kv_heads * num_blocks] tiles to gather
    masks: tuple[torch.Tensor, ...]  # per tile of queries [tile, visible], 0 or -inf; () = nothing is cached


def plan_prefill(
    layout: KVLayout,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    dtype: torch.dtype,
) -> list[PrefillSequence]:
    """What `paged_prefill` needs of each sequence, for queries of `dtype`."""
    starts = query_start_loc.tolist()
    plan = []
    for seq, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[seq], starts[seq + 1]
        num_cached = seq_len - (end - start)
        tiles = tiles_of_blocks(layout, block_tables[seq, : layout.num_blocks_for(seq_len)]).reshape(-1)
        masks = []
        for first in range(0, end - start if num_cached else 0, _QUERY_TILE):
            masks.append(_causal_mask(num_cached + first, min(_QUERY_TILE, end - start - first), 0, dtype))
        plan.append(PrefillSequence(start, end, seq_len, tiles, tuple(masks)))
    return plan


def _causal_mask(num_before: int, num: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    """What `num` tokens see of the `num_before` before them and of themselves: `[num, num_before + num]`, 0 or -inf."""
    mask = torch.full((num, num_before + num), -torch.inf, dtype=dtype)
    is_old = mask.tril(num_before - window) if window else None
    mask.triu_(num_before + 1)
    return mask if is_old is None else torch.minimum(mask, is_old)


def paged_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    plan: list[PrefillSequence] | None = None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """See `kernels.reference.attention.paged_prefill`; `plan` is what `plan_prefill` made of the same tables."""
    layout = layout_of(kv_cache)
    check_query(query, layout)
    plan = plan_prefill(layout, block_tables, seq_lens, query_start_loc, query.dtype) if plan is None else plan
    out = torch.empty_like(query)
    tiles = kv_cache.view(-1, layout.block_size * layout.head_dim)
    for seq in plan:
        kv = torch.index_select(tiles, 0, seq.tiles).view(2, 1, layout.num_kv_heads, -1, layout.head_dim)
        keys, values = kv[:, :, :, : seq.seq_len].to(query.dtype)  # [1, num_kv_heads, seq_len, head_dim]
        q = query[seq.start : seq.end].transpose(0, 1).unsqueeze(0)  # [1, num_heads, num_new, head_dim]
        if window or soft_cap:
            out[seq.start : seq.end] = _prefill_special(q, keys, values, scale, window, soft_cap)
            continue
        first = 0
        for mask in seq.masks:
            num, visible = mask.shape
            result = F.scaled_dot_product_attention(
                q[:, :, first : first + num], keys[:, :, :visible], values[:, :, :visible],
                attn_mask=mask, scale=scale, enable_gqa=True,
            )  # fmt: skip
            out[seq.start + first : seq.start + first + num] = result[0].transpose(0, 1)
            first += num
        if not seq.masks:
            result = F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale, enable_gqa=True)
            out[seq.start : seq.end] = result[0].transpose(0, 1)
    return out


def _prefill_special(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int, soft_cap: float
) -> torch.Tensor:
    """One sequence's prefill with a window or capped scores: `[num_new, num_heads, head_dim]`."""
    num_new, length = query.shape[2], keys.shape[2]
    grouped = query.view(1, keys.shape[1], -1, num_new, query.shape[3])  # [1, num_kv_heads, group, num_new, head_dim]
    parts = []
    for first in range(0, num_new, _QUERY_TILE):
        num = min(_QUERY_TILE, num_new - first)
        end = length - num_new + first + num
        begin = max(0, end - num - window + 1) if window else 0  # what no token of this tile sees is left out
        mask = _causal_mask(end - num, num, window, query.dtype)[:, begin:]
        q = grouped[0, :, :, first : first + num]  # [num_kv_heads, group, num, head_dim]
        k, v = keys[0, :, None, begin:end], values[0, :, None, begin:end]  # [num_kv_heads, 1, end - begin, head_dim]
        if soft_cap:
            result = _capped(q, k, v, mask, scale, soft_cap)
        else:
            k, v = k.expand(-1, q.shape[1], -1, -1), v.expand(-1, q.shape[1], -1, -1)
            result = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        parts.append(result.flatten(0, 1).transpose(0, 1))  # [num, num_heads, head_dim]
    return torch.cat(parts)
