"""KV caches with known content and NaN wherever a kernel has no business."""

from __future__ import annotations

import torch

from kernels.layout import KVLayout, allocate
from kernels.reference import attention as reference


def poisoned_cache(layout: KVLayout, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    """One layer's cache in which every slot that isn't written is NaN."""
    return allocate(layout, 1, num_blocks, dtype)[0].fill_(float("nan"))


def filled(
    seq_lens: list[int], shape: tuple[int, int, int, int], dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(cache, block tables, seq_lens): random KV in scattered blocks, NaN in every other slot.

    Table entries past the end of a sequence point to a block that is all NaN.
    """
    head_dim, num_kv_heads, _, block_size = shape
    generator = torch.Generator().manual_seed(seed)
    layout = KVLayout(num_kv_heads, block_size, head_dim)
    num_blocks = [layout.num_blocks_for(n) for n in seq_lens]
    total = sum(num_blocks) + 3
    cache = poisoned_cache(layout, total, dtype)
    ids = torch.randperm(total - 1, generator=generator)
    tables = torch.full((len(seq_lens), max(num_blocks) + 2), total - 1, dtype=torch.int32)
    taken = 0
    for row, (n, needed) in enumerate(zip(seq_lens, num_blocks, strict=True)):
        tables[row, :needed] = ids[taken : taken + needed]
        taken += needed
        kv = torch.randn(n, 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
        slots = torch.tensor([int(tables[row, p // block_size]) * block_size + p % block_size for p in range(n)])
        reference.write_kv(cache, kv, slots)
    return cache, tables, torch.tensor(seq_lens, dtype=torch.int32)
