"""Paged attention written to be read: loops over sequences and tokens, float32 throughout.

It follows the block table one token at a time and reads no slot that a sequence hasn't filled. The plans that the fast
implementations prepare once per step are accepted and not needed.
"""

from __future__ import annotations

import torch

from kernels.layout import KVLayout, check_query, layout_of


def plan_write(layout: KVLayout, slot_mapping: torch.Tensor) -> None:
    """Nothing to prepare."""


def plan_decode(layout: KVLayout, block_tables: torch.Tensor, seq_lens: torch.Tensor, dtype: torch.dtype) -> None:
    """Nothing to prepare."""


def plan_prefill(
    layout: KVLayout,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Nothing to prepare."""


def write_kv(kv_cache: torch.Tensor, key_value: torch.Tensor, slot_mapping: torch.Tensor, plan: None = None) -> None:
    """Store each token's keys and values.

    Args:
        kv_cache: one layer's cache, see `kernels.layout`; changed in place.
        key_value: `[num_tokens, 2 * num_kv_heads, head_dim]`, all keys' heads, then all values' heads.
        slot_mapping: `[num_tokens]`, where each token goes.
    """
    layout = layout_of(kv_cache)
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, layout.block_size)
        kv_cache[block, 0, :, offset] = key_value[token, : layout.num_kv_heads].to(kv_cache.dtype)
        kv_cache[block, 1, :, offset] = key_value[token, layout.num_kv_heads :].to(kv_cache.dtype)


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    plan: None = None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Attention of one new token per sequence over all its tokens (its own KV is already in the cache).

    Args:
        query: `[num_seqs, num_heads, head_dim]`.
        kv_cache: one layer's cache, see `kernels.layout`.
        block_tables: `[num_seqs, max_blocks]`; entries past a sequence's last block are never read.
        seq_lens: `[num_seqs]`, tokens of each sequence, >= 1.
        scale: factor of the dot products.
        window: tokens that a token sees, itself included, the last ones; 0 = all.
        soft_cap: s > 0: a score x counts as `s * tanh(x / s)` (Gemma 2); 0 = as it is.

    Returns:
        `[num_seqs, num_heads, head_dim]`, query's dtype.
    """
    starts = torch.arange(query.shape[0] + 1)
    return paged_prefill(query, kv_cache, block_tables, seq_lens, starts, scale, window=window, soft_cap=soft_cap)


def paged_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    plan: None = None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Causal attention of the last tokens of each sequence over all its tokens (their KV is already in the cache).

    Sequence i has tokens `query_start_loc[i] : query_start_loc[i + 1]` of `query`; they are its last ones.

    Args:
        query: `[num_tokens, num_heads, head_dim]`.
        kv_cache, block_tables, seq_lens, scale, window, soft_cap: as in `paged_decode`.
        query_start_loc: `[num_seqs + 1]`.

    Returns:
        `[num_tokens, num_heads, head_dim]`, query's dtype.
    """
    layout = layout_of(kv_cache)
    group = check_query(query, layout)
    out = torch.empty_like(query)
    starts = query_start_loc.tolist()
    for seq, seq_len in enumerate(seq_lens.tolist()):
        keys, values = _read(kv_cache, layout, block_tables[seq].tolist(), seq_len)  # [seq_len, num_kv_heads, head_dim]
        num_new = starts[seq + 1] - starts[seq]
        for new in range(num_new):
            token, end = starts[seq] + new, seq_len - num_new + new + 1
            visible = slice(max(0, end - window) if window else 0, end)
            for head in range(query.shape[1]):
                k, v = keys[visible, head // group], values[visible, head // group]  # [visible, head_dim]
                scores = (k @ query[token, head].float()) * scale  # [visible]
                scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
                weights = torch.softmax(scores, dim=0)
                out[token, head] = (weights @ v).to(query.dtype)
    return out


def _read(
    kv_cache: torch.Tensor, layout: KVLayout, block_table: list[int], seq_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.empty(seq_len, layout.num_kv_heads, layout.head_dim, device=kv_cache.device)
    values = torch.empty_like(keys)
    for position in range(seq_len):
        block, offset = block_table[position // layout.block_size], position % layout.block_size
        keys[position] = kv_cache[block, 0, :, offset].float()
        values[position] = kv_cache[block, 1, :, offset].float()
    return keys, values
