"""The decoder's row-wise operations on a device: `kernels.reference.elementwise`, each in one pass over memory.

All of them are bound by memory, so what is done together is what saves a pass: the residual's addition with the norm
after it; a head's norm, its rotation and the write to the cache.

    program of           computes
    _norm                some rows, whole
    _rotate              the heads of one token
    _gate                a stretch of one token's outputs
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.attention import dense_heads
from kernels.gpu.precision import narrow
from kernels.gpu.tiling import padded, padded_head_dim
from kernels.layout import layout_of

_ELEMENTS = 2048  # of a program of small rows
_GATE_TILE = 1024
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_rows", "per_outer", "eps"])
def _norm(
    out, x, residual, weight, num_rows, per_outer, stride_outer, stride_inner, stride_residual, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    is_real = (rows < num_rows)[:, None] & (columns < SIZE)[None, :]
    wide_rows = rows.to(tl.int64)
    places = wide_rows // per_outer * stride_outer + wide_rows % per_outer * stride_inner
    values = tl.load(x + places[:, None] + columns[None, :], mask=is_real, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        # The sum is rounded before it is used, as it is when the two are separate operations.
        sums = residual + (wide_rows * stride_residual)[:, None] + columns[None, :]
        values += tl.load(sums, mask=is_real, other=0.0).to(tl.float32)
        rounded = narrow(values, residual.dtype.element_ty)
        tl.store(sums, rounded, mask=is_real)
        values = rounded.to(tl.float32)
    factor = 1 / tl.sqrt_rn(tl.sum(values * values, 1) / SIZE + eps)
    scale = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    result = narrow(values * factor[:, None] * scale[None, :], out.dtype.element_ty)
    tl.store(out + (wide_rows * SIZE)[:, None] + columns[None, :], result, mask=is_real)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.reference.elementwise.rms_norm`; of `[..., hidden_size]` with up to three dimensions, any view."""
    x = x if x.dim() <= 3 and x.stride(-1) == 1 else x.contiguous().view(-1, x.shape[-1])
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    per_outer = x.shape[1] if x.dim() == 3 else 1
    _launch_norm(out, x, None, weight, eps, per_outer, x.stride(1) if x.dim() == 3 else 0)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `kernels.reference.elementwise.add_rms_norm`; of `[num_tokens, hidden_size]`."""
    if residual.stride(1) != 1:
        raise ValueError("the residual is changed in place: its rows must be dense")
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(out, x, residual, weight, eps, 1, 0)
    return out


def _launch_norm(
    out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    per_outer: int, stride_inner: int,
) -> None:  # fmt: skip
    size = x.shape[-1]
    num_rows = x.numel() // size
    if not num_rows:
        return
    width = padded(size)
    rows = max(1, _ELEMENTS // width) if width <= 256 else 1  # norms of heads: many short rows
    stride_outer = x.stride(0) if x.dim() > 1 else size
    _norm[(triton.cdiv(num_rows, rows),)](
        out, x, out if residual is None else residual, weight, num_rows, per_outer, stride_outer, stride_inner,
        0 if residual is None else residual.stride(0), eps,
        SIZE=size, WIDTH=width, ROWS=rows, HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(4, width // 512)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rotated"])
def _rotate(
    heads, cos, sin, stride_token, num_heads, num_rotated,
    q_norm, k_norm, cache, slot_mapping, num_kv_heads, eps,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_CACHE: tl.constexpr,
):  # fmt: skip
    """Of one token's heads the first `num_rotated` are rotated. Without a cache, in place; with one, the first
    `num_heads` in place, and the 2 * num_kv_heads after them go to the cache."""
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    dims = tl.arange(0, HALF)
    half: tl.constexpr = HEAD_DIM // 2
    is_head = rows < (num_heads + 2 * num_kv_heads if HAS_CACHE else num_heads)
    is_real = is_head[:, None] & (dims < half)[None, :]
    places = heads + token * stride_token + rows[:, None] * HEAD_DIM + dims[None, :]
    low = tl.load(places, mask=is_real, other=0.0).to(tl.float32)
    high = tl.load(places + half, mask=is_real, other=0.0).to(tl.float32)
    is_rotated = (rows < num_rotated)[:, None]
    dtype: tl.constexpr = heads.dtype.element_ty
    if HAS_NORM:
        is_query = (rows < num_heads)[:, None]
        factor = 1 / tl.sqrt_rn((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)
        is_dim = dims < half
        for_queries = tl.load(q_norm + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        for_keys = tl.load(k_norm + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        normed = narrow(low * factor[:, None] * tl.where(is_query, for_queries, for_keys), dtype).to(tl.float32)
        low = tl.where(is_rotated, normed, low)
        for_queries = tl.load(q_norm + half + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        for_keys = tl.load(k_norm + half + dims, mask=is_dim, other=0.0).to(tl.float32)[None, :]
        normed = narrow(high * factor[:, None] * tl.where(is_query, for_queries, for_keys), dtype).to(tl.float32)
        high = tl.where(is_rotated, normed, high)
    angle = token * HEAD_DIM + dims
    c = tl.load(cos + angle, mask=dims < half, other=0.0)[None, :]
    s = tl.load(sin + half + angle, mask=dims < half, other=0.0)[None, :]
    first = narrow(tl.where(is_rotated, low * c - high * s, low), dtype)
    second = narrow(tl.where(is_rotated, high * c + low * s, high), dtype)
    is_in_place = is_real & (rows < num_heads)[:, None]
    tl.store(places, first, mask=is_in_place)
    tl.store(places + half, second, mask=is_in_place)
    if HAS_CACHE:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        is_stored = is_real & (rows >= num_heads)[:, None] & (slot >= 0)
        tiles = slot // BLOCK_SIZE * (2 * num_kv_heads) + rows - num_heads
        vectors = tiles * BLOCK_SIZE + slot % BLOCK_SIZE
        targets = cache + vectors[:, None] * HEAD_DIM + dims[None, :]
        tl.store(targets, narrow(first.to(tl.float32), cache.dtype.element_ty), mask=is_stored)
        tl.store(targets + half, narrow(second.to(tl.float32), cache.dtype.element_ty), mask=is_stored)


_HEADS = 16  # of a program


def rope(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `kernels.reference.elementwise.rope`; in place, of a view in which a token's heads lie together."""
    _check_heads(heads)
    num_tokens, num_heads, head_dim = heads.shape
    if num_tokens:
        _rotate[(num_tokens, triton.cdiv(num_heads, _HEADS))](
            heads, cos, sin, heads.stride(0), num_heads, num_heads, heads, heads, heads, heads, 0, 0.0,
            HEAD_DIM=head_dim, HALF=padded_head_dim(head_dim) // 2, HEADS=_HEADS, BLOCK_SIZE=1,
            HAS_NORM=False, HAS_CACHE=False, num_warps=4,
        )  # fmt: skip


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
    """See `kernels.reference.elementwise.rope_and_write_kv`; keys stay as they were in `qkv`, and those with a negative
    slot are not stored."""
    _check_heads(qkv)
    layout = layout_of(kv_cache)
    num_tokens, total, head_dim = qkv.shape
    if total != num_heads + 2 * num_kv_heads or num_kv_heads != layout.num_kv_heads or head_dim != layout.head_dim:
        raise ValueError(f"qkv {tuple(qkv.shape)} isn't {num_heads} + 2 * {num_kv_heads} heads of {layout.head_dim}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("queries and keys are normed both or neither")
    if num_tokens:
        _rotate[(num_tokens, triton.cdiv(total, _HEADS))](
            qkv, cos, sin, qkv.stride(0), num_heads, num_heads + num_kv_heads,
            qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, kv_cache, slot_mapping, num_kv_heads,
            eps, HEAD_DIM=head_dim, HALF=padded_head_dim(head_dim) // 2, HEADS=_HEADS, BLOCK_SIZE=layout.block_size,
            HAS_NORM=q_norm is not None, HAS_CACHE=True, num_warps=4,
        )  # fmt: skip


def _check_heads(heads: torch.Tensor) -> None:
    if dense_heads(heads) is not heads:
        raise ValueError(f"heads are rotated in place: each token's must lie together, got strides {heads.stride()}")


@triton.jit
def _gate(out, gate_up, stride_token, size, TILE: tl.constexpr, IS_GELU: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_real = columns < size
    gate = tl.load(gate_up + token * stride_token + columns, mask=is_real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride_token + size + columns, mask=is_real, other=0.0).to(tl.float32)
    # Both gates are gate * sigmoid(z): GELU's 0.5 * (1 + tanh(y)) is sigmoid(2 * y).
    z = gate
    if IS_GELU:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 * sqrt(2 / pi)
    power = tl.exp2(-tl.abs(z) * _LOG2_E)  # can't overflow
    share = tl.where(z >= 0, 1.0, power) / (1 + power)
    tl.store(out + token * size + columns, narrow(gate * share * up, out.dtype.element_ty), mask=is_real)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.elementwise.silu_and_mul`."""
    return _gated(gate_up, is_gelu=False)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.elementwise.gelu_and_mul`."""
    return _gated(gate_up, is_gelu=True)


def _gated(gate_up: torch.Tensor, *, is_gelu: bool) -> torch.Tensor:
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        _gate[(num_tokens, triton.cdiv(size, _GATE_TILE))](
            out, gate_up, gate_up.stride(0), size, TILE=_GATE_TILE, IS_GELU=is_gelu, num_warps=4
        )
    return out
