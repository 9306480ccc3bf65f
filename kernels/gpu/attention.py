"""Paged attention on a device: what `kernels.reference.attention` computes, one pass over the block table.

Nothing here waits for the device or reads a value from it. Grids come from shapes alone, and a program that has nothing
to do ends at once; so a captured graph stays right while lengths change. Online softmax after Milakov and Gimelshein
2018, sections of long sequences after Dao et al., "Flash-Decoding for long-context inference", 2023.

Rows for padding: a slot < 0 is not written, a sequence of length 0 gives zeros.

    program of           computes
    _write               all heads of one token
    _decode              the query heads of one KV head over one section of one sequence
    _reduce              one head of one sequence, from its sections
    _prefill             the query heads of one KV head for some tokens of one sequence
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.gpu.precision import dot, narrow
from kernels.gpu.tiling import (
    DECODE,
    MAX_SPLITS,
    MIN_SECTION,
    num_splits,
    padded,
    padded_head_dim,
    prefill_tiling,
)
from kernels.layout import KVLayout, check_query, layout_of

_LOG2_E = tl.constexpr(1.4426950408889634)
_MIN_SECTION = tl.constexpr(MIN_SECTION)


@triton.jit(do_not_specialize=["num_heads"])
def _write(
    cache, key_value, slot_mapping, stride_token, num_heads,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    heads, dims = tl.arange(0, HEADS)[:, None], tl.arange(0, DIM)[None, :]
    is_real = (heads < num_heads) & (dims < HEAD_DIM)
    values = tl.load(key_value + token * stride_token + heads * HEAD_DIM + dims, mask=is_real, other=0.0)
    tiles = slot // BLOCK_SIZE * num_heads + heads
    vectors = tiles * BLOCK_SIZE + slot % BLOCK_SIZE
    converted = narrow(values.to(tl.float32), cache.dtype.element_ty)
    tl.store(cache + vectors * HEAD_DIM + dims, converted, mask=is_real)


@triton.jit
def _walk(
    query, best, total, acc, cache, table, head, num_kv_heads, begin, end, first, last, scale, cap,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    IS_MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Online softmax of rows `query` [ROWS, DIM] over positions [begin, end) of one KV head.

    A row sees positions [first, last]; without IS_MASKED it sees all of them, and end - begin is a multiple of TILE.
    `best` [ROWS] is the largest score so far as a power of two, `total` [ROWS] the sum of weights, `acc` [ROWS, DIM].
    """
    dims = tl.arange(0, DIM)
    is_dim = dims < HEAD_DIM
    for start in tl.range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        if IS_MASKED:
            blocks = tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0).to(tl.int64)
            is_real = (positions < end)[:, None] & is_dim[None, :]
        else:
            blocks = tl.load(table + positions // BLOCK_SIZE).to(tl.int64)
            is_real = tl.full((TILE, 1), True, tl.int1) & is_dim[None, :]
        vectors = (blocks * 2 * num_kv_heads + head) * BLOCK_SIZE + positions % BLOCK_SIZE  # of keys, [TILE]
        keys = cache + vectors[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(keys, mask=is_real, other=0.0)  # [TILE, DIM]
        scores = dot(query, narrow(k.to(tl.float32), query.dtype).trans()) * scale  # [ROWS, TILE]
        if HAS_CAP:
            # tanh by a power that can't overflow.
            power = tl.exp2(tl.abs(scores) * (-2 * _LOG2_E / cap))
            magnitude = cap * (1 - power) / (1 + power)
            scores = tl.where(scores < 0, -magnitude, magnitude)
        scores *= _LOG2_E
        if IS_MASKED:
            is_seen = (positions[None, :] <= last[:, None]) & (positions < end)[None, :]
            if HAS_WINDOW:
                is_seen &= positions[None, :] >= first[:, None]
            scores = tl.where(is_seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        anchor = tl.where(new_best == float("-inf"), 0.0, new_best)  # a row that has seen nothing yet
        weights = tl.exp2(scores - anchor[:, None])
        shrink = tl.exp2(best - anchor)
        v = tl.load(keys + num_kv_heads * (BLOCK_SIZE * HEAD_DIM), mask=is_real, other=0.0)  # [TILE, DIM]
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + dot(narrow(weights, query.dtype), narrow(v.to(tl.float32), query.dtype))
        best = new_best
    return best, total, acc


@triton.jit
def _section(seq_len, begin, num_sections, TILE: tl.constexpr):
    """Tokens of each section but the last of [begin, seq_len)."""
    length = tl.cdiv(tl.cdiv(seq_len - begin, num_sections), TILE) * TILE
    return tl.maximum(length, _MIN_SECTION)


@triton.jit
def _first_seen(position, window, TILE: tl.constexpr):
    """First position that a token at `position` sees, and where the tiles begin."""
    first = tl.maximum(position - window + 1, 0)
    return first, first // TILE * TILE


@triton.jit(do_not_specialize=["stride_table", "num_kv_heads", "group", "window"])
def _decode(
    out, partial, log_totals, query, cache, tables, seq_lens, stride_query, stride_table, num_kv_heads, group,
    scale, window, cap,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    seq, section, num_sections = tl.program_id(0).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    parts = tl.cdiv(group, ROWS)  # programs that share a KV head, where it has many query heads
    head = tl.program_id(1) // parts
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    first, begin = seq_len * 0, seq_len * 0
    if HAS_WINDOW:
        first, begin = _first_seen(seq_len - 1, window, TILE)
    end = seq_len
    if IS_SPLIT:
        length = _section(seq_len, begin, num_sections, TILE)
        begin += section * length
        end = tl.minimum(begin + length, seq_len)
        if begin >= end:
            return
    rows, dims = tl.program_id(1) % parts * ROWS + tl.arange(0, ROWS), tl.arange(0, DIM)
    is_real = (rows < group)[:, None] & (dims < HEAD_DIM)[None, :]
    heads = head * group + rows
    q = tl.load(query + seq * stride_query + heads[:, None] * HEAD_DIM + dims[None, :], mask=is_real, other=0.0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    firsts, lasts = tl.zeros((ROWS,), tl.int32) + first, tl.zeros((ROWS,), tl.int32) + (seq_len - 1)
    best, total, acc = _walk(
        q, best, total, acc, cache, tables + seq * stride_table, head, num_kv_heads, begin, end, firsts, lasts,
        scale, cap, BLOCK_SIZE, HEAD_DIM, DIM, TILE, True, HAS_WINDOW, HAS_CAP,
    )  # fmt: skip
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    row = seq * num_kv_heads * group + heads  # [ROWS]
    if IS_SPLIT:
        row = row * num_sections + section
        tl.store(partial + row[:, None] * HEAD_DIM + dims[None, :], result, mask=is_real)
        tl.store(log_totals + row, best + tl.log2(total), mask=rows < group)
    else:
        converted = narrow(result, out.dtype.element_ty)
        tl.store(out + row[:, None] * HEAD_DIM + dims[None, :], converted, mask=is_real)


@triton.jit(do_not_specialize=["num_heads", "num_sections", "window"])
def _reduce(
    out, partial, log_totals, seq_lens, num_heads, num_sections, window,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr, SECTIONS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    begin = seq_len * 0
    if HAS_WINDOW:
        _, begin = _first_seen(seq_len - 1, window, TILE)
    num_used = tl.cdiv(seq_len - begin, _section(seq_len, begin, num_sections, TILE))  # the others hold nothing
    sections, dims = tl.arange(0, SECTIONS), tl.arange(0, DIM)
    row = seq * num_heads + head
    logs = tl.load(log_totals + row * num_sections + sections, mask=sections < num_used, other=float("-inf"))
    best = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(best == float("-inf"), 0.0, best))
    is_real = (sections < num_used)[:, None] & (dims < HEAD_DIM)[None, :]
    places = (row * num_sections + sections)[:, None] * HEAD_DIM + dims[None, :]
    parts = tl.load(partial + places, mask=is_real, other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * HEAD_DIM + dims, narrow(result, out.dtype.element_ty), mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=["num_seqs", "stride_table", "num_kv_heads", "group", "window"])
def _prefill(
    out, query, cache, tables, seq_lens, starts, num_seqs, stride_query, stride_table, num_kv_heads, group,
    scale, window, cap,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    piece, head = tl.program_id(0), tl.program_id(1)
    tokens = ROWS // group  # of a piece
    # Sequence i's pieces begin at number starts[i] // tokens + i: there is room for all of each, and at most one
    # more. The last sequence that begins at or before this piece is the one.
    seq, beyond = piece * 0, num_seqs
    while beyond - seq > 1:
        middle = (seq + beyond) // 2
        if tl.load(starts + middle).to(tl.int32) // tokens + middle <= piece:
            seq = middle
        else:
            beyond = middle
    start = tl.load(starts + seq).to(tl.int32)
    num_new = tl.load(starts + seq + 1).to(tl.int32) - start
    skipped = (piece - (start // tokens + seq)) * tokens  # the sequence's new tokens before this piece
    if skipped >= num_new:
        return
    seq_len = tl.load(seq_lens + seq).to(tl.int32)
    num_cached = seq_len - num_new
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    places = skipped + rows // group  # [ROWS] among the sequence's new tokens
    is_real = ((rows < tokens * group) & (places < num_new))[:, None] & (dims < HEAD_DIM)[None, :]
    heads = head * group + rows % group
    vectors = (start + places).to(tl.int64) * stride_query + heads * HEAD_DIM
    q = tl.load(query + vectors[:, None] + dims[None, :], mask=is_real, other=0.0)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM), tl.float32)
    lasts = tl.minimum(num_cached + places, seq_len - 1)
    firsts = lasts * 0
    table = tables + seq.to(tl.int64) * stride_table
    begin = num_cached * 0
    middle = (num_cached + skipped + 1) // TILE * TILE  # before it, every row sees everything
    end = tl.minimum(num_cached + skipped + tokens, seq_len)
    if HAS_WINDOW:
        firsts = tl.maximum(lasts - window + 1, 0)
        _, begin = _first_seen(num_cached + skipped, window, TILE)
        middle = begin
    else:
        best, total, acc = _walk(
            q, best, total, acc, cache, table, head, num_kv_heads, begin, middle, firsts, lasts,
            scale, cap, BLOCK_SIZE, HEAD_DIM, DIM, TILE, False, HAS_WINDOW, HAS_CAP,
        )  # fmt: skip
    best, total, acc = _walk(
        q, best, total, acc, cache, table, head, num_kv_heads, middle, end, firsts, lasts,
        scale, cap, BLOCK_SIZE, HEAD_DIM, DIM, TILE, True, HAS_WINDOW, HAS_CAP,
    )  # fmt: skip
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    num_heads = num_kv_heads * group
    targets = ((start + places).to(tl.int64) * num_heads + heads) * HEAD_DIM
    tl.store(out + targets[:, None] + dims[None, :], narrow(result, out.dtype.element_ty), mask=is_real)


def plan_write(layout: KVLayout, slot_mapping: torch.Tensor) -> None:
    """Nothing to prepare."""


def write_kv(kv_cache: torch.Tensor, key_value: torch.Tensor, slot_mapping: torch.Tensor, plan: None = None) -> None:
    """See `kernels.reference.attention.write_kv`; tokens with a negative slot are not stored."""
    layout = layout_of(kv_cache)
    key_value = dense_heads(key_value)
    num_tokens, num_heads = key_value.shape[:2]
    if num_tokens:
        _write[(num_tokens,)](
            kv_cache, key_value, slot_mapping, key_value.stride(0), num_heads,
            BLOCK_SIZE=layout.block_size, HEAD_DIM=layout.head_dim, HEADS=padded(num_heads),
            DIM=padded_head_dim(layout.head_dim), num_warps=4,
        )  # fmt: skip


@dataclass(slots=True)
class DecodePlan:
    """What the layers of one step, or of one captured graph, share. Holds the sections' results between the two
    kernels, so that they are allocated by the first layer only."""

    num_sections: int
    scratch: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # by number of query heads

    def sections(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[num_seqs, num_heads, num_sections, head_dim]` and `[num_seqs, num_heads, num_sections]`, float32."""
        num_seqs, num_heads, head_dim = query.shape
        found = self.scratch.get(num_heads)
        if found is None or found[0].shape[0] != num_seqs:
            shape = (num_seqs, num_heads, self.num_sections)
            found = self.scratch[num_heads] = (
                torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device),
                torch.empty(shape, dtype=torch.float32, device=query.device),
            )
        return found


def plan_decode(layout: KVLayout, block_tables: torch.Tensor, seq_lens: torch.Tensor, dtype: torch.dtype) -> DecodePlan:
    """How many sections each sequence is cut into, from shapes alone; the lengths are read by the device."""
    max_tokens = block_tables.shape[1] * layout.block_size
    return DecodePlan(
        num_splits(seq_lens.shape[0], layout.num_kv_heads, max_tokens, _num_units(block_tables.device.index))
    )


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    plan: DecodePlan | None = None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """See `kernels.reference.attention.paged_decode`; a sequence of length 0 gives zeros."""
    layout = layout_of(kv_cache)
    group = check_query(query, layout)
    plan = plan_decode(layout, block_tables, seq_lens, query.dtype) if plan is None else plan
    query, block_tables = dense_heads(query), _dense_rows(block_tables)
    num_seqs, num_heads, head_dim = query.shape
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=query.dtype, device=query.device)
    if not num_seqs:
        return out
    dim = padded_head_dim(head_dim)
    tiling, is_split = DECODE[dim, query.itemsize], plan.num_sections > 1
    partial, log_totals = plan.sections(query) if is_split else (out, out)
    grid = (num_seqs, layout.num_kv_heads * -(-group // tiling.rows), plan.num_sections)
    _decode[grid](
        out, partial, log_totals, query, kv_cache, block_tables, seq_lens, query.stride(0), block_tables.stride(0),
        layout.num_kv_heads, group, scale, window, soft_cap,
        BLOCK_SIZE=layout.block_size, HEAD_DIM=head_dim, DIM=dim, ROWS=tiling.rows, TILE=tiling.tile,
        IS_SPLIT=is_split, HAS_WINDOW=window > 0, HAS_CAP=soft_cap > 0,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    if is_split:
        _reduce[(num_seqs, num_heads)](
            out, partial, log_totals, seq_lens, num_heads, plan.num_sections, window,
            HEAD_DIM=head_dim, DIM=dim, TILE=tiling.tile, SECTIONS=MAX_SPLITS, HAS_WINDOW=window > 0, num_warps=4,
        )  # fmt: skip
    return out


def plan_prefill(
    layout: KVLayout,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Nothing to prepare: each program finds its sequence."""


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
    """See `kernels.reference.attention.paged_prefill`."""
    layout = layout_of(kv_cache)
    group = check_query(query, layout)
    query, block_tables = dense_heads(query), _dense_rows(block_tables)
    num_tokens, num_heads, head_dim = query.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    num_seqs = seq_lens.shape[0]
    if not num_tokens:
        return out
    dim = padded_head_dim(head_dim)
    tiling = prefill_tiling(dim, query.itemsize, capability(query.device.index))
    if group > tiling.rows:
        raise ValueError(f"{group} query heads per KV head are more than the {tiling.rows} rows of a tile")
    grid = (num_tokens // (tiling.rows // group) + num_seqs, layout.num_kv_heads)
    _prefill[grid](
        out, query, kv_cache, block_tables, seq_lens, query_start_loc, num_seqs, query.stride(0),
        block_tables.stride(0), layout.num_kv_heads, group, scale, window, soft_cap,
        BLOCK_SIZE=layout.block_size, HEAD_DIM=head_dim, DIM=dim, ROWS=tiling.rows, TILE=tiling.tile,
        HAS_WINDOW=window > 0, HAS_CAP=soft_cap > 0, num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    return out


def dense_heads(heads: torch.Tensor) -> torch.Tensor:
    """`heads` `[num_tokens, num_heads, head_dim]`, copied unless each token's heads lie together."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()


def _dense_rows(tables: torch.Tensor) -> torch.Tensor:
    return tables if tables.stride(1) == 1 else tables.contiguous()


@lru_cache
def _num_units(device_index: int | None) -> int:
    """Multiprocessors of a device; interpreted, a few, so that long sequences have sections there too."""
    if not torch.cuda.is_available():
        return 4
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


@lru_cache
def capability(device_index: int | None) -> int:
    """Compute capability of a device, 90 for 9.0; where there is none, that of what the tiles were chosen for."""
    if not torch.cuda.is_available():
        return 90
    major, minor = torch.cuda.get_device_capability(device_index)
    return 10 * major + minor
