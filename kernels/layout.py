"""The KV cache's layout: the one place that knows shapes and slot arithmetic.

One tensor per layer, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`: a block is one contiguous piece of memory,
in it the keys of all heads, then the values of all heads. So a block is copied with one memcpy per layer, and a kernel
that walks a block table reads `block_size * head_dim` contiguous elements per head.

    quantity            range                       meaning
    block_id            [0, num_blocks)             a physical block
    logical block       [0, ceil(len / block_size)) index into a sequence's block table
    offset              [0, block_size)             position inside a block
    slot                [0, num_blocks*block_size)  block_id * block_size + offset: one token's place in each layer
    tile                [0, num_blocks*2*heads)     (block_id * 2 + is_value) * num_kv_heads + head: block_size vectors
    vector              [0, tiles * block_size)     tile * block_size + offset: head_dim elements
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 64  # bytes: a cache line, a vector register


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one layer's part of a block."""

    num_kv_heads: int
    block_size: int  # tokens per block
    head_dim: int

    @property
    def elements_per_block(self) -> int:
        """Elements of one block in one layer, keys and values."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim

    def bytes_per_block(self, num_layers: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers."""
        return self.elements_per_block * num_layers * dtype.itemsize

    def cache_shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        """Shape of one layer's cache."""
        return (num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


def layout_of(kv_cache: torch.Tensor) -> KVLayout:
    """The layout of one layer's cache.

    Raises:
        ValueError: not a contiguous `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.
    """
    if kv_cache.dim() != 5 or kv_cache.shape[1] != 2 or not kv_cache.is_contiguous():
        raise ValueError(
            "a KV cache is a contiguous [num_blocks, 2, num_kv_heads, block_size, head_dim] tensor, "
            f"got {tuple(kv_cache.shape)}"
        )
    return KVLayout(*kv_cache.shape[2:])


def allocate(layout: KVLayout, num_layers: int, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """The KV pool of all layers: `[num_layers, *cache_shape]`, zeros, on the CPU.

    Address space is taken now, memory as blocks are first written: starting costs no pass over gigabytes.

    Raises:
        MemoryError: there isn't so much.
    """
    shape = (num_layers, *layout.cache_shape(num_blocks))
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = _zeros(num_bytes + _ALIGNMENT)
    first = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[first : first + num_bytes]).view(dtype).view(shape)


def _zeros(num_bytes: int) -> npt.NDArray[np.uint8]:
    """On large pages where the system has them: a step reads blocks all over the pool, and small pages' addresses
    take a tenth of its time."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(num_bytes, dtype=np.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(str(error)) from error
    with contextlib.suppress(OSError):  # a system without large pages: slower, nothing else
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def tiles_of_blocks(layout: KVLayout, block_ids: torch.Tensor) -> torch.Tensor:
    """Tiles of blocks `[..., n]`: `[..., 2 * num_kv_heads, n]`, all keys' heads, then all values' heads (int64)."""
    heads = torch.arange(2 * layout.num_kv_heads)
    return block_ids.to(torch.int64).unsqueeze(-2) * heads.numel() + heads.unsqueeze(-1)


def vectors_of_slots(layout: KVLayout, slots: torch.Tensor) -> torch.Tensor:
    """Vectors of slots `[n]`: `[n, 2 * num_kv_heads]`, all keys' heads, then all values' heads (int64)."""
    heads = torch.arange(2 * layout.num_kv_heads)
    slots = slots.to(torch.int64)
    tiles = torch.div(slots, layout.block_size, rounding_mode="floor").unsqueeze(-1) * heads.numel() + heads
    return tiles * layout.block_size + (slots % layout.block_size).unsqueeze(-1)


def check_query(query: torch.Tensor, layout: KVLayout) -> int:
    """Query heads per KV head of `query` `[num_tokens, num_heads, head_dim]`.

    Raises:
        ValueError: the shapes don't fit together.
    """
    if query.dim() != 3 or query.shape[2] != layout.head_dim or query.shape[1] % layout.num_kv_heads:
        raise ValueError(
            f"query {tuple(query.shape)} must be [num_tokens, num_heads, {layout.head_dim}] with num_heads "
            f"a multiple of {layout.num_kv_heads} KV heads"
        )
    return int(query.shape[1]) // layout.num_kv_heads
