"""Sections and tiles come from shapes alone."""

from __future__ import annotations

import pytest

from kernels.gpu.tiling import DECODE, PREFILL, num_splits, padded_head_dim, prefill_tiling


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "max_tokens", "expected"),
    [
        (256, 8, 40_960, 1),  # enough programs without sections
        (1, 8, 40_960, 64),
        (1, 1, 40_960, 64),  # no more than there is room for
        (8, 8, 40_960, 8),  # 4 programs for each of 132 units
        (1, 8, 256, 1),  # too short to be cut
        (1, 8, 257, 2),
        (0, 8, 4096, 16),
    ],
)
def test_sections(num_seqs: int, num_kv_heads: int, max_tokens: int, expected: int) -> None:
    assert num_splits(num_seqs, num_kv_heads, max_tokens, 132) == expected


def test_every_head_dim_has_tiles() -> None:
    for head_dim in range(8, 257, 8):
        for itemsize in (2, 4):
            key = padded_head_dim(head_dim), itemsize
            assert key in DECODE
            assert key in PREFILL
            assert key[0] >= head_dim
    with pytest.raises(ValueError, match="more than the 256"):
        padded_head_dim(257)


def test_older_devices_have_smaller_tiles_where_registers_are_short() -> None:
    assert prefill_tiling(128, 2, 80).rows < prefill_tiling(128, 2, 90).rows
    assert prefill_tiling(64, 2, 80) == prefill_tiling(64, 2, 90)
