"""How large the attention kernels' tiles are: the one table of sizes that a device may want otherwise.

The keys are the two that decide registers and shared memory: the padded head dimension and the bytes of an element.
Nothing is tried out at run time, so a start costs no benchmark and a captured graph holds what was tested.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of one kernel."""

    rows: int  # query rows of a program: heads that share a KV head, times tokens
    tile: int  # tokens of the cache that are read at once
    num_warps: int
    num_stages: int  # tiles under way at once


# (padded head dimension, bytes of an element) -> sizes. Float32 products use no matrix units; their tiles are small.
DECODE: dict[tuple[int, int], Tiling] = {
    (32, 2): Tiling(16, 128, 4, 3),
    (64, 2): Tiling(16, 128, 4, 3),
    (128, 2): Tiling(16, 64, 4, 3),
    (256, 2): Tiling(16, 32, 4, 3),
    (32, 4): Tiling(16, 32, 4, 2),
    (64, 4): Tiling(16, 32, 4, 2),
    (128, 4): Tiling(16, 32, 8, 2),
    (256, 4): Tiling(16, 16, 8, 2),
}
PREFILL: dict[tuple[int, int], Tiling] = {
    (32, 2): Tiling(128, 64, 8, 3),
    (64, 2): Tiling(128, 64, 8, 3),
    (128, 2): Tiling(128, 64, 8, 3),
    (256, 2): Tiling(64, 32, 8, 2),
    (32, 4): Tiling(32, 32, 4, 2),
    (64, 4): Tiling(32, 32, 4, 2),
    (128, 4): Tiling(32, 32, 8, 1),
    (256, 4): Tiling(16, 16, 8, 1),
}
# Before compute capability 9.0 products read their factors from registers: there is less room.
PREFILL_BEFORE_90: dict[tuple[int, int], Tiling] = {(128, 2): Tiling(64, 64, 8, 3)}
MAX_HEAD_DIM = 256
MAX_SPLITS = 64  # sections of a sequence in a decode; a power of two
MIN_SECTION = 256  # tokens below which another section costs more than it brings
PROGRAMS_PER_UNIT = 4  # programs per multiprocessor that keep its memory pipes full


def prefill_tiling(dim: int, itemsize: int, capability: int) -> Tiling:
    """Of a prefill, for a padded head dimension, bytes of an element and a device's compute capability (80, 90)."""
    older = PREFILL_BEFORE_90.get((dim, itemsize)) if capability < 90 else None
    return older or PREFILL[dim, itemsize]


def padded(size: int) -> int:
    """The next power of two, at least 16: what a tile's side must be."""
    return max(16, 1 << (size - 1).bit_length())


def padded_head_dim(head_dim: int) -> int:
    """The key's first part.

    Raises:
        ValueError: the head is larger than any tile.
    """
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} is more than the {MAX_HEAD_DIM} that the Triton kernels have tiles for")
    return max(32, padded(head_dim))


def num_splits(num_seqs: int, num_kv_heads: int, max_tokens: int, num_units: int) -> int:
    """Sections per sequence of a decode: enough programs for `num_units` multiprocessors, none shorter than worth it.

    Made of shapes only, so that a captured graph is right for every length that fits its tables.
    """
    wanted = PROGRAMS_PER_UNIT * num_units // max(1, num_seqs * num_kv_heads)
    return max(1, min(wanted, -(-max_tokens // MIN_SECTION), MAX_SPLITS))
